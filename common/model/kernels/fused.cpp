// Norms and activations: each reads its input once and writes its output once. Rounded where torch
// rounds: sums in float32, each result once to the model's dtype.

#include <cmath>

#include "kernels.h"
#include "tiles.h"
#include "vec.h"

namespace {

template <typename T>
void norm_row(const T* x, const T* weight, float eps, int64_t size, T* out) {
    Vec squares = {};
    for_vectors(size, [&](int64_t i, int64_t count) {
        Vec v = load_some(x + i, count);
        squares = fma(v, v, squares);
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for_vectors(size, [&](int64_t i, int64_t count) {
        Vec v = load_some(x + i, count) * scale * load_some(weight + i, count);
        store_some(out + i, v, count);
    });
}

template <typename T>
void add_row(const T* x, const T* y, int64_t size, T* out) {
    for_vectors(size, [&](int64_t i, int64_t count) {
        store_some(out + i, load_some(x + i, count) + load_some(y + i, count), count);
    });
}

template <typename T>
void silu_and_mul_row(const T* gate, const T* up, int64_t size, T* out) {
    for_vectors(size, [&](int64_t i, int64_t count) {
        Vec g = load_some(gate + i, count);
        Vec silu = rounded<T>(g / (1.0f + exp(-g)));
        store_some(out + i, silu * load_some(up + i, count), count);
    });
}

}  // namespace

// out[r] = norm(x[r]) for contiguous rows of `size` numbers, `x` with a stride between its rows.
EXPORT void rms_norm(int64_t dtype, int64_t threads, int64_t rows, int64_t size, const void* x,
                     int64_t stride, const void* weight, double eps, void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        for_rows(threads, rows, size, [&](int64_t r) {
            norm_row((const T*)x + r * stride, (const T*)weight, float(eps), size,
                     (T*)out + r * size);
        });
    });
}

// total = residual + x; out = norm(total). All contiguous; `total` may be `residual` or `x`.
EXPORT void add_rms_norm(int64_t dtype, int64_t threads, int64_t rows, int64_t size,
                         const void* residual, const void* x, const void* weight, double eps,
                         void* total, void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        for_rows(threads, rows, 2 * size, [&](int64_t r) {
            T* row = (T*)total + r * size;
            add_row((const T*)residual + r * size, (const T*)x + r * size, size, row);
            norm_row(row, (const T*)weight, float(eps), size, (T*)out + r * size);
        });
    });
}

// out[r] = silu(x[r, :size]) · x[r, size:]; `x` has 2 · size numbers a row, all contiguous.
EXPORT void silu_and_mul(int64_t dtype, int64_t threads, int64_t rows, int64_t size, const void* x,
                         void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        for_rows(threads, rows, 2 * size, [&](int64_t r) {
            const T* row = (const T*)x + r * 2 * size;
            silu_and_mul_row(row, row + size, size, (T*)out + r * size);
        });
    });
}
