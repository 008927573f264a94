// Shared by the kernels of packed weights: words of LANES rows, numbers rounded to bytes, and how much
// is computed at a time.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)
constexpr int REGISTERS = 24;  // for sums; the others are for operands
#else
constexpr int REGISTERS = 12;
#endif
constexpr int64_t BLOCK_BYTES = 64 << 10;  // of weights, which stay in the cache for all tokens
constexpr int64_t MAX_TOKENS = 192;        // prepared at once: their numbers stay in the cache, too
constexpr float ROUND = 12582912;          // 1.5 · 2^23: adding it rounds to an integer

INLINE BitVec load_words(const uint32_t* p) {
    BitVec words;
    memcpy(&words, p, sizeof words);
    return words;
}

INLINE void store_bytes(int8_t* p, IntVec x) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    const Bytes bytes = __builtin_convertvector(x, Bytes);
    memcpy(p, &bytes, sizeof bytes);
}

INLINE int32_t sum(IntVec x) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
