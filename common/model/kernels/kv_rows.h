// Rows of the KV cache, one of a token's heads each: its numbers as they are, or of 8 bits with a scale
// behind them, a float of which each number is a multiple.
#pragma once

#include <type_traits>

#include "vec.h"

// As the Python side numbers them.
enum KVFormat : int64_t { AS_IT_IS = 0, INT8 = 1, FP8_E4M3 = 2 };

typedef uint8_t ByteVec __attribute__((vector_size(LANES)));
typedef int8_t SignedByteVec __attribute__((vector_size(LANES)));
typedef int16_t ShortVec __attribute__((vector_size(2 * LANES)));

template <typename T>
int64_t row_bytes(int64_t format, int64_t dim) {
    return format == AS_IT_IS ? dim * int64_t(sizeof(T)) : dim + int64_t(sizeof(float));
}

// In two steps: in one the compiler moves number by number.
INLINE IntVec widened(SignedByteVec x) {
#if defined(__AVX512F__)
    return (IntVec)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x);
#else
    return __builtin_convertvector(__builtin_convertvector(x, ShortVec), IntVec);
#endif
}

INLINE ByteVec lowest_bytes(BitVec x) {
#if defined(__AVX512F__)
    return (ByteVec)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)x);
#else
    return __builtin_convertvector(__builtin_convertvector(x, HalfVec), ByteVec);
#endif
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
    return lowest_bytes(found | ((bits >> 24) & 0x80));
}

// A float16 has a bias that is 8 more, and otherwise more bits behind the same ones.
INLINE Vec from_e4m3(ByteVec bytes) {
#if defined(__AVX512F__)
    const HalfVec bits = (HalfVec)_mm256_cvtepu8_epi16((__m128i)bytes);
#else
    const HalfVec bits = __builtin_convertvector(bytes, HalfVec);
#endif
    const HalfVec half = ((bits & 0x7f) << 7) | ((bits & 0x80) << 8);
    return load((const Float16*)&half) * 256.0f;
}

template <KVFormat FORMAT>
INLINE ByteVec to_bytes(Vec x) {
    return FORMAT == FP8_E4M3 ? to_e4m3(x) : lowest_bytes(bit_cast<BitVec>(nearest(x)));
}

template <KVFormat FORMAT>
INLINE Vec from_bytes(ByteVec bytes) {
    if (FORMAT == FP8_E4M3) return from_e4m3(bytes);
    return __builtin_convertvector(widened(bit_cast<SignedByteVec>(bytes)), Vec);
}

// ---- rows ----

// The scale makes the largest number the format's largest. It is NaN if a number is not finite, and
// 0 for numbers that are too small to have one.
template <KVFormat FORMAT, typename T>
void write_bytes(const T* from, int64_t dim, uint8_t* to) {
    Vec top = {}, nothing = {};
    for_vectors(dim, [&](int64_t i, int64_t some) {
        const Vec x = load_some(from + i, some);
        top = max(top, magnitude(x));
        nothing += x * 0.0f;
    });
    float scale = largest(top) / (FORMAT == FP8_E4M3 ? 448.0f : 127.0f);
    if (scale < 1e-30f) scale = 0;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for_vectors(dim, [&](int64_t i, int64_t some) {
        const ByteVec bytes = to_bytes<FORMAT>(load_some(from + i, some) * inverse);
        memcpy(to + i, &bytes, some);
    });
    scale += sum(nothing);
    memcpy(to + dim, &scale, sizeof scale);
}

template <typename T>
INLINE void store_number(T* p, Vec x, int64_t some) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
        const __m256i bits = (__m256i)_mm512_cvtneps_pbh((__m512)x);
        memcpy(p, &bits, some * sizeof(T));
        return;
    }
#endif
    store_some(p, x, some);
}

template <KVFormat FORMAT, typename T>
void read_bytes(const uint8_t* from, int64_t dim, T* to) {
    float scale;
    memcpy(&scale, from + dim, sizeof scale);
    for_vectors(dim, [&](int64_t i, int64_t some) {
        ByteVec bytes = {};
        if (some == LANES) {
            memcpy(&bytes, from + i, LANES);
        } else {
            memcpy(&bytes, from + i, some);
        }
        store_number(to + i, from_bytes<FORMAT>(bytes) * scale, some);
    });
}

template <typename T>
void write_row(int64_t format, const T* from, int64_t dim, uint8_t* to) {
    if (format == INT8) {
        write_bytes<INT8>(from, dim, to);
    } else if (format == FP8_E4M3) {
        write_bytes<FP8_E4M3>(from, dim, to);
    } else {
        memcpy(to, from, dim * sizeof(T));
    }
}

// Of a row that is not as it is.
template <typename T>
void read_row(int64_t format, const uint8_t* from, int64_t dim, T* to) {
    if (format == INT8) {
        read_bytes<INT8>(from, dim, to);
    } else {
        read_bytes<FP8_E4M3>(from, dim, to);
    }
}
