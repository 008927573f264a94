// Attention of several queries a sequence over the paged KV cache: tiles of keys and values are
// copied out of their blocks into the order in which a small matrix product reads them, once for a
// few hundred rows; scores never leave the first cache (FlashAttention-2, arXiv:2307.08691).
// bfloat16 is multiplied as such where the CPU can, and in float32 elsewhere.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "paged.h"

namespace {

constexpr int KEYS = 64;                           // of a tile
constexpr int ROWS = 6;                            // of a product
constexpr int WIDTH = LANES == 16 ? 4 : 2;         // vectors of a product's row
constexpr int COLUMNS = WIDTH * LANES;
constexpr int64_t BLOCK = 64 * ROWS;               // rows that share a tile's copy

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

// out[ROWS, COLUMNS] += a[ROWS, depth] · b[depth, COLUMNS], in units; `stride` of a in units, of
// out in floats.
template <typename U>
INLINE void multiply(const U* a, int64_t stride, const U* b, int64_t depth, float* out,
                     int64_t out_stride) {
    Vec sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) sums[r][w] = load(out + r * out_stride + w * LANES);
    for (int64_t d = 0; d < depth; d++) {
        Vec right[WIDTH];
        for (int w = 0; w < WIDTH; w++) memcpy(&right[w], b + d * COLUMNS + w * LANES, sizeof(Vec));
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < WIDTH; w++)
                sums[r][w] = multiply_add(a[r * stride + d], right[w], sums[r][w]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) store(out + r * out_stride + w * LANES, sums[r][w]);
}

INLINE float number(const float* p) { return *p; }
INLINE float number(const BFloat16* p) { return bit_cast<float>(uint32_t(p->bits) << 16); }
INLINE float number(const Float16* p) { return load_part(p, 1)[0]; }

// A row of `dim` numbers as units; behind it nothing is written.
template <typename T>
INLINE void copy_row(const T* row, int64_t dim, Unit<T>* out) {
    if constexpr (NUMBERS<Unit<T>> == 2) {
        memcpy(out, row, dim * sizeof(T));
    } else {
        for_vectors(dim, [&](int64_t i, int64_t count) {
            store_some(out + i, load_some(row + i, count), count);
        });
    }
}

// Keys as the right side of a product: panels of COLUMNS keys, [depth, COLUMNS] each.
template <typename T>
void pack_keys(const T* const* rows, int count, int64_t dim, Unit<T>* out) {
    constexpr int per_unit = NUMBERS<Unit<T>>;
    const int64_t depth = dim / per_unit;
    Unit<T> row[MAX_DIM];
    for (int k = 0; k < KEYS; k++) {
        if (k < count) {
            copy_row(rows[k], dim, row);
        } else {
            std::fill(row, row + depth, Unit<T>{});
        }
        Unit<T>* column = out + k / COLUMNS * depth * COLUMNS + k % COLUMNS;
        for (int64_t d = 0; d < depth; d++) column[d * COLUMNS] = row[d];
    }
}

// Values as the right side: panels of COLUMNS of the head's numbers, [keys, COLUMNS] each, where
// two keys make a row if a unit has two numbers.
template <typename T>
void pack_values(const T* const* rows, int count, int64_t to_values, int64_t dim, Unit<T>* out) {
    constexpr int per_unit = NUMBERS<Unit<T>>;
    constexpr int64_t depth = KEYS / per_unit;
    const int64_t panels = (dim + COLUMNS - 1) / COLUMNS;
    memset((void*)out, 0, panels * depth * COLUMNS * sizeof(Unit<T>));
    for (int k = 0; k < count; k++) {
        const T* row = rows[k] + to_values;
        for (int64_t i = 0; i < dim; i++) {
            Unit<T>* unit = out + (i / COLUMNS * depth + k / per_unit) * COLUMNS + i % COLUMNS;
            if constexpr (per_unit == 2) {
                unit->bits |= uint32_t(row[i].bits) << (k % 2 * 16);
            } else {
                *unit = number(row + i);
            }
        }
    }
}

// The rows of a block, a query head of a token each, and what they have seen so far.
template <typename T>
struct Rows {
    using U = Unit<T>;
    int64_t dim, depth, padded;  // `depth`: units of a head; `padded`: dim in whole panels
    std::vector<U> queries;      // [BLOCK, depth]
    std::vector<float> sums;     // [BLOCK, padded]
    std::vector<float> highest, weight;
    std::vector<U> keys, values;  // of a tile

    Rows(int64_t dim)
        : dim(dim), depth(dim / NUMBERS<U>), padded((dim + COLUMNS - 1) / COLUMNS * COLUMNS),
          queries(BLOCK * depth), sums(BLOCK * padded), highest(BLOCK, -INFINITY), weight(BLOCK),
          keys(KEYS * depth), values(KEYS / NUMBERS<U> * padded) {}

    // A tile for ROWS rows from `first` on; row r may see its keys `from[r] … to[r]-1`.
    void attend(int64_t first, const int64_t* from, const int64_t* to, float scale) {
        alignas(64) float scores[ROWS * KEYS] = {};
        alignas(64) U weights[ROWS * KEYS / NUMBERS<U>];
        for (int panel = 0; panel < KEYS / COLUMNS; panel++)
            multiply(&queries[first * depth], depth, &keys[panel * depth * COLUMNS], depth,
                     scores + panel * COLUMNS, KEYS);
        for (int r = 0; r < ROWS; r++)
            softmax(first + r, from[r], to[r], scale, scores + r * KEYS,
                    weights + r * KEYS / NUMBERS<U>);
        for (int64_t column = 0; column < padded; column += COLUMNS)
            multiply(weights, KEYS / NUMBERS<U>, &values[column * KEYS / NUMBERS<U>],
                     KEYS / NUMBERS<U>, &sums[first * padded + column], padded);
    }

    void softmax(int64_t row, int64_t from, int64_t to, float scale, float* scores, U* weights) {
        for (int64_t k = 0; k < std::min<int64_t>(from, KEYS); k++) scores[k] = -INFINITY;
        for (int64_t k = std::max<int64_t>(to, 0); k < KEYS; k++) scores[k] = -INFINITY;
        Vec top = broadcast(highest[row]);
        for (int k = 0; k < KEYS; k += LANES) top = max(load(scores + k) * scale, top);
        const float new_highest = largest(top);
        const float base = new_highest == -INFINITY ? 0 : new_highest;  // it has seen nothing
        const float shrink = std::exp(highest[row] - base);
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
        highest[row] = new_highest;
        weight[row] = weight[row] * shrink + sum(total);
        if (shrink != 1.0f)
            for (int64_t i = 0; i < padded; i += LANES) {
                float* part = &sums[row * padded + i];
                store(part, load(part) * shrink);
            }
    }
};

// Rows of one sequence that share a KV head, and where they are.
struct Work {
    int64_t chunk, kv_head, first, count;
};

}  // namespace

// As `paged_decode`, for sequences that compute `counts[i]` tokens after `starts[i]` that are in
// the cache; their rows begin at `rows[i]`. All their keys are in the cache. `dim` is even.
EXPORT void paged_prefill(int64_t dtype, int64_t threads, int64_t sequences, int64_t heads,
                          int64_t kv_heads, int64_t dim, int64_t block_size, int64_t window,
                          double scale, const void* query, int64_t query_stride, const void* keys,
                          const void* values, const int32_t* rows, const int32_t* counts,
                          const int32_t* starts, const int32_t* tables, int64_t table_stride,
                          void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const Cache<T> cache((const T*)keys, (const T*)values, kv_heads, dim, block_size);
        const int64_t shared = heads / kv_heads;
        std::vector<Work> all;
        for (int64_t i = 0; i < sequences; i++)
            for (int64_t first = 0; first < counts[i] * shared; first += BLOCK)
                for (int64_t h = 0; h < kv_heads; h++)
                    all.push_back({i, h, first, std::min(BLOCK, counts[i] * shared - first)});
        std::reverse(all.begin(), all.end());  // what sees the most first
        const int n = int(std::min<int64_t>(threads, int64_t(all.size())));
#pragma omp parallel for num_threads(n) if (n > 1) schedule(dynamic)
        for (size_t w = 0; w < all.size(); w++) {
            const Work work = all[w];
            const int64_t start = starts[work.chunk];
            auto token = [&](int64_t r) { return (work.first + r) / shared; };
            auto head = [&](int64_t r) {
                return work.kv_head * shared + (work.first + r) % shared;
            };
            Rows<T> part(dim);
            for (int64_t r = 0; r < work.count; r++)
                copy_row((const T*)query + (rows[work.chunk] + token(r)) * query_stride +
                             head(r) * dim,
                         dim, &part.queries[r * part.depth]);
            const int64_t end = start + token(work.count - 1) + 1;
            const int64_t begin = std::max<int64_t>(0, start + token(0) + 1 - window);
            for (int64_t tile = begin; tile < end; tile += KEYS) {
                const T* places[KEYS];
                const int count = cache.rows(tables + work.chunk * table_stride, work.kv_head, tile,
                                             std::min(end, tile + KEYS), places);
                pack_keys(places, count, dim, part.keys.data());
                pack_values(places, count, cache.to_values, dim, part.values.data());
                for (int64_t first = 0; first < work.count; first += ROWS) {
                    int64_t from[ROWS], to[ROWS];
                    for (int64_t r = 0; r < ROWS; r++) {
                        const int64_t past =
                            start + token(std::min(first + r, work.count - 1)) + 1 - tile;
                        from[r] = past - window;
                        to[r] = std::min<int64_t>(count, past);
                    }
                    if (to[ROWS - 1] > 0 && from[0] < count)
                        part.attend(first, from, to, float(scale));
                }
            }
            for (int64_t r = 0; r < work.count; r++) {
                T* row = (T*)out + ((rows[work.chunk] + token(r)) * heads + head(r)) * dim;
                for_vectors(dim, [&](int64_t i, int64_t count) {
                    store_some(row + i, load(&part.sums[r * part.padded + i]) / part.weight[r],
                               count);
                });
            }
        }
    });
}
