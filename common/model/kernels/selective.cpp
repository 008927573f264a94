// Mamba's selective state space (arXiv:2312.00752), token by token: a state depends on its tokens alone,
// not on the chunks in which they came. Its steps of time, B and C follow from the convolution's
// output, so they are computed between the two functions.

#include <algorithm>
#include <vector>

#include "states.h"

namespace {

using states::Sequence;

constexpr int64_t AT_ONCE = 16;  // channels that a thread takes at once

// Channels with a state [state_dim] each; B and C are those of `width` channels side by side.
struct Sizes {
    int64_t inner, width, state_dim;
};

// state = state · exp(step · rates) + x · step · B; out = state · C + skip · x
float advance(int64_t size, float* state, float x, float step, float skip, const float* rates,
              const float* b, const float* c) {
    const Vec length = broadcast(step), scaled = broadcast(x * step);
    Vec total = {};
    for_vectors(size, [&](int64_t n, int64_t some) {
        const Vec decay = exp(load_some(rates + n, some) * length);
        const Vec now = fma(load_some(b + n, some), scaled, load_some(state + n, some) * decay);
        store_some(state + n, now, some);
        total = fma(now, load_some(c + n, some), total);
    });
    return sum(total) + skip * x;
}

void scan(const Sizes& sizes, const Sequence& sequence, int64_t first, int64_t end,
          const float* inputs, const float* steps, const float* chosen, const float* rates,
          const float* skips, float* out) {
    const int64_t size = sizes.state_dim, heads = sizes.inner / sizes.width;
    std::vector<float> state((end - first) * size);
    if (const float* from = sequence.before())
        std::copy_n(from + first * size, state.size(), state.data());
    for (int64_t t = 0; t < sequence.count; t++) {
        const int64_t row = sequence.row + t;
        for (int64_t i = first; i < end; i++) {
            const float* b = chosen + (row * heads + i / sizes.width) * 2 * size;
            const int64_t place = row * sizes.inner + i;
            out[place] = advance(size, state.data() + (i - first) * size, inputs[place],
                                 steps[place], skips[i], rates + i * size, b, b + size);
        }
        if (float* to = sequence.after(t))
            std::copy_n(state.data(), state.size(), to + first * size);
    }
}

}  // namespace

// Convolves the inputs [T, width] of `sequences` of a step, and applies SiLU, into `out` float32.
// States, of `numbers`, hold the convolution's last inputs `offset` numbers from their beginning.
// Blocks of states are as `delta_net` has them.
EXPORT void convolve(int64_t dtype, int64_t threads, int64_t sequences, int64_t width,
                     int64_t kernel, int64_t offset, int64_t numbers, int64_t block_size,
                     const void* inputs, const float* weights, const float* bias, float* states,
                     const int32_t* rows, const int32_t* counts, const int32_t* starts,
                     const int32_t* tables, int64_t table_width, float* out) {
    if (sequences == 0) return;
    const states::Sequences step{sequences, block_size, numbers,     rows,  counts,
                                 starts,    tables,     table_width, states};
    const states::Convolution convolution{width, kernel, offset, weights, bias};
    with_dtype(dtype, [&](auto zero) {
        convolution.run(threads, step, (const decltype(zero)*)inputs, out);
    });
}

// Scans what `convolve` returned: `inputs` and `steps` of time are [T, inner], `chosen` B and C
// [T, inner / width, 2, state_dim], `rates` [inner, state_dim], `skips` [inner], `out` [T, inner];
// all are float32.
EXPORT void selective_scan(int64_t, int64_t threads, int64_t sequences, int64_t inner,
                           int64_t width, int64_t state_dim, int64_t numbers, int64_t block_size,
                           const float* inputs, const float* steps, const float* chosen,
                           const float* rates, const float* skips, float* states,
                           const int32_t* rows, const int32_t* counts, const int32_t* starts,
                           const int32_t* tables, int64_t table_width, float* out) {
    if (sequences == 0) return;
    const Sizes sizes{inner, width, state_dim};
    const states::Sequences step{sequences, block_size, numbers,     rows,  counts,
                                 starts,    tables,     table_width, states};
    const int64_t parts = (inner + AT_ONCE - 1) / AT_ONCE;
    for_rows(threads, sequences * parts, step.mean() * AT_ONCE * state_dim, [&](int64_t item) {
        const int64_t first = item % parts * AT_ONCE;
        scan(sizes, step[item / parts], first, std::min(first + AT_ONCE, inner), inputs, steps,
             chosen, rates, skips, out);
    });
}
