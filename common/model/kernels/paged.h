// One layer's paged KV cache, and rows of it as pairs of vectors.
#pragma once

#include <type_traits>

#include "vec.h"

constexpr int MAX_DIM = 256;  // numbers of a head; attention_native.py knows it too
constexpr int MAX_SPLITS = 64;
constexpr int PAIR = 2 * LANES;

// Calls f(dim), with what the compiler may count on where heads have a usual size.
template <typename F>
INLINE void with_dim(int64_t dim, F f) {
    if (dim == 64) {
        f(std::integral_constant<int64_t, 64>());
    } else if (dim == 128) {
        f(std::integral_constant<int64_t, 128>());
    } else {
        f(dim);
    }
}

// PAIR neighbouring numbers. Of bfloat16 the even ones and the odd ones: so they lie in 32 bits,
// and no lane has to move. Else the first and the second half.
struct Two {
    Vec first, second;
};

INLINE Two load2(const BFloat16* p) {
    BitVec bits;
    memcpy(&bits, p, sizeof bits);
    return {bit_cast<Vec>(bits << 16), bit_cast<Vec>(bits & 0xffff0000u)};
}

template <typename T>
INLINE Two load2(const T* p) {
    return {load(p), load(p + LANES)};
}

INLINE void store2(BFloat16* p, Two x) {
    BitVec bits = round_to_bfloat16(x.first) | (round_to_bfloat16(x.second) << 16);
    memcpy(p, &bits, sizeof bits);
}

template <typename T>
INLINE void store2(T* p, Two x) {
    store(p, x.first);
    store(p + LANES, x.second);
}

template <typename T>
INLINE Two load2_some(const T* p, int64_t count) {
    if (count == PAIR) return load2(p);
    T buffer[PAIR] = {};
    memcpy(buffer, p, count * sizeof(T));
    return load2(buffer);
}

template <typename T>
INLINE void store2_some(T* p, Two x, int64_t count) {
    if (count == PAIR) return store2(p, x);
    T buffer[PAIR];
    store2(buffer, x);
    memcpy(p, buffer, count * sizeof(T));
}

// Calls f(i, count) for each pair of vectors of `size` numbers.
template <typename F>
INLINE void for_pairs(int64_t size, F f) {
    int64_t i = 0;
    for (; i + PAIR <= size; i += PAIR) f(i, int64_t(PAIR));
    if (i < size) f(i, size - i);
}

template <typename T>
INLINE void fetch(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// [blocks, kv_heads, block_size, dim] of keys, and as much of values.
template <typename T>
struct Cache {
    const T *keys, *values;
    int64_t kv_heads, dim, block_size;
    int64_t to_values;  // from a key to its value

    Cache(const T* keys, const T* values, int64_t kv_heads, int64_t dim, int64_t block_size)
        : keys(keys), values(values), kv_heads(kv_heads), dim(dim), block_size(block_size),
          to_values(values - keys) {}

    // Where a sequence's keys start … end-1 are; returns how many.
    int rows(const int32_t* table, int64_t kv_head, int64_t start, int64_t end,
             const T** out) const {
        for (int64_t i = start; i < end;) {
            const int64_t block = i / block_size, slot = i % block_size;
            const T* row = keys + ((table[block] * kv_heads + kv_head) * block_size + slot) * dim;
            const int64_t last = (block + 1) * block_size;
            for (const int64_t stop = end < last ? end : last; i < stop; i++, row += dim) *out++ = row;
        }
        return int(end > start ? end - start : 0);
    }
};
