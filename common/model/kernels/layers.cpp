// A decoder's layers in one call: the kernels of a step one after the other, without a return to
// Python between them. It adds no arithmetic of its own, so the bits are those of the single calls.
//
// A layer has two halves, attention and MLP:
//
//     residual += hidden;  hidden = o(attention(qkv(norm(residual))))
//     residual += hidden;  hidden = down(silu(gate) · up), of norm(residual)
//
// A call computes the halves `begin … end-1`. It ends where Python has work in between: to add up the
// ranks' sums, or to compute experts.

#include "kernels.h"

namespace {

// The structs have the same fields in the same order in native_layers.py.

// A packed matrix [rows, inputs] of a linear layer; `scales`, `bias` and `grouped` may be null.
struct Packed {
    int64_t rows, inputs, block;
    const void *words, *scales;
    const void* grouped;  // `Grouped` of grouped.cpp, instead of the words
    const void* bias;
};

struct Norm {
    const void* weight;
    double eps;
};

struct Layer {
    int64_t group, index;  // KV group, and the layer's place in its cache
    Norm input_norm;
    Packed qkv, o;
    Norm q_norm, k_norm;  // their weights may be null
    Norm mlp_norm;
    Packed gate_up, down;  // no rows: the caller computes experts from `normed`
};

// The layers of one KV group in a step; `paged_attention` says what each is.
struct Group {
    int64_t heads, kv_heads, dim, format, window, chunked;
    double scale;
    uint8_t* cache;
    int64_t layer_bytes, plane_bytes;  // from layer to layer, from keys to values
    int64_t block_size, sequences;
    const int64_t* slots;
    const int32_t *rows, *counts, *starts, *skipped, *tables;
    int64_t table_stride;
};

// Buffers are [tokens, …], contiguous. `inner` holds what a product reads, `wide` the results of
// qkv and gate_up.
struct Step {
    int64_t tokens, size;
    const void* inputs;  // of the first layer
    void* residual;
    void* hidden;  // a half's result
    float* sums;   // instead of `hidden`, if a rank has only a part of it
    void *inner, *wide;
    const void *cos, *sin;
};

class Layers {
public:
    Layers(int64_t dtype, int64_t threads, const Group* groups, const Step& step)
        : dtype(dtype), threads(threads), groups(groups), step(step) {}

    void attention(const Layer& layer, bool first) const {
        const Group& group = groups[layer.group];
        if (first) {
            rms_norm(dtype, threads, step.tokens, step.size, step.inputs, step.size,
                     layer.input_norm.weight, layer.input_norm.eps, step.inner);
        } else {
            add(layer.input_norm, step.residual);
        }
        multiply(layer.qkv, step.inner, step.wide);
        uint8_t* keys = group.cache + layer.index * group.layer_bytes;
        uint8_t* values = keys + group.plane_bytes;
        rotate_and_cache(dtype, threads, step.tokens, group.heads, group.kv_heads, group.dim,
                         group.block_size, group.format, step.wide, layer.q_norm.weight,
                         layer.k_norm.weight, layer.q_norm.eps, step.cos, step.sin, keys, values,
                         group.slots);
        paged_attention(dtype, threads, group.sequences, group.heads, group.kv_heads, group.dim,
                        group.block_size, group.format, group.window, group.chunked, group.scale,
                        step.wide, layer.qkv.rows, keys, values, group.rows, group.counts,
                        group.starts, group.skipped, group.tables, group.table_stride, step.inner);
        reduce(layer.o);
    }

    void mlp(const Layer& layer, bool first) const {
        add(layer.mlp_norm, first ? step.inputs : step.residual);
        if (!layer.gate_up.rows) return;
        multiply(layer.gate_up, step.inner, step.wide);
        silu_and_mul(dtype, threads, step.tokens, layer.gate_up.rows / 2, step.wide, step.inner);
        reduce(layer.down);
    }

private:
    const int64_t dtype, threads;
    const Group* groups;
    const Step& step;

    // The first sum leaves the caller's inputs as they are.
    void add(const Norm& norm, const void* residual) const {
        add_rms_norm(dtype, threads, step.tokens, step.size, residual, step.hidden, norm.weight,
                     norm.eps, step.residual, step.inner);
    }

    void reduce(const Packed& matrix) const {
        if (step.sums) {
            multiply(matrix, step.inner, step.sums, true);
        } else {
            multiply(matrix, step.inner, step.hidden);
        }
    }

    void multiply(const Packed& matrix, const void* x, void* out, bool partial = false) const {
        const void* bias = partial ? nullptr : matrix.bias;
        if (matrix.grouped) {
            grouped_linear(dtype, threads, step.tokens, x, matrix.inputs, matrix.grouped, bias,
                           partial, out);
        } else {
            linear(dtype, threads, step.tokens, matrix.rows, matrix.inputs, matrix.block, x,
                   matrix.inputs, matrix.words, matrix.scales, bias, partial, out);
        }
    }
};

}  // namespace

// Computes the halves `begin … end-1` of the layers, an even one the attention of layer half / 2, an
// odd one its MLP.
EXPORT void run_layers(int64_t dtype, int64_t threads, int64_t begin, int64_t end,
                       const void* layers, const void* groups, const void* step) {
    const Layers all(dtype, threads, (const Group*)groups, *(const Step*)step);
    for (int64_t half = begin; half < end; half++) {
        const Layer& layer = ((const Layer*)layers)[half / 2];
        if (half % 2 == 0) {
            all.attention(layer, half == 0);
        } else {
            all.mlp(layer, half == 1);
        }
    }
}
