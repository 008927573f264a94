// What becomes of a step's projected heads: the norms of queries and keys where a model has them,
// rotary positions (arXiv:2104.09864), and the new keys' and values' way into the paged cache.

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "kv_rows.h"
#include "tiles.h"
#include "vec.h"

namespace {

// Rounded to T after the norm, after each product and after the sum, as torch does.
template <typename T>
void norm_head(T* head, const T* weight, float eps, int64_t dim) {
    Vec squares = {};
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec v = load_some(head + i, count);
        squares = fma(v, v, squares);
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec v = load_some(head + i, count) * scale * load_some(weight + i, count);
        store_some(head + i, v, count);
    });
}

template <typename T>
void rotate_head(T* head, const T* cos, const T* sin, int64_t dim) {
    T *low = head, *high = head + dim / 2;
    for_vectors(dim / 2, [&](int64_t i, int64_t count) {
        const Vec a = load_some(low + i, count), b = load_some(high + i, count);
        const Vec c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(low + i, rounded<T>(a * c) - rounded<T>(b * s), count);
        store_some(high + i, rounded<T>(b * c) + rounded<T>(a * s), count);
    });
}

}  // namespace

// Turns the query and key heads of `qkv` in place, and copies keys and values to their slots
// (block · block_size + slot) of the caches [blocks, kv_heads, block_size], in rows of `format`. A
// block whose first slot is written is zeroed before: see attention.py. `qkv` has heads + 2 · kv_heads heads a row,
// contiguous; `cos` and `sin` dim / 2 numbers a row, or are null, as are the norms' weights.
EXPORT void rotate_and_cache(int64_t dtype, int64_t threads, int64_t tokens, int64_t heads,
                             int64_t kv_heads, int64_t dim, int64_t block_size, int64_t format,
                             void* qkv, const void* q_norm, const void* k_norm, double eps,
                             const void* cos, const void* sin, uint8_t* keys, uint8_t* values,
                             const int64_t* slots) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const int64_t width = (heads + 2 * kv_heads) * dim, bytes = row_bytes<T>(format, dim);
        const int64_t block = block_size * kv_heads * bytes;
        for (int64_t t = 0; t < tokens; t++) {
            if (slots[t] % block_size) continue;
            memset(keys + slots[t] / block_size * block, 0, block);
            memset(values + slots[t] / block_size * block, 0, block);
        }
        for_rows(threads, tokens, width, [&](int64_t t) {
            T* row = (T*)qkv + t * width;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                const void* norm = h < heads ? q_norm : k_norm;
                if (norm) norm_head(row + h * dim, (const T*)norm, float(eps), dim);
                if (cos)
                    rotate_head(row + h * dim, (const T*)cos + t * (dim / 2),
                                (const T*)sin + t * (dim / 2), dim);
            }
            const int64_t first = slots[t] / block_size * block + slots[t] % block_size * bytes;
            for (int64_t h = 0; h < kv_heads; h++) {
                const int64_t place = first + h * block_size * bytes;
                write_row(format, row + (heads + h) * dim, dim, keys + place);
                write_row(format, row + (heads + kv_heads + h) * dim, dim, values + place);
            }
        });
    });
}
