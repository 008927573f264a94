// The two products of attention, of queries by keys and of weights by values, for a tile of keys.
// Each number is one chain of sums, in the order of the head's numbers or of the keys, however many
// rows are computed at a time.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "cache.h"

// Rows are multiplied in units: a float, or two bfloat16 that are neighbours where the CPU multiplies
// them as such.
struct Pair {
    uint32_t bits;
};

#if defined(__AVX512BF16__)
template <typename S>
using Unit = std::conditional_t<std::is_same_v<S, BFloat16>, Pair, float>;
#else
template <typename S>
using Unit = float;
#endif

template <typename S>
constexpr int PER_UNIT = std::is_same_v<Unit<S>, Pair> ? 2 : 1;  // numbers

INLINE Vec multiply_add(float a, Vec b, Vec sum) { return fma(broadcast(a), b, sum); }
#if defined(__AVX512BF16__)
INLINE Vec multiply_add(Pair a, Vec b, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a.bits)),
                                 (__m512bh)b);
}
#endif

// LANES floats as units.
INLINE void store_units(float* out, Vec x) { store(out, x); }
#if defined(__AVX512BF16__)
INLINE void store_units(Pair* out, Vec x) {
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    memcpy((void*)out, &halves, sizeof halves);
}
#endif

// Words of bfloat16 as floats: the even numbers, then the odd ones.
INLINE Vec even(Vec words) { return bit_cast<Vec>(bit_cast<BitVec>(words) << 16); }
INLINE Vec odd(Vec words) { return bit_cast<Vec>(bit_cast<BitVec>(words) & 0xffff0000); }

constexpr int WIDTH = LANES == 16 ? 4 : 2;  // vectors of a panel
constexpr int COLUMNS = WIDTH * LANES;

template <typename N>
void grow(std::vector<N>& numbers, int64_t count) {
    if (int64_t(numbers.size()) < count) numbers.resize(count);
}

// ---- loading ----

#if !defined(__AVX2__)
template <int STEP, int... I>
INLINE void swap_halves(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
    const Vec x = a, y = b;
    a = __builtin_shufflevector(x, y, (I & STEP ? LANES + I - STEP : I)...);
    b = __builtin_shufflevector(x, y, (I & STEP ? LANES + I : I + STEP)...);
}

template <int STEP>
INLINE void transpose(Vec* rows) {
    if constexpr (STEP > 0) {
        for (int i = 0; i < LANES; i++)
            if (!(i & STEP))
                swap_halves<STEP>(rows[i], rows[i + STEP],
                                  std::make_integer_sequence<int, LANES>());
        transpose<STEP / 2>(rows);
    }
}
#endif

// Hides from the compiler that x does not change in a loop: it would compute the addresses of all
// rows before the loop and keep them on the stack.
template <typename N>
INLINE N hidden(N x) {
    __asm__("" : "+r"(x));
    return x;
}

// The first WORDS words of LANES rows, `stride` words apart: out[i] has word i of each row.
#if defined(__AVX512F__)
constexpr int WORDS = 4;
INLINE void load_columns(const float* rows, int64_t stride, Vec* out) {
    // Loads move quarters of vectors to where they belong.
    __m512 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const float* row = rows + j * stride;
        x[j] = _mm512_castps128_ps512(_mm_loadu_ps(row));
        x[j] = _mm512_insertf32x4(x[j], _mm_loadu_ps(row + 4 * stride), 1);
        x[j] = _mm512_insertf32x4(x[j], _mm_loadu_ps(row + 8 * stride), 2);
        x[j] = _mm512_insertf32x4(x[j], _mm_loadu_ps(row + 12 * stride), 3);
    }
    const __m512d low = (__m512d)_mm512_unpacklo_ps(x[0], x[1]);
    const __m512d high = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
    const __m512d low2 = (__m512d)_mm512_unpacklo_ps(x[2], x[3]);
    const __m512d high2 = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    out[0] = (Vec)_mm512_unpacklo_pd(low, low2);
    out[1] = (Vec)_mm512_unpackhi_pd(low, low2);
    out[2] = (Vec)_mm512_unpacklo_pd(high, high2);
    out[3] = (Vec)_mm512_unpackhi_pd(high, high2);
}
#elif defined(__AVX2__)
constexpr int WORDS = 4;
INLINE void load_columns(const float* rows, int64_t stride, Vec* out) {
    __m256 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        x[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows + j * stride)),
                                    _mm_loadu_ps(rows + (j + 4) * stride), 1);
    const __m256d low = (__m256d)_mm256_unpacklo_ps(x[0], x[1]);
    const __m256d high = (__m256d)_mm256_unpackhi_ps(x[0], x[1]);
    const __m256d low2 = (__m256d)_mm256_unpacklo_ps(x[2], x[3]);
    const __m256d high2 = (__m256d)_mm256_unpackhi_ps(x[2], x[3]);
    out[0] = (Vec)_mm256_unpacklo_pd(low, low2);
    out[1] = (Vec)_mm256_unpackhi_pd(low, low2);
    out[2] = (Vec)_mm256_unpacklo_pd(high, high2);
    out[3] = (Vec)_mm256_unpackhi_pd(high, high2);
}
#else
constexpr int WORDS = LANES;
INLINE void load_columns(const float* rows, int64_t stride, Vec* out) {
    for (int i = 0; i < LANES; i++) memcpy(&out[i], rows + i * stride, sizeof(Vec));
    transpose<LANES / 2>(out);
}
#endif

// LANES words of one key's values, or of two where a unit has two numbers, as vectors of units. Two
// bfloat16 come from the even numbers, then from the odd ones, so no number moves to another lane.
template <typename S>
INLINE void load_values(const S* row, int64_t next, Vec* out) {
    Vec words;
    memcpy(&words, row, sizeof words);
    if constexpr (PER_UNIT<S> == 2) {
        Vec second;
        memcpy(&second, row + next, sizeof second);
        const BitVec a = bit_cast<BitVec>(words), b = bit_cast<BitVec>(second);
        out[0] = bit_cast<Vec>((a & 0xffff) | (b << 16));
        out[1] = bit_cast<Vec>((a >> 16) | (b & 0xffff0000));
    } else if constexpr (PER_WORD<S> == 2) {
        out[0] = even(words);
        out[1] = odd(words);
    } else {
        out[0] = words;
    }
}

// ---- products of vectors ----

// out[R, COLUMNS] += a[R, depth] · b[depth, COLUMNS], in units; `stride` of a in units, of out in
// floats.
template <int R, typename U>
INLINE void multiply(const U* a, int64_t stride, const U* b, int64_t depth, float* out,
                     int64_t out_stride) {
    Vec sums[R][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int w = 0; w < WIDTH; w++) sums[r][w] = load(out + r * out_stride + w * LANES);
    for (int64_t d = 0; d < depth; d++) {
        Vec right[WIDTH];
#pragma GCC unroll 8
        for (int w = 0; w < WIDTH; w++) memcpy(&right[w], b + d * COLUMNS + w * LANES, sizeof(Vec));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int w = 0; w < WIDTH; w++)
                sums[r][w] = multiply_add(a[r * stride + d], right[w], sums[r][w]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int w = 0; w < WIDTH; w++) store(out + r * out_stride + w * LANES, sums[r][w]);
}

// Keys and values packed for many rows, by any products. Panels of COLUMNS keys, [depth, COLUMNS]
// units each; panels of COLUMNS of a head's numbers, [keys, COLUMNS] units each.
template <typename S>
struct Packed {
    using U = Unit<S>;
    static constexpr int UNITS = KEYS / PER_UNIT<S>;  // of the keys
    int64_t row, depth;  // of a tile's row: numbers, units
    int64_t padded;      // row in whole panels
    std::vector<U> keys, values;

    void prepare(int64_t numbers) {
        row = numbers, depth = row / PER_UNIT<S>, padded = round_up(row, COLUMNS);
        grow(keys, KEYS * depth);
        grow(values, UNITS * padded);
    }

    U* keys_at(int key, int64_t unit) {
        return &keys[(key / COLUMNS * depth + unit) * COLUMNS + key % COLUMNS];
    }
    U* values_at(int64_t unit, int64_t column) {
        return &values[column / COLUMNS * COLUMNS * UNITS + unit * COLUMNS + column % COLUMNS];
    }

    void pack_keys(const Tile<S>& tile) {
        for (int g = tile.begin; g < tile.end; g++)
            for (int64_t i = 0; i < row; i += WORDS * PER_WORD<S>) {
                Vec words[WORDS];
                load_columns((const float*)(tile.keys[g] + i), hidden(row / PER_WORD<S>), words);
                U* out = keys_at(g * LANES, i / PER_UNIT<S>);
#pragma GCC unroll 16
                for (int w = 0; w < WORDS; w++) {
                    if constexpr (PER_WORD<S> == PER_UNIT<S>) {
                        memcpy((void*)(out + w * COLUMNS), &words[w], sizeof(Vec));
                    } else {
                        store(out + 2 * w * COLUMNS, even(words[w]));
                        store(out + (2 * w + 1) * COLUMNS, odd(words[w]));
                    }
                }
            }
    }

    // Values of keys that do not exist are zeros.
    void pack_values(const Tile<S>& tile) {
        constexpr int step = LANES * PER_WORD<S>;
        for (int g = 0; g < GROUPS; g++) {
            const bool exists = g >= tile.begin && g < tile.end;
            for (int k = 0; k < LANES; k += PER_UNIT<S>)
                for (int64_t i = 0; i < row; i += step) {
                    Vec units[PER_WORD<S>] = {};
                    if (exists) load_values(tile.values[g] + k * row + i, row, units);
                    memcpy((void*)values_at((g * LANES + k) / PER_UNIT<S>, i), units, sizeof units);
                }
        }
    }
};

// Calls f with the number of rows, 8 at most, as a constant.
template <typename F>
INLINE void with_rows(int64_t rows, F f) {
    switch (rows) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        case 6: return f(std::integral_constant<int, 6>());
        case 7: return f(std::integral_constant<int, 7>());
        default: return f(std::integral_constant<int, 8>());
    }
}

// Products by the vector unit.
template <typename S>
class VectorProducts : public Packed<S> {
public:
    using U = Unit<S>;
    using Packed<S>::UNITS;
    using Packed<S>::row;
    using Packed<S>::depth;
    using Packed<S>::padded;
    static constexpr int ROWS = 6;   // that are computed together
    static constexpr int FEW = 8;    // for which a tile is not packed, at most

    void begin(const U*, int64_t) {}
    void end() {}

    // scores[rows, KEYS] of the packed tile.
    void score(const U* queries, int64_t rows, float* scores) {
        std::fill_n(scores, rows * KEYS, 0.0f);
        with_rows(rows, [&](auto R) {
            for (int k = 0; k < KEYS; k += COLUMNS)
                multiply<R>(queries, depth, this->keys_at(k, 0), depth, scores + k, KEYS);
        });
    }

    // sums[rows, padded] += weights[rows, UNITS] · the packed values.
    void add(const U* weights, int64_t rows, float* sums) {
        with_rows(rows, [&](auto R) {
            for (int64_t i = 0; i < padded; i += COLUMNS)
                multiply<R>(weights, UNITS, this->values_at(0, i), UNITS, sums + i, padded);
        });
    }

    // The same products, for FEW rows, straight from the cache. Meanwhile the tile `later` comes into
    // the second cache, and into the first one what is read next.
    void score_few(const Tile<S>& tile, const Tile<S>& later, const U* queries, int64_t rows,
                   float* scores) {
        with_rows(rows, [&](auto R) {
            constexpr int G = R <= LANES / 4 ? 4 : R <= LANES / 2 ? 2 : 1;  // groups at a time
            for (int g = 0; g < GROUPS; g += G) {
                if (g >= tile.begin && g + G <= tile.end) {
                    score_groups<R, G>(tile, later, g, queries, scores);
                    continue;
                }
                for (int i = std::max(g, tile.begin); i < std::min(g + G, tile.end); i++)
                    score_groups<R, 1>(tile, later, i, queries, scores);
            }
        });
    }

    void add_few(const Tile<S>& tile, const Tile<S>& next, const Tile<S>& later, const U* weights,
                 int64_t rows, float* sums) {
        with_rows(rows, [&](auto R) {
            constexpr int W = R <= 2 ? 2 * WIDTH : WIDTH;
            int64_t i = 0;
            for (; i + W * LANES <= row; i += W * LANES)
                add_columns<R, W>(tile, next, later, i, weights, sums + i);
            for (; i < row; i += PER_WORD<S> * LANES)
                add_columns<R, PER_WORD<S>>(tile, next, later, i, weights, sums + i);
        });
    }

private:
    template <int R, int G>
    INLINE void score_groups(const Tile<S>& tile, const Tile<S>& later, int first, const U* queries,
                             float* scores) {
        const S *keys[G], *ahead[G];
        for (int g = 0; g < G; g++) {
            keys[g] = tile.keys[first + g];
            ahead[g] = later.has(first + g) ? later.keys[first + g] : keys[g];
        }
        Vec sums[G][R] = {};
        for (int64_t i = 0; i < row; i += WORDS * PER_WORD<S>) {
            const U* query = queries + i / PER_UNIT<S>;
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                Vec words[WORDS];
                load_columns((const float*)(keys[g] + i), hidden(row / PER_WORD<S>), words);
                fetch_near(tile.values[first + g] + i * LANES, LANES * WORDS * PER_WORD<S>);
                fetch(ahead[g] + i * LANES, LANES * WORDS * PER_WORD<S>);
#pragma GCC unroll 16
                for (int w = 0; w < WORDS; w++)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const U* q = query + r * depth;
                        if constexpr (PER_WORD<S> == PER_UNIT<S>) {
                            sums[g][r] = multiply_add(q[w], words[w], sums[g][r]);
                        } else {
                            sums[g][r] = multiply_add(q[2 * w], even(words[w]), sums[g][r]);
                            sums[g][r] = multiply_add(q[2 * w + 1], odd(words[w]), sums[g][r]);
                        }
                    }
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) store(scores + r * KEYS + (first + g) * LANES, sums[g][r]);
    }

    // Weighted values: W vectors of their numbers from column `i` on.
    template <int R, int W>
    INLINE void add_columns(const Tile<S>& tile, const Tile<S>& next, const Tile<S>& later, int64_t i,
                            const U* weights, float* out) {
        Vec sums[R][W];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int w = 0; w < W; w++) sums[r][w] = load(out + r * padded + w * LANES);
        for (int g = tile.begin; g < tile.end; g++) {
            const S* values = tile.values[g] + i;
            const S* soon = next.has(g) ? next.keys[g] + i : values;
            const S* ahead = later.has(g) ? later.values[g] + i : values;
            const U* weight = weights + g * LANES / PER_UNIT<S>;
            for (int k = 0; k < LANES / PER_UNIT<S>; k++) {
                Vec right[W];
#pragma GCC unroll 8
                for (int w = 0; w < W; w += PER_WORD<S>) load_values(values + w * LANES, row, right + w);
                for (int j = 0; j < PER_UNIT<S>; j++, values += row, soon += row, ahead += row) {
                    fetch_near(soon, W * LANES);
                    fetch(ahead, W * LANES);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                    for (int w = 0; w < W; w++)
                        sums[r][w] = multiply_add(weight[r * UNITS + k], right[w], sums[r][w]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int w = 0; w < W; w++) store(out + r * padded + w * LANES, sums[r][w]);
    }
};
