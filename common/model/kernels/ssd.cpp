// Mamba-2 (state-space duality, arXiv:2405.21060) with the short convolution before it, token by
// token: a state depends on its tokens alone, not on the chunks in which they came.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tiles.h"
#include "vec.h"

namespace {

constexpr int64_t CHANNELS = 64;  // of the convolution, that a thread takes at once

struct Sizes {
    int64_t heads, head_dim, groups, state_dim, kernel;

    int64_t inner() const { return heads * head_dim; }
    int64_t width() const { return inner() + 2 * groups * state_dim; }  // x, B, C
    int64_t matrix() const { return head_dim * state_dim; }
    int64_t numbers() const { return heads * matrix() + (kernel - 1) * width(); }
};

// The tokens of one sequence in a step, and where its states lie.
struct Sequence {
    int64_t row, count, start, block_size, numbers;
    const int32_t* table;
    float* states;

    const float* before() const {
        return start > 0 ? states + table[(start - 1) / block_size] * numbers : nullptr;
    }
    // Where the state after token t of the step is kept, if it is.
    float* after(int64_t t) const {
        const int64_t position = start + t;
        const bool ends = t + 1 == count || (position + 1) % block_size == 0;
        const int32_t block = ends ? table[position / block_size] : -1;
        return block < 0 ? nullptr : states + block * numbers;
    }
};

// Convolves channels first … first + count - 1 of a sequence's inputs, and applies SiLU.
template <typename T>
void convolve(const Sizes& sizes, const Sequence& sequence, int64_t first, int64_t count,
              const T* inputs, const float* weights, const float* bias, float* out) {
    const int64_t width = sizes.width(), before = sizes.kernel - 1;
    const int64_t offset = sizes.heads * sizes.matrix() + first;
    std::vector<float> past(before * count);
    if (const float* from = sequence.before())
        for (int64_t j = 0; j < before; j++)
            std::copy_n(from + offset + j * width, count, past.data() + j * count);
    for (int64_t t = 0; t < sequence.count; t++) {
        const int64_t place = (sequence.row + t) * width + first;
        for_vectors(count, [&](int64_t i, int64_t some) {
            const Vec now = load_some(inputs + place + i, some);
            const float* weight = weights + first + i;
            Vec total = load_some(bias + first + i, some);
            for (int64_t j = 0; j < before; j++) {
                float* held = past.data() + j * count + i;
                const Vec old = load_some(held, some);
                total = fma(old, load_some(weight + j * width, some), total);
                store_some(held, j + 1 < before ? load_some(held + count, some) : now, some);
            }
            total = fma(now, load_some(weight + before * width, some), total);
            store_some(out + place + i, total / (exp(-total) + 1.0f), some);
        });
        if (float* to = sequence.after(t))
            for (int64_t j = 0; j < before; j++)
                std::copy_n(past.data() + j * count, count, to + offset + j * width);
    }
}

// state = state · decay + x ⊗ B; out = state C + skip · input, where x = input · step
void step(const Sizes& sizes, float* state, const float* input, const float* b, const float* c,
          float decay, float step, float skip, float* out) {
    for (int64_t p = 0; p < sizes.head_dim; p++) {
        float* row = state + p * sizes.state_dim;
        const Vec scaled = broadcast(input[p] * step);
        Vec total = {};
        for_vectors(sizes.state_dim, [&](int64_t n, int64_t some) {
            const Vec now = fma(load_some(b + n, some), scaled, load_some(row + n, some) * decay);
            store_some(row + n, now, some);
            total = fma(now, load_some(c + n, some), total);
        });
        out[p] = sum(total) + skip * input[p];
    }
}

void scan_head(const Sizes& sizes, const Sequence& sequence, int64_t head, const float* mixed,
               const float* steps, const float* rates, const float* skips, float* out) {
    const int64_t matrix = sizes.matrix(), group = head / (sizes.heads / sizes.groups);
    std::vector<float> state(matrix);
    if (const float* from = sequence.before())
        std::copy_n(from + head * matrix, matrix, state.data());
    for (int64_t t = 0; t < sequence.count; t++) {
        const int64_t row = sequence.row + t;
        const float* token = mixed + row * sizes.width();
        const float* b = token + sizes.inner() + group * sizes.state_dim;
        const float length = steps[row * sizes.heads + head];
        step(sizes, state.data(), token + head * sizes.head_dim, b,
             b + sizes.groups * sizes.state_dim, std::exp(length * rates[head]), length,
             skips[head], out + row * sizes.inner() + head * sizes.head_dim);
        if (float* to = sequence.after(t)) std::copy_n(state.data(), matrix, to + head * matrix);
    }
}

}  // namespace

// Computes `sequences` of a step, with blocks of states as `delta_net` has them. `inputs` is
// [T, width], `weights` float32 [kernel, width], `bias` [width], `steps` float32 [T, heads], `rates`
// and `skips` [heads], `states` float32 [blocks, numbers], `out` float32 [T, heads · head_dim].
EXPORT void ssd(int64_t dtype, int64_t threads, int64_t sequences, int64_t heads, int64_t head_dim,
                int64_t groups, int64_t state_dim, int64_t kernel, int64_t block_size,
                const void* inputs, const float* weights, const float* bias, const float* steps,
                const float* rates, const float* skips, float* states, const int32_t* rows,
                const int32_t* counts, const int32_t* starts, const int32_t* tables,
                int64_t table_width, float* out) {
    if (sequences == 0) return;
    const Sizes sizes{heads, head_dim, groups, state_dim, kernel};
    const int64_t width = sizes.width(), tokens = rows[sequences - 1] + counts[sequences - 1];
    const int64_t parts = (width + CHANNELS - 1) / CHANNELS, mean = tokens / sequences + 1;
    std::vector<float> mixed(tokens * width);
    auto sequence_of = [&](int64_t s) {
        return Sequence{rows[s],    counts[s],       starts[s],
                        block_size, sizes.numbers(), tables + s * table_width,
                        states};
    };
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        for_rows(threads, sequences * parts, mean * CHANNELS * kernel, [&](int64_t item) {
            const int64_t first = item % parts * CHANNELS;
            convolve(sizes, sequence_of(item / parts), first, std::min(CHANNELS, width - first),
                     (const T*)inputs, weights, bias, mixed.data());
        });
    });
    for_rows(threads, sequences * heads, mean * sizes.matrix(), [&](int64_t item) {
        scan_head(sizes, sequence_of(item / heads), item % heads, mixed.data(), steps, rates, skips,
                  out);
    });
}
