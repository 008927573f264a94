// Attention of the new tokens of each sequence over its paged KV cache, read in place: one token or
// thousands. Tiles of keys and values are copied out of their blocks into the order in which a small
// matrix product reads them, once for all rows that share them; scores never leave the first cache
// (FlashAttention-2, arXiv:2307.08691). bfloat16 is multiplied as such where the CPU can, and in
// float32 elsewhere.
//
// A row (a query head of a token) is summed in one order that depends on its position alone: tiles
// begin at multiples of KEYS tokens, each part of PART tokens is summed by itself, and parts are
// added up from the first to the last (as in Flash-Decoding, where they are computed at the same
// time). So a row has the same bits in a prompt, in a chunk of it, alone and in a batch.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "kv_rows.h"
#include "vec.h"

namespace {

// Into the second cache, which waits for more lines at a time than the first one.
template <typename T>
INLINE void fetch(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) __builtin_prefetch(row + i, 0, 2);
}

// [blocks, kv_heads, block_size] rows of keys, and as many of values.
template <typename T>
struct Cache {
    const uint8_t *keys, *values;
    int64_t format, kv_heads, dim, block_size;
    int64_t bytes;      // of a row
    int64_t to_values;  // from a key to its value, where rows are read as they are

    Cache(const void* keys, const void* values, int64_t format, int64_t kv_heads, int64_t dim,
          int64_t block_size)
        : keys((const uint8_t*)keys), values((const uint8_t*)values), format(format),
          kv_heads(kv_heads), dim(dim), block_size(block_size), bytes(row_bytes<T>(format, dim)),
          to_values((const T*)values - (const T*)keys) {}

    // Where a sequence's keys start … end-1 are.
    void rows(const int32_t* table, int64_t kv_head, int64_t start, int64_t end,
             const T** out) const {
        for (int64_t i = start; i < end;) {
            const int64_t block = i / block_size, slot = i % block_size;
            const uint8_t* row =
                keys + ((table[block] * kv_heads + kv_head) * block_size + slot) * bytes;
            const int64_t last = (block + 1) * block_size;
            for (const int64_t stop = end < last ? end : last; i < stop; i++, row += bytes)
                *out++ = (const T*)row;
        }
    }

    void fetch_bytes(const T* key) const {
        fetch((const uint8_t*)key, bytes);
        fetch((const uint8_t*)key + (values - keys), bytes);
    }

    // Keys and values of `rows` as numbers of T in `to`; their distance.
    int64_t unpack(const T** rows, int first, int count, int most, T* to) const {
        for (int k = first; k < count; k++) {
            const uint8_t* key = (const uint8_t*)rows[k];
            read_row(format, key, dim, to + k * dim);
            read_row(format, key + (values - keys), dim, to + (most + k) * dim);
            rows[k] = to + k * dim;
        }
        return most * dim;
    }
};

constexpr int KEYS = 64;                    // of a tile
constexpr int PART = 8 * KEYS;              // tokens that are summed before they are added up
constexpr int ROWS = 6;                     // of a product, at most
constexpr int WIDTH = LANES == 16 ? 4 : 2;  // vectors of a product's row
constexpr int COLUMNS = WIDTH * LANES;
constexpr int64_t BLOCK = 64 * ROWS;        // rows that share a tile's copy, at most
constexpr int FEW_ROWS = 8;                 // for which a tile is not copied, at most
constexpr int64_t FEW = 64;                 // rows whose parts may be computed at the same time

// What is multiplied in one step: a float, or two bfloat16 that are neighbours in a row.
struct Pair {
    uint32_t bits;
};

INLINE Vec multiply_add(float a, Vec b, Vec sum) { return fma(broadcast(a), b, sum); }
#if defined(__AVX512BF16__)
INLINE Vec multiply_add(Pair a, Vec b, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a.bits)),
                                 (__m512bh)b);
}
template <typename T>
using Unit = std::conditional_t<std::is_same_v<T, BFloat16>, Pair, float>;
#else
template <typename T>
using Unit = float;
#endif

template <typename U>
constexpr int NUMBERS = std::is_same_v<U, Pair> ? 2 : 1;  // of a unit

// out[R, COLUMNS] += a[R, depth] · b[depth, COLUMNS], in units; `stride` of a in units, of out in
// floats. Each number is one chain of sums, in the order of the depth.
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

// A square of LANES vectors, turned: vector i gets what lane i of each had.
template <int STEP, int... I>
INLINE void swap_halves(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
    const Vec x = a, y = b;
    a = __builtin_shufflevector(x, y, (I & STEP ? LANES + I - STEP : I)...);
    b = __builtin_shufflevector(x, y, (I & STEP ? LANES + I : I + STEP)...);
}

template <int STEP>
INLINE void transpose(Vec* rows) {
    if constexpr (STEP > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & STEP))
                swap_halves<STEP>(rows[i], rows[i + STEP],
                                  std::make_integer_sequence<int, LANES>());
        transpose<STEP / 2>(rows);
    }
}

// `count` units of a row, LANES at most; zeros behind them.
template <typename T>
INLINE Vec load_units(const T* row, int64_t unit, int64_t count) {
    if constexpr (NUMBERS<Unit<T>> == 2) {
        Vec x = {};
        if (count == LANES) {
            memcpy(&x, row + 2 * unit, sizeof x);
        } else {
            memcpy(&x, row + 2 * unit, count * sizeof(Pair));
        }
        return x;
    } else {
        return load_some(row + unit, count);
    }
}

// The rows of a tile's keys; those before `first` and from `count` on do not exist.
template <typename T>
struct Tile {
    const T* rows[KEYS];
    int first, count;

    INLINE const T* value(int k, int64_t to_values) const {
        return k >= first && k < count ? rows[k] + to_values : nullptr;
    }
};

// LANES units of LANES keys, from key `k` and unit `d` on: vector i has unit d + i of each key.
// FULL: all of them exist.
template <bool FULL, typename T>
INLINE void load_square(const Tile<T>& tile, int k, int64_t d, int64_t depth, Vec* out) {
    const int64_t some = FULL ? LANES : std::min<int64_t>(LANES, depth - d);
#if defined(__AVX512F__)
    if constexpr (FULL && sizeof(Unit<T>) == NUMBERS<Unit<T>> * sizeof(T)) {
        auto quarter = [&](int row, int q) {
            return _mm_loadu_ps((const float*)tile.rows[k + row] + d + 4 * q);
        };
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {  // four units of all keys: loads move quarters of vectors
            __m512 x[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                x[j] = _mm512_castps128_ps512(quarter(j, q));
                x[j] = _mm512_insertf32x4(x[j], quarter(4 + j, q), 1);
                x[j] = _mm512_insertf32x4(x[j], quarter(8 + j, q), 2);
                x[j] = _mm512_insertf32x4(x[j], quarter(12 + j, q), 3);
            }
            const __m512d low = (__m512d)_mm512_unpacklo_ps(x[0], x[1]);
            const __m512d high = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
            const __m512d low2 = (__m512d)_mm512_unpacklo_ps(x[2], x[3]);
            const __m512d high2 = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
            out[4 * q] = (Vec)_mm512_unpacklo_pd(low, low2);
            out[4 * q + 1] = (Vec)_mm512_unpackhi_pd(low, low2);
            out[4 * q + 2] = (Vec)_mm512_unpacklo_pd(high, high2);
            out[4 * q + 3] = (Vec)_mm512_unpackhi_pd(high, high2);
        }
        return;
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        out[i] = FULL || (k + i >= tile.first && k + i < tile.count)
                     ? load_units(tile.rows[k + i], d, some)
                     : Vec{};
    transpose<LANES / 2>(out);
}

// Keys as the right side of a product: panels of COLUMNS keys, [depth, COLUMNS] each. Columns of
// keys that do not exist have any numbers.
template <typename T>
void pack_keys(const Tile<T>& tile, int64_t depth, Unit<T>* out) {
    for (int k = tile.first / LANES * LANES; k < tile.count; k += LANES) {
        Unit<T>* columns = out + k / COLUMNS * depth * COLUMNS + k % COLUMNS;
        auto pack = [&](auto full, int64_t d) {
            Vec square[LANES];
            load_square<full>(tile, k, d, depth, square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (full || i < depth - d)
                    memcpy((void*)(columns + (d + i) * COLUMNS), &square[i], sizeof(Vec));
        };
        const bool exist = k >= tile.first && k + LANES <= tile.count;
        int64_t d = 0;
        for (; exist && d + LANES <= depth; d += LANES) pack(std::true_type(), d);
        for (; d < depth; d += LANES) pack(std::false_type(), d);
    }
}

// COLUMNS of a head's numbers from `column` on, of two keys where a unit has two numbers; zeros for a
// key that does not exist (FULL: all of them exist). Two bfloat16 come from the even numbers of both rows, then the odd ones,
// of 2 · LANES at a time: so no number has to move to another lane.
template <bool FULL, typename T>
INLINE void load_values(const T* row, const T* second, int64_t column, int64_t dim, Vec* out) {
    constexpr int step = NUMBERS<Unit<T>>;
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w += step) {
        const int64_t i = column + w * LANES;
        const int64_t some = FULL ? step * LANES : std::clamp<int64_t>(dim - i, 0, step * LANES);
        if constexpr (step == 2) {
            auto words = [&](const T* p) {
                BitVec bits = {};
                if (FULL) {
                    memcpy(&bits, p + i, sizeof bits);
                } else if (p) {
                    memcpy(&bits, p + i, some * sizeof(T));
                }
                return bits;
            };
            const BitVec a = words(row), b = words(second);
            out[w] = bit_cast<Vec>((a & 0xffff) | (b << 16));
            out[w + 1] = bit_cast<Vec>((a >> 16) | (b & 0xffff0000));
        } else {
            out[w] = FULL || row ? load_some(row + i, some) : Vec{};
        }
    }
}

// Values as the right side: panels of COLUMNS of the head's numbers, [keys, COLUMNS] each, in units.
template <typename T>
void pack_values(const Tile<T>& tile, int64_t to_values, int64_t dim, Unit<T>* out) {
    constexpr int per_unit = NUMBERS<Unit<T>>;
    for (int k = 0; k < tile.count; k += per_unit)
        for (int64_t column = 0; column < dim; column += COLUMNS) {
            Vec units[WIDTH];
            load_values<false>(tile.value(k, to_values), tile.value(k + 1, to_values), column, dim,
                               units);
            Unit<T>* at = out + (column * KEYS + k * COLUMNS) / per_unit;
            memcpy((void*)at, units, sizeof units);
        }
}

template <typename N>
void grow(std::vector<N>& numbers, int64_t count) {
    if (int64_t(numbers.size()) < count) numbers.resize(count);
}

// What rows have seen of a part, or of all parts so far.
struct Seen {
    std::vector<float> sums;  // [rows, padded], of values, weighted
    std::vector<float> highest, weight;

    void begin(int64_t count, int64_t padded) {
        std::fill_n(sums.begin(), count * padded, 0.0f);
        std::fill_n(highest.begin(), count, -INFINITY);
        std::fill_n(weight.begin(), count, 0.0f);
    }
};

// Rows of one KV head, and what they have seen. Each thread has one, for all its work.
template <typename T>
struct Rows {
    using U = Unit<T>;
    static constexpr int64_t TILE_DEPTH = KEYS / NUMBERS<U>;
    int64_t dim, depth, padded;  // `depth`: units of a head; `padded`: dim in whole panels
    int64_t count;
    std::vector<U> queries;  // [rows, depth]
    std::vector<int64_t> from, to;  // of each row: which keys it may see
    Seen part, all;
    std::vector<U> keys, values;  // of a tile
    std::vector<T> unpacked;      // keys and values of a tile

    // Makes room for `most` rows. Memory is kept from call to call.
    void prepare(int64_t size, int64_t most) {
        dim = size, depth = dim / NUMBERS<U>, padded = (dim + COLUMNS - 1) / COLUMNS * COLUMNS;
        grow(queries, most * depth);
        grow(from, most);
        grow(to, most);
        for (Seen* seen : {&part, &all}) {
            grow(seen->sums, most * padded);
            grow(seen->highest, most);
            grow(seen->weight, most);
        }
        grow(keys, most > FEW_ROWS ? KEYS * depth : 0);
        grow(values, most > FEW_ROWS ? TILE_DEPTH * padded : 0);
        grow(unpacked, 2 * KEYS * dim);
    }

    // The tokens `start … end-1` of a sequence, from multiples of KEYS on.
    void see(const Cache<T>& cache, const int32_t* table, int64_t kv_head, int64_t skipped,
             int64_t start, int64_t end, float scale) {
        part.begin(count, padded);
        Tile<T> tiles[2];
        auto look_up = [&](Tile<T>& tile, int64_t at) {
            tile.first = int(std::clamp<int64_t>(skipped - at, 0, KEYS));
            tile.count = int(std::clamp<int64_t>(end - at, 0, KEYS));
            cache.rows(table, kv_head, at + tile.first - skipped, at + tile.count - skipped,
                       tile.rows + tile.first);
        };
        look_up(tiles[0], start);
        for (int i = 0; start < end; i ^= 1, start += KEYS) {
            Tile<T>& tile = tiles[i];
            const Tile<T>& next = tiles[!i];
            look_up(tiles[!i], start + KEYS);
            int64_t to_values = cache.to_values;
            if (cache.format != AS_IT_IS) {
                for (int k = next.first; k < next.count; k++) cache.fetch_bytes(next.rows[k]);
                to_values = cache.unpack(tile.rows, tile.first, tile.count, KEYS, unpacked.data());
            }
            if (count <= FEW_ROWS) {
                with_rows(count, [&](auto rows) {
                    attend_few<rows>(tile, next, to_values, start, scale);
                });
                continue;
            }
            for (int k = next.first; k < next.count; k++) {
                fetch(next.rows[k], dim);
                fetch(next.rows[k] + cache.to_values, dim);
            }
            pack_keys(tile, depth, keys.data());
            pack_values(tile, to_values, dim, values.data());
            for (int64_t first = 0; first < count; first += ROWS)
                if (sees(first, start, tile.count))
                    with_rows(std::min<int64_t>(ROWS, count - first), [&](auto rows) {
                        attend<rows>(first, start, tile.count, scale);
                    });
        }
    }

    // Adds the part to what was seen before.
    void add_part() {
        for (int64_t r = 0; r < count; r++) {
            const float highest = std::max(all.highest[r], part.highest[r]);
            const float base = highest == -INFINITY ? 0 : highest;  // it has seen nothing
            const float before = std::exp(all.highest[r] - base);
            const float share = std::exp(part.highest[r] - base);
            all.highest[r] = highest;
            all.weight[r] = all.weight[r] * before + part.weight[r] * share;
            for (int64_t i = r * padded; i < (r + 1) * padded; i += LANES)
                store(&all.sums[i],
                      fma(broadcast(share), load(&part.sums[i]), load(&all.sums[i]) * before));
        }
    }

    // Writes row r; `load_values` says in which order its sums are.
    void write(int64_t r, T* out) const {
        const float *sums = &all.sums[r * padded], weight = all.weight[r];
        if constexpr (NUMBERS<U> == 2) {
            for (int64_t i = 0; i < dim; i += 2 * LANES) {
                const BitVec words = round_to_bfloat16(load(sums + i) / weight) |
                                     round_to_bfloat16(load(sums + i + LANES) / weight) << 16;
                memcpy(out + i, &words, std::min<int64_t>(2 * LANES, dim - i) * sizeof(T));
            }
        } else {
            for_vectors(dim, [&](int64_t i, int64_t some) {
                store_some(out + i, load(sums + i) / weight, some);
            });
        }
    }

private:
    // Calls f with the number of rows, FEW_ROWS at most, as a constant.
    template <typename F>
    static INLINE void with_rows(int64_t rows, F f) {
        switch (rows) {
            case 1: return f(std::integral_constant<int, 1>());
            case 2: return f(std::integral_constant<int, 2>());
            case 3: return f(std::integral_constant<int, 3>());
            case 4: return f(std::integral_constant<int, 4>());
            case 5: return f(std::integral_constant<int, 5>());
            case 6: return f(std::integral_constant<int, 6>());
            case 7: return f(std::integral_constant<int, 7>());
            default: return f(std::integral_constant<int, FEW_ROWS>());
        }
    }

    // Whether one of ROWS rows sees one of the keys from token `at` on.
    bool sees(int64_t first, int64_t at, int num_keys) const {
        bool found = false;
        for (int64_t r = first; r < std::min(first + ROWS, count); r++)
            found |= from[r] < at + num_keys && to[r] > at;
        return found;
    }

    // The packed tile that begins at token `at`, for R rows.
    template <int R>
    void attend(int64_t first, int64_t at, int num_keys, float scale) {
        alignas(64) float scores[R * KEYS] = {};
        alignas(64) U weights[R * TILE_DEPTH];
        for (int panel = 0; panel * COLUMNS < num_keys; panel++)
            multiply<R>(&queries[first * depth], depth, &keys[panel * depth * COLUMNS], depth,
                        scores + panel * COLUMNS, KEYS);
        softmax<R>(first, at, num_keys, scale, scores, weights);
        const int64_t units = (num_keys + NUMBERS<U> - 1) / NUMBERS<U>;
        for (int64_t column = 0; column < padded; column += COLUMNS)
            multiply<R>(weights, TILE_DEPTH, &values[column * TILE_DEPTH], units,
                        &part.sums[first * padded + column], padded);
    }

    // The same products, for all rows there are, straight from the blocks: for so few rows a copy of
    // the tile does not pay. The next tile is fetched meanwhile.
    template <int R>
    void attend_few(const Tile<T>& tile, const Tile<T>& next, int64_t to_values, int64_t at,
                    float scale) {
        alignas(64) float scores[R * KEYS];
        alignas(64) U weights[R * TILE_DEPTH];
        constexpr int G = R == 1 ? 4 : R <= 4 ? 2 : 1;  // so many sums are under way at a time
        int k = tile.first / LANES * LANES;
        for (; k >= tile.first && depth % LANES == 0 && k + G * LANES <= tile.count; k += G * LANES)
            score_few<R, G, true>(tile, next, k, scores);
        for (; k < tile.count; k += LANES) score_few<R, 1, false>(tile, next, k, scores);
        softmax<R>(0, at, tile.count, scale, scores, weights);
        constexpr int P = R <= 2 ? 2 : 1;
        int64_t column = 0;
        for (; column + P * COLUMNS <= dim; column += P * COLUMNS)
            add_few<R, P, true>(tile, next, to_values, column, weights);
        for (; column + COLUMNS <= dim; column += COLUMNS)
            add_few<R, 1, true>(tile, next, to_values, column, weights);
        for (; column < dim; column += COLUMNS)
            add_few<R, 1, false>(tile, next, to_values, column, weights);
    }

    // Scores of G · LANES keys from `key` on. FULL: all of them exist, in whole vectors.
    template <int R, int G, bool FULL>
    INLINE void score_few(const Tile<T>& tile, const Tile<T>& next, int key, float* scores) {
        Vec sums[G][R] = {};
        for (int i = std::max(key, next.first); i < std::min(key + G * LANES, next.count); i++)
            fetch(next.rows[i], dim);
        for (int64_t d = 0; d < depth; d += LANES) {
            const U* query = &queries[d];
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                Vec square[LANES];
                load_square<FULL>(tile, key + g * LANES, d, depth, square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++)
                        if (FULL || i < depth - d)
                            sums[g][r] = multiply_add(query[r * depth + i], square[i], sums[g][r]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) store(scores + r * KEYS + key + g * LANES, sums[g][r]);
    }

    // Weighted values, P panels of their numbers from `column` on. FULL: no panel ends early.
    template <int R, int P, bool FULL>
    INLINE void add_few(const Tile<T>& tile, const Tile<T>& next, int64_t to_values, int64_t column,
                        const U* weights) {
        constexpr int per_unit = NUMBERS<U>;
        Vec sums[R][P * WIDTH];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int w = 0; w < P * WIDTH; w++)
                sums[r][w] = load(&part.sums[r * padded + column + w * LANES]);
        auto add = [&](auto full, int k) {
            if (column == 0)
                for (int i = k; i < k + per_unit; i++)
                    if (const T* row = next.value(i, to_values)) fetch(row, dim);
            Vec right[P * WIDTH];
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const int64_t at = column + p * COLUMNS;
                if constexpr (full) {
                    load_values<true>(tile.rows[k] + to_values, tile.rows[k + per_unit - 1] + to_values,
                                      at, dim, right + p * WIDTH);
                } else {
                    load_values<false>(tile.value(k, to_values), tile.value(k + 1, to_values), at, dim,
                                       right + p * WIDTH);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int w = 0; w < P * WIDTH; w++)
                    sums[r][w] =
                        multiply_add(weights[r * TILE_DEPTH + k / per_unit], right[w], sums[r][w]);
        };
        int k = tile.first / per_unit * per_unit;
        for (; FULL && k >= tile.first && k + per_unit <= tile.count; k += per_unit)
            add(std::bool_constant<FULL>(), k);
        for (; k < tile.count; k += per_unit) add(std::false_type(), k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int w = 0; w < P * WIDTH; w++)
                store(&part.sums[r * padded + column + w * LANES], sums[r][w]);
    }

    template <int R>
    void softmax(int64_t first, int64_t at, int num_keys, float scale, float* scores, U* weights) {
        for (int r = 0; r < R; r++)
            softmax_row(first + r, from[first + r] - at,
                        std::min(to[first + r] - at, int64_t(num_keys)), scale, scores + r * KEYS,
                        weights + r * TILE_DEPTH);
    }

    // Scores become weights relative to the highest score so far, and what was summed before
    // follows (arXiv:1805.02867). The row sees the keys `from … to-1` of the tile.
    void softmax_row(int64_t row, int64_t from, int64_t to, float scale, float* scores, U* weights) {
        for (int64_t k = 0; k < std::min<int64_t>(from, KEYS); k++) scores[k] = -INFINITY;
        for (int64_t k = std::max<int64_t>(to, 0); k < KEYS; k++) scores[k] = -INFINITY;
        Vec top = broadcast(part.highest[row]);
        for (int k = 0; k < KEYS; k += LANES) top = max(load(scores + k) * scale, top);
        const float highest = largest(top);
        const float base = highest == -INFINITY ? 0 : highest;  // it has seen nothing
        const float shrink = std::exp(part.highest[row] - base);
        Vec total = {};
        for (int k = 0; k < KEYS; k += LANES) {
            const Vec share = exp(load(scores + k) * scale - base);
            if constexpr (NUMBERS<U> == 2) {
                store((BFloat16*)weights + k, share);
            } else {
                store(weights + k, share);
            }
            total += share;
        }
        part.highest[row] = highest;
        part.weight[row] = part.weight[row] * shrink + sum(total);
        if (shrink != 1.0f)
            for (int64_t i = row * padded; i < (row + 1) * padded; i += LANES)
                store(&part.sums[i], load(&part.sums[i]) * shrink);
    }
};

// Rows of one sequence that share a KV head, and the tokens that any of them sees.
struct Work {
    int64_t sequence, kv_head, first, count;
    int64_t begin, end;  // begin: a multiple of KEYS
    int64_t stored;      // where its first part's results are, if they are stored

    int64_t parts() const { return (end - 1) / PART - begin / PART + 1; }
    int64_t part_begin(int64_t p) const { return std::max(begin, (begin / PART + p) * PART); }
    int64_t part_end(int64_t p) const { return std::min(end, (begin / PART + p + 1) * PART); }
};

// One part of a work, or all.
struct Task {
    const Work* work;
    int64_t part;  // -1: all
};

}  // namespace

// out[row] = attention of each new token over the tokens before it and itself: the last `window` of
// them, or with `chunked` those of its own chunk of `window` tokens. Sequence i computes `counts[i]`
// tokens, whose rows begin at `rows[i]`, after `starts[i]` that are in the cache; its keys are all
// there. Its table begins `skipped[i]` tokens behind the sequence's first one, and `starts` counts
// from there. `query` has `query_stride` numbers from token to token, `out` heads · dim. `dim` is
// even.
EXPORT void paged_attention(int64_t dtype, int64_t threads, int64_t sequences, int64_t heads,
                            int64_t kv_heads, int64_t dim, int64_t block_size, int64_t format,
                            int64_t window, int64_t chunked, double scale, const void* query, int64_t query_stride,
                            const void* keys, const void* values, const int32_t* rows,
                            const int32_t* counts, const int32_t* starts, const int32_t* skipped,
                            const int32_t* tables, int64_t table_stride, void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const Cache<T> cache(keys, values, format, kv_heads, dim, block_size);
        const int64_t shared = heads / kv_heads;
        auto first_seen = [&](int64_t position) {
            return chunked ? position / window * window : std::max<int64_t>(0, position + 1 - window);
        };
        std::vector<Work> all;
        int64_t most = 0;
        for (int64_t i = 0; i < sequences; i++)
            for (int64_t first = 0; first < counts[i] * shared; first += BLOCK) {
                const int64_t some = std::min(BLOCK, counts[i] * shared - first);
                const int64_t start = skipped[i] + starts[i];
                const int64_t begin = first_seen(start + first / shared) / KEYS * KEYS;
                const int64_t end = start + (first + some - 1) / shared + 1;
                most = std::max(most, some);
                for (int64_t h = 0; h < kv_heads; h++) all.push_back({i, h, first, some, begin, end, 0});
            }
        std::reverse(all.begin(), all.end());  // what sees the most first

        // Where there are few works, their parts are tasks, and added up afterwards.
        const bool splits = threads > 1 && int64_t(all.size()) < 4 * threads;
        const int64_t padded = (dim + COLUMNS - 1) / COLUMNS * COLUMNS;
        std::vector<Task> tasks;
        std::vector<Work*> split;
        int64_t stored = 0;
        for (Work& work : all) {
            if (splits && work.count <= FEW && work.parts() > 1) {
                split.push_back(&work);
                work.stored = stored;
                stored += work.parts() * work.count * (padded + 2);
                for (int64_t p = 0; p < work.parts(); p++) tasks.push_back({&work, p});
            } else {
                tasks.push_back({&work, -1});
            }
        }
        std::vector<float> results(stored);  // of parts: sums, highest, weight

        auto token = [&](const Work& work, int64_t r) { return (work.first + r) / shared; };
        auto head = [&](const Work& work, int64_t r) {
            return work.kv_head * shared + (work.first + r) % shared;
        };
        auto begin = [&](Rows<T>& part, const Work& work) {
            part.count = work.count;
            for (int64_t r = 0; r < work.count; r++) {
                const int64_t t = token(work, r);
                const int64_t position = skipped[work.sequence] + starts[work.sequence] + t;
                part.from[r] = first_seen(position);
                part.to[r] = position + 1;
                const T* row = (const T*)query + (rows[work.sequence] + t) * query_stride +
                               head(work, r) * dim;
                for (int64_t d = 0; d < part.depth; d += LANES) {
                    const int64_t some = std::min<int64_t>(LANES, part.depth - d);
                    const Vec units = load_units(row, d, some);
                    memcpy((void*)&part.queries[r * part.depth + d], &units, some * sizeof(float));
                }
            }
        };
        auto see = [&](Rows<T>& part, const Work& work, int64_t p) {
            part.see(cache, tables + work.sequence * table_stride, work.kv_head,
                     skipped[work.sequence], work.part_begin(p), work.part_end(p), float(scale));
        };
        auto write = [&](const Rows<T>& part, const Work& work) {
            for (int64_t r = 0; r < work.count; r++)
                part.write(r, (T*)out + ((rows[work.sequence] + token(work, r)) * heads +
                                         head(work, r)) * dim);
        };
        // A part's results to their place, or back.
        auto result_of = [&](Seen& seen, const Work& work, int64_t p, bool back) {
            float* at = &results[work.stored + p * work.count * (padded + 2)];
            for (auto [numbers, count] : {std::pair{&seen.sums, work.count * padded},
                                          std::pair{&seen.highest, work.count},
                                          std::pair{&seen.weight, work.count}}) {
                memcpy(back ? numbers->data() : at, back ? at : numbers->data(),
                       count * sizeof(float));
                at += count;
            }
        };
        const int n = int(std::min<int64_t>(threads, int64_t(tasks.size())));
#pragma omp parallel num_threads(n) if (n > 1)
        {
            static thread_local Rows<T> part;
            part.prepare(dim, most);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < tasks.size(); i++) {
                const Work& work = *tasks[i].work;
                begin(part, work);
                if (tasks[i].part >= 0) {
                    see(part, work, tasks[i].part);
                    result_of(part.part, work, tasks[i].part, false);
                    continue;
                }
                part.all.begin(part.count, part.padded);
                for (int64_t p = 0; p < work.parts(); p++) {
                    see(part, work, p);
                    part.add_part();
                }
                write(part, work);
            }
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < split.size(); i++) {
                const Work& work = *split[i];
                part.count = work.count;
                part.all.begin(part.count, part.padded);
                for (int64_t p = 0; p < work.parts(); p++) {
                    result_of(part.part, work, p, true);
                    part.add_part();
                }
                write(part, work);
            }
        }
    });
}
