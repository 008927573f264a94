// Mamba-2 (state-space duality, arXiv:2405.21060) with the short convolution before it, token by
// token: a state depends on its tokens alone, not on the chunks in which they came.

#include <algorithm>
#include <cmath>
#include <vector>

#include "states.h"

namespace {

using states::Sequence;

struct Sizes {
    int64_t heads, head_dim, groups, state_dim, kernel;

    int64_t inner() const { return heads * head_dim; }
    int64_t width() const { return inner() + 2 * groups * state_dim; }  // x, B, C
    int64_t matrix() const { return head_dim * state_dim; }
    int64_t numbers() const { return heads * matrix() + (kernel - 1) * width(); }
};

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
    const states::Sequences step{sequences, block_size, sizes.numbers(), rows, counts,
                                 starts,    tables,     table_width,     states};
    const states::Convolution convolution{sizes.width(), kernel, heads * sizes.matrix(), weights,
                                          bias};
    std::vector<float> mixed(step.tokens() * sizes.width());
    with_dtype(dtype, [&](auto zero) {
        convolution.run(threads, step, (const decltype(zero)*)inputs, mixed.data());
    });
    for_rows(threads, sequences * heads, step.mean() * sizes.matrix(), [&](int64_t item) {
        scan_head(sizes, step[item / heads], item % heads, mixed.data(), steps, rates, skips, out);
    });
}
