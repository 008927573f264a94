// The gated delta rule (Gated DeltaNet, arXiv:2412.06464) with the short convolution before it, token
// by token: a state depends on its tokens alone, not on the chunks in which they came.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tiles.h"
#include "vec.h"

namespace {

// A unit is a key head and the `ratio` value heads that share it. Its state: per value head a matrix
// [key_dim, value_dim], then the last `kernel - 1` inputs of the convolution, [width] each.
struct Sizes {
    int64_t ratio, key_dim, value_dim, kernel;

    int64_t width() const { return 2 * key_dim + ratio * value_dim; }  // query, key, values
    int64_t matrix() const { return key_dim * value_dim; }
    int64_t numbers() const { return ratio * matrix() + (kernel - 1) * width(); }
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Convolves the input with those before it, which `past` has and which move on by one.
template <typename T>
void convolve(const Sizes& sizes, const T* input, const float* weights, float* past, float* out) {
    const int64_t width = sizes.width(), before = sizes.kernel - 1;
    for_vectors(width, [&](int64_t i, int64_t count) {
        store_some(out + i, load_some(input + i, count), count);
    });
    for (int64_t i = 0; i < width; i++) {
        const float* weight = weights + i * sizes.kernel;
        const float now = out[i];
        float total = 0;
        for (int64_t j = 0; j < before; j++) total += past[j * width + i] * weight[j];
        total += now * weight[before];
        for (int64_t j = 0; j + 1 < before; j++) past[j * width + i] = past[(j + 1) * width + i];
        if (before) past[(before - 1) * width + i] = now;
        out[i] = total * sigmoid(total);
    }
}

void normalize(float* x, int64_t size, float scale) {
    Vec squares = {};
    for_vectors(size, [&](int64_t i, int64_t count) {
        const Vec v = load_some(x + i, count);
        squares = fma(v, v, squares);
    });
    const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
    for_vectors(size, [&](int64_t i, int64_t count) {
        store_some(x + i, load_some(x + i, count) * factor, count);
    });
}

// A head's inputs for one token.
struct Token {
    const float *query, *key, *value;
    float decay, beta;
};

// Columns i … of N vectors of `count` numbers (LANES but for the last ones): independent sums hide each
// other's latency.
template <int N>
INLINE void step_columns(const Sizes& sizes, float* matrix, const Token& token, int64_t i,
                         int64_t count, float* out) {
    const int64_t columns = sizes.value_dim;
    Vec known[N] = {}, change[N], result[N] = {};
    for (int64_t k = 0; k < sizes.key_dim; k++) {
        float* row = matrix + k * columns + i;
        for (int j = 0; j < N; j++) {
            const Vec decayed = load_some(row + j * LANES, count) * token.decay;
            store_some(row + j * LANES, decayed, count);
            known[j] = fma(decayed, broadcast(token.key[k]), known[j]);
        }
    }
    for (int j = 0; j < N; j++)
        change[j] = (load_some(token.value + i + j * LANES, count) - known[j]) * token.beta;
    for (int64_t k = 0; k < sizes.key_dim; k++) {
        float* row = matrix + k * columns + i;
        for (int j = 0; j < N; j++) {
            const Vec added =
                fma(broadcast(token.key[k]), change[j], load_some(row + j * LANES, count));
            store_some(row + j * LANES, added, count);
            result[j] = fma(added, broadcast(token.query[k]), result[j]);
        }
    }
    for (int j = 0; j < N; j++) store_some(out + i + j * LANES, result[j], count);
}

// matrix = matrix · decay; matrix += key ⊗ (value - keyᵀ matrix) · beta; out = queryᵀ matrix
void step(const Sizes& sizes, float* matrix, const Token& token, float* out) {
    constexpr int TOGETHER = 4;
    const int64_t columns = sizes.value_dim;
    int64_t i = 0;
    for (; i + TOGETHER * LANES <= columns; i += TOGETHER * LANES)
        step_columns<TOGETHER>(sizes, matrix, token, i, LANES, out);
    for_vectors(columns - i, [&](int64_t j, int64_t count) {
        step_columns<1>(sizes, matrix, token, i + j, count, out);
    });
}

}  // namespace

// Computes `sequences` of a step, whose tokens begin at `rows` and are `counts`; `starts` tokens came
// before. A sequence begins with the state of the block that holds the token before, or with zeros if
// there is none. Its state is written to each block that its table has (no -1) where the block ends,
// and where the tokens end. `inputs` is [T, units, width], `weights` float32 [units, width, kernel],
// `decays` (logarithms) and `betas` float32 [T, units, ratio], `states` float32
// [blocks, units, numbers], `out` float32 [T, units, ratio, value_dim].
EXPORT void delta_net(int64_t dtype, int64_t threads, int64_t sequences, int64_t units,
                      int64_t ratio, int64_t key_dim, int64_t value_dim, int64_t kernel,
                      int64_t block_size, const void* inputs, const float* weights,
                      const float* decays, const float* betas, float* states, const int32_t* rows,
                      const int32_t* counts, const int32_t* starts, const int32_t* tables,
                      int64_t table_width, float* out) {
    const Sizes sizes{ratio, key_dim, value_dim, kernel};
    const int64_t width = sizes.width(), numbers = sizes.numbers();
    if (sequences == 0) return;
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const int64_t tokens = std::accumulate(counts, counts + sequences, int64_t(0));
        for_rows(threads, sequences * units, tokens / sequences * numbers, [&](int64_t item) {
            const int64_t s = item / units, unit = item % units;
            const int32_t* table = tables + s * table_width;
            auto place = [&](int64_t block) { return states + (block * units + unit) * numbers; };
            std::vector<float> state(numbers), mixed(width);
            if (starts[s] > 0) {
                const float* before = place(table[(starts[s] - 1) / block_size]);
                std::copy(before, before + numbers, state.begin());
            }
            float* past = state.data() + ratio * sizes.matrix();
            float *query = mixed.data(), *key = query + key_dim, *values = key + key_dim;
            for (int64_t t = 0; t < counts[s]; t++) {
                const int64_t row = (rows[s] + t) * units + unit, position = starts[s] + t;
                convolve(sizes, (const T*)inputs + row * width, weights + unit * width * kernel,
                         past, query);
                normalize(query, key_dim, 1.0f / std::sqrt(float(key_dim)));
                normalize(key, key_dim, 1.0f);
                for (int64_t h = 0; h < ratio; h++) {
                    const int64_t head = row * ratio + h;
                    const Token token{query, key, values + h * value_dim, std::exp(decays[head]),
                                      betas[head]};
                    step(sizes, state.data() + h * sizes.matrix(), token, out + head * value_dim);
                }
                const bool ends = t + 1 == counts[s] || (position + 1) % block_size == 0;
                const int32_t block = ends ? table[position / block_size] : -1;
                if (block >= 0) std::copy(state.begin(), state.end(), place(block));
            }
        });
    });
}
