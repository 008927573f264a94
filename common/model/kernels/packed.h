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
constexpr int64_t AHEAD = 128;             // words of a row that are asked for before they are needed
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

// Asks for the words of WIDTH · LANES rows, AHEAD of those that are multiplied, and after a row's last
// word for the first ones of the next rows. They go into the second cache, which waits for more lines
// at a time than the first one.
template <int WIDTH>
class Fetcher {
public:
    // `words` of the rows, each with `count` of them.
    INLINE Fetcher(const uint32_t* words, int64_t count)
        : apart(count * LANES), left(count > AHEAD ? count - AHEAD : 0),
          next(words + (count - left) * LANES) {}

    // One more word of each row.
    INLINE void fetch() {
        if (left-- == 0) next += (WIDTH - 1) * apart;
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) __builtin_prefetch(next + v * apart, 0, 2);
        next += LANES;
    }

private:
    const int64_t apart;
    int64_t left;  // words of these rows that are not asked for
    const uint32_t* next;
};
