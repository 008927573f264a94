// Vectors of float32 and the numbers of a model in memory: float32, bfloat16, float16. The
// compiler's own vector types, so that one source serves every CPU it knows.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// As the Python side numbers them.
enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Calls f(T()) with the type that `dtype` names.
template <typename F>
INLINE void with_dtype(int64_t dtype, F f) {
    if (dtype == BFLOAT16) {
        f(BFloat16());
    } else if (dtype == FLOAT16) {
        f(Float16());
    } else {
        f(float());
    }
}

INLINE Vec broadcast(float x) { return x - Vec{}; }

// ---- memory to float32 and back, rounded to nearest even ----

template <typename To, typename From>
INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

INLINE Vec load(const float* p) {
    Vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
    const __m256i halves = _mm256_loadu_si256((const __m256i*)p);
    const BitVec bits = (BitVec)_mm512_maskz_cvtepu16_epi32(0xffff, halves);
#elif defined(__AVX2__)
    const BitVec bits = (BitVec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    HalfVec halves;
    memcpy(&halves, p, sizeof halves);
    const BitVec bits = __builtin_convertvector(halves, BitVec);
#endif
    return bit_cast<Vec>(bits << 16);
}

INLINE void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }

INLINE BitVec round_to_bfloat16(Vec x) {
    BitVec bits = bit_cast<BitVec>(x);
    BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return bit_cast<BitVec>(x != x) ? (BitVec{} + 0x7fc0) : rounded;
}

INLINE void store(BFloat16* p, Vec x) {
    HalfVec bits = __builtin_convertvector(round_to_bfloat16(x), HalfVec);
    memcpy(p, &bits, sizeof bits);
}

#if defined(__AVX512F__)
INLINE Vec load(const Float16* p) {
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE void store(Float16* p, Vec x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
INLINE Vec load(const Float16* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store(Float16* p, Vec x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
INLINE Vec load(const Float16* p) {
    Vec x;
    for (int i = 0; i < LANES; i++) x[i] = bit_cast<__fp16>(p[i].bits);
    return x;
}
INLINE void store(Float16* p, Vec x) {
    for (int i = 0; i < LANES; i++) p[i].bits = bit_cast<uint16_t>((__fp16)x[i]);
}
#else
#error "this CPU converts no float16"
#endif

// The first `count` of a vector; the others are zero, and are not touched in memory.
template <typename T>
INLINE Vec load_part(const T* p, int64_t count) {
    T buffer[LANES] = {};
    memcpy(buffer, p, count * sizeof(T));
    return load(buffer);
}

template <typename T>
INLINE void store_part(T* p, Vec x, int64_t count) {
    T buffer[LANES];
    store(buffer, x);
    memcpy(p, buffer, count * sizeof(T));
}

// Calls f(i, whole) for each vector of `size` numbers: `whole` is their count, LANES but for the
// last ones.
template <typename F>
INLINE void for_vectors(int64_t size, F f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) f(i, int64_t(LANES));
    if (i < size) f(i, size - i);
}

template <typename T>
INLINE Vec load_some(const T* p, int64_t count) {
    return count == LANES ? load(p) : load_part(p, count);
}

template <typename T>
INLINE void store_some(T* p, Vec x, int64_t count) {
    if (count == LANES) {
        store(p, x);
    } else {
        store_part(p, x, count);
    }
}

// What is left of x after a stay in memory as a T.
template <typename T>
INLINE Vec rounded(Vec x) {
    T buffer[LANES];
    store(buffer, x);
    return load(buffer);
}
template <>
INLINE Vec rounded<float>(Vec x) {
    return x;
}
template <>
INLINE Vec rounded<BFloat16>(Vec x) {
    return bit_cast<Vec>(round_to_bfloat16(x) << 16);
}

// ---- arithmetic ----

// a · b + c, rounded once where the CPU can.
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Of all lanes, in each: each half with the other, then each quarter, and so on.
template <int STEP, int... I>
INLINE Vec swap_lanes(Vec x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I ^ STEP)...);
}

template <int STEP = LANES / 2, typename F>
INLINE Vec fold(Vec x, F f) {
    if constexpr (STEP == 0) {
        return x;
    } else {
        return fold<STEP / 2>(f(x, swap_lanes<STEP>(x, std::make_integer_sequence<int, LANES>())), f);
    }
}

INLINE Vec sums(Vec x) {
    return fold(x, [](Vec a, Vec b) { return a + b; });
}
INLINE Vec maxima(Vec x) {
    return fold(x, [](Vec a, Vec b) { return max(a, b); });
}
INLINE float sum(Vec x) { return sums(x)[0]; }
INLINE float largest(Vec x) { return maxima(x)[0]; }

// e^x within 2 units in the last place (Cephes' polynomial); 0 below -87.3, NaN of NaN.
INLINE Vec exp(Vec x) {
    const Vec low = broadcast(-87.33654f), high = broadcast(88.37626f);
    Vec bounded = max(low, x);  // x, if it is NaN
    bounded = high < bounded ? high : bounded;
    const Vec magic = broadcast(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    Vec n = fma(bounded, broadcast(1.44269504f), magic) - magic;
    Vec r = fma(n, broadcast(-0.693359375f), bounded);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
    Vec result = p * bit_cast<Vec>(exponent);
    return x < low ? Vec{} : result;
}

// 2^x within 2 units in the last place (Cephes' polynomial) for x up to 127; 0 far below -126, NaN
// of NaN.
INLINE Vec exp2(Vec x) {
#if defined(__AVX512F__)
    const Vec bounded = max(broadcast(-160), x);  // x, if it is NaN
    const Vec n = (Vec)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT);
#else
    const Vec low = broadcast(-126), magic = broadcast(12582912.0f);  // 1.5 · 2^23
    const Vec bounded = max(low, x), n = (bounded + magic) - magic;
#endif
    const Vec r = bounded - n;
    Vec p = broadcast(1.535336188319500e-4f);
    p = fma(p, r, broadcast(1.339887440266574e-3f));
    p = fma(p, r, broadcast(9.618437357674640e-3f));
    p = fma(p, r, broadcast(5.550332471162809e-2f));
    p = fma(p, r, broadcast(2.402264791363012e-1f));
    p = fma(p, r, broadcast(6.931472028550421e-1f));
    p = fma(p, r, broadcast(1));
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
    return x < low ? Vec{} : p * bit_cast<Vec>(exponent);
#endif
}
