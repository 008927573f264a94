// Rows of the KV cache, one of a token's heads each: its numbers as they are, or of 8 bits with a scale
// behind them, a float of which each number is a multiple.
#pragma once

#include <algorithm>

#include "vec.h"

// As the Python side numbers them.
enum KVFormat : int64_t { AS_IT_IS = 0, INT8 = 1, FP8_E4M3 = 2 };

typedef uint8_t ByteVec __attribute__((vector_size(LANES)));
typedef int8_t SignedByteVec __attribute__((vector_size(LANES)));

template <typename T>
int64_t row_bytes(int64_t format, int64_t dim) {
    return format == AS_IT_IS ? dim * int64_t(sizeof(T)) : dim + int64_t(sizeof(float));
}

INLINE Vec magnitude(Vec x) { return bit_cast<Vec>(bit_cast<BitVec>(x) & 0x7fffffff); }

// To the nearest integer, for less than 2^22.
INLINE IntVec nearest(Vec x) {
    const Vec magic = broadcast(12582912.0f);  // 1.5 · 2^23
    return __builtin_convertvector((x + magic) - magic, IntVec);
}

// ---- 8 bits: a sign, an exponent with bias 7, 3 of a mantissa; no infinity (OCP's E4M3) ----

constexpr float LEAST_NORMAL = 0x1p-6f, LEAST = 0x1p-9f;
constexpr int BIAS = 127 - 7;

INLINE ByteVec to_e4m3(Vec x) {
    const BitVec bits = bit_cast<BitVec>(x), high = bits & 0x7fffffff;
    const BitVec normal = ((high + 0x7ffff + ((high >> 20) & 1)) >> 20) - (BIAS << 3);
    const BitVec small = bit_cast<BitVec>(nearest(magnitude(x) * (1 / LEAST)));
    BitVec found = magnitude(x) < LEAST_NORMAL ? small : normal;
    found = found > 0x7e ? BitVec{} + 0x7e : found;  // 448, the largest
    return __builtin_convertvector(found | ((bits >> 24) & 0x80), ByteVec);
}

INLINE Vec from_e4m3(ByteVec bytes) {
    const BitVec bits = __builtin_convertvector(bytes, BitVec), low = bits & 0x7f;
    const Vec small = __builtin_convertvector(bit_cast<IntVec>(low), Vec) * LEAST;
    const BitVec normal = (low + (BIAS << 3)) << 20;
    const BitVec found = low < 8 ? bit_cast<BitVec>(small) : normal;
    return bit_cast<Vec>(found | ((bits & 0x80) << 24));
}

INLINE ByteVec to_bytes(int64_t format, Vec x) {
    if (format == FP8_E4M3) return to_e4m3(x);
    return bit_cast<ByteVec>(__builtin_convertvector(nearest(x), SignedByteVec));
}

INLINE Vec from_bytes(int64_t format, ByteVec bytes) {
    if (format == FP8_E4M3) return from_e4m3(bytes);
    return __builtin_convertvector(bit_cast<SignedByteVec>(bytes), Vec);
}

// ---- rows ----

// The scale makes the largest number the format's largest. It is NaN if a number is not finite, and
// 0 for numbers that are too small to have one.
template <typename T>
void write_row(int64_t format, const T* from, int64_t dim, uint8_t* to) {
    if (format == AS_IT_IS) {
        memcpy(to, from, dim * sizeof(T));
        return;
    }
    Vec top = {}, nothing = {};
    for_vectors(dim, [&](int64_t i, int64_t some) {
        const Vec x = load_some(from + i, some);
        top = max(top, magnitude(x));
        nothing += x * 0.0f;
    });
    float scale = largest(top) / (format == FP8_E4M3 ? 448.0f : 127.0f);
    if (scale < 1e-30f) scale = 0;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for_vectors(dim, [&](int64_t i, int64_t some) {
        const ByteVec bytes = to_bytes(format, load_some(from + i, some) * inverse);
        memcpy(to + i, &bytes, some);
    });
    scale += sum(nothing);
    memcpy(to + dim, &scale, sizeof scale);
}

template <typename T>
void read_row(int64_t format, const uint8_t* from, int64_t dim, T* to) {
    float scale;
    memcpy(&scale, from + dim, sizeof scale);
    for_vectors(dim, [&](int64_t i, int64_t some) {
        ByteVec bytes = {};
        if (some == LANES) {
            memcpy(&bytes, from + i, LANES);
        } else {
            memcpy(&bytes, from + i, some);
        }
        store_some(to + i, from_bytes(format, bytes) * scale, some);
    });
}
