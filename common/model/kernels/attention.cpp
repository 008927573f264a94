// Attention over the paged KV cache, in place: one query for each sequence. Keys and values are
// read once for all query heads that share them; sums are float32; the softmax is the online one
// (arXiv:1805.02867), over tiles of keys. Long contexts of few sequences are split between threads
// and merged (as in Flash-Decoding).

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "paged.h"

namespace {

constexpr int TILE = 64;  // keys
constexpr int GROUP = 8;  // query heads taken together at most

// What one (sequence, KV head, part of the context) sees of its query heads.
template <typename T>
struct Heads {
    int count;
    float query[GROUP][MAX_DIM];       // in the order of load2, zeros behind the head's numbers
    float sums[GROUP][MAX_DIM];        // of the values seen so far, weighted; in the same order
    float highest[GROUP], weight[GROUP];
    alignas(64) float scores[GROUP][TILE];
#if defined(__AVX512BF16__)
    BFloat16 query_bits[GROUP][MAX_DIM];  // as in memory, zeros behind
#endif
};

// The sums of LANES vectors, one in each lane: a transposition that adds on its way.
constexpr int lane_of(int i, int step) { return i % (2 * step) < step ? i : LANES + i - step; }

template <int STEP, int... I>
INLINE Vec add_halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, lane_of(I, STEP)...) +
           __builtin_shufflevector(a, b, (lane_of(I, STEP) + STEP)...);
}

template <int STEP>
INLINE Vec sums_of(const Vec* parts) {
    if constexpr (STEP == 0) {
        return parts[0];
    } else {
        const Vec a = sums_of<STEP / 2>(parts), b = sums_of<STEP / 2>(parts + STEP);
        return add_halves<STEP>(a, b, std::make_integer_sequence<int, LANES>());
    }
}

template <typename T, typename Dim>
INLINE Vec dot(const Heads<T>& heads, int h, const T* key, Dim dim) {
    Vec first = {}, second = {};
    for_pairs(dim, [&](int64_t i, int64_t count) {
        const Two k = load2_some(key + i, count);
        first = fma(load(heads.query[h] + i), k.first, first);
        second = fma(load(heads.query[h] + i + LANES), k.second, second);
    });
    return first + second;
}

#if defined(__AVX512BF16__)
template <typename Dim>
INLINE Vec dot(const Heads<BFloat16>& heads, int h, const BFloat16* key, Dim dim) {
    __m512 sum = _mm512_setzero_ps();
    for_pairs(dim, [&](int64_t i, int64_t count) {
        const __mmask32 mask = __mmask32((uint64_t(1) << count) - 1);
        const __m512i k = count == 32 ? _mm512_loadu_si512(key + i)
                                      : _mm512_maskz_loadu_epi16(mask, key + i);
        const __m512i q = _mm512_loadu_si512(heads.query_bits[h] + i);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k);
    });
    return (Vec)sum;
}
#endif

// The rows of a tile, and of the one after it, which are fetched meanwhile.
template <typename T>
struct Tile {
    const T* rows[TILE];
    int count;
};

// scores[h] = query · key, unscaled, of each key in the tile.
template <typename T, typename Dim>
void score_tile(Heads<T>& heads, const Tile<T>& tile, const Tile<T>& next, Dim dim) {
    const T* const* keys = tile.rows;
    for (int j = 0; j < tile.count; j += LANES) {
        const int keys_here = std::min(LANES, tile.count - j);
        for (int i = j; i < j + LANES && i < next.count; i++) fetch(next.rows[i], dim);
        for (int h = 0; h < heads.count; h++) {
            Vec parts[LANES];
            if (keys_here == LANES) {
                for (int i = 0; i < LANES; i++) parts[i] = dot(heads, h, keys[j + i], dim);
            } else {
                for (int i = 0; i < LANES; i++)
                    parts[i] = i < keys_here ? dot(heads, h, keys[j + i], dim) : Vec{};
            }
            store(heads.scores[h] + j, sums_of<LANES / 2>(parts));
        }
    }
}

// Scores become weights relative to the highest score so far, and what was summed before follows.
template <typename T, typename Dim>
void softmax_tile(Heads<T>& heads, int count, float scale, Dim dim) {
    for (int h = 0; h < heads.count; h++) {
        float* scores = heads.scores[h];
        Vec top = broadcast(heads.highest[h]);
        for (int j = count; j % LANES; j++) scores[j] = -INFINITY;
        for (int j = 0; j < count; j += LANES) {
            const Vec scaled = load(scores + j) * scale;
            store(scores + j, scaled);
            top = max(scaled, top);
        }
        const float highest = largest(top);
        const float shrink = std::exp(heads.highest[h] - highest);
        Vec total = {};
        for (int j = 0; j < count; j += LANES) {
            const Vec weight = exp(load(scores + j) - highest);
            store(scores + j, weight);
            total += weight;
        }
        heads.highest[h] = highest;
        heads.weight[h] = heads.weight[h] * shrink + sum(total);
        if (shrink != 1.0f)
            for_pairs(dim, [&](int64_t i, int64_t) {
                store(heads.sums[h] + i, load(heads.sums[h] + i) * shrink);
                store(heads.sums[h] + i + LANES, load(heads.sums[h] + i + LANES) * shrink);
            });
    }
}

// sums[h] += weight of each key · its value.
template <int COUNT, typename T, typename Dim>
void add_values(Heads<T>& heads, const Tile<T>& tile, const Tile<T>& next, Dim dim,
                int64_t to_values) {
    for_pairs(dim, [&](int64_t i, int64_t numbers) {
        Vec first[COUNT], second[COUNT];
        for (int h = 0; h < COUNT; h++) {
            first[h] = load(heads.sums[h] + i);
            second[h] = load(heads.sums[h] + i + LANES);
        }
        for (int j = 0; j < tile.count; j++) {
            if (i == 0 && j < next.count) fetch(next.rows[j] + to_values, dim);
            const Two v = load2_some(tile.rows[j] + to_values + i, numbers);
            for (int h = 0; h < COUNT; h++) {
                const Vec weight = broadcast(heads.scores[h][j]);
                first[h] = fma(weight, v.first, first[h]);
                second[h] = fma(weight, v.second, second[h]);
            }
        }
        for (int h = 0; h < COUNT; h++) {
            store(heads.sums[h] + i, first[h]);
            store(heads.sums[h] + i + LANES, second[h]);
        }
    });
}

template <typename T, typename Dim>
void add_values_of(Heads<T>& heads, const Tile<T>& tile, const Tile<T>& next, Dim dim,
                   int64_t to_values) {
    auto call = [&](auto add) { add(heads, tile, next, dim, to_values); };
    switch (heads.count) {
        case 1: return call(add_values<1, T, Dim>);
        case 2: return call(add_values<2, T, Dim>);
        case 3: return call(add_values<3, T, Dim>);
        case 4: return call(add_values<4, T, Dim>);
        case 5: return call(add_values<5, T, Dim>);
        case 6: return call(add_values<6, T, Dim>);
        case 7: return call(add_values<7, T, Dim>);
        default: return call(add_values<8, T, Dim>);
    }
}

// Takes `count` query heads at `query` to the keys start … end-1 of a sequence.
template <typename T, typename Dim>
void attend(Heads<T>& heads, const Cache<T>& cache, Dim dim, const int32_t* table, int64_t kv_head,
            const T* query, int count, int64_t start, int64_t end, float scale) {
    heads.count = count;
    for (int h = 0; h < count; h++) {
        heads.highest[h] = -INFINITY;
        heads.weight[h] = 0;
        memset(heads.sums[h], 0, sizeof heads.sums[h]);
        for_pairs(dim, [&](int64_t i, int64_t numbers) {
            const Two q = load2_some(query + h * dim + i, numbers);
            store(heads.query[h] + i, q.first);
            store(heads.query[h] + i + LANES, q.second);
        });
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<T, BFloat16>) {
            memset(heads.query_bits[h], 0, sizeof heads.query_bits[h]);
            memcpy(heads.query_bits[h], query + h * dim, dim * sizeof(T));
        }
#endif
    }
    Tile<T> tiles[2];
    auto look_up = [&](Tile<T>& tile) {
        tile.count = cache.rows(table, kv_head, start, std::min(end, start + TILE), tile.rows);
        start += tile.count;
    };
    look_up(tiles[0]);
    for (int i = 0; tiles[i].count; i ^= 1) {
        look_up(tiles[!i]);
        score_tile(heads, tiles[i], tiles[!i], dim);
        softmax_tile(heads, tiles[i].count, scale, dim);
        add_values_of(heads, tiles[i], tiles[!i], dim, cache.to_values);
    }
}

// Of query heads that were taken to several parts of a context: what they saw of all of it.
template <typename T>
void write_merged(const Heads<T>* parts, int64_t count, int h, int64_t dim, T* out) {
    float highest = -INFINITY, weight = 0;
    for (int64_t p = 0; p < count; p++) highest = std::max(highest, parts[p].highest[h]);
    float share[MAX_SPLITS];
    for (int64_t p = 0; p < count; p++) {
        share[p] = std::exp(parts[p].highest[h] - highest);
        weight += share[p] * parts[p].weight[h];
    }
    for_pairs(dim, [&](int64_t i, int64_t numbers) {
        Two total = {};
        for (int64_t p = 0; p < count; p++) {
            total.first = fma(broadcast(share[p]), load(parts[p].sums[h] + i), total.first);
            total.second =
                fma(broadcast(share[p]), load(parts[p].sums[h] + i + LANES), total.second);
        }
        store2_some(out + i, {total.first / weight, total.second / weight}, numbers);
    });
}

int64_t choose_splits(int64_t items, int64_t longest, int64_t threads) {
    if (threads == 1) return 1;
    const int64_t wanted = (4 * threads + items - 1) / items;
    return std::max<int64_t>(1, std::min({wanted, longest / 256, int64_t(MAX_SPLITS)}));
}

}  // namespace

// out[row of sequence i] = attention of its one query over the last `window` of its `lengths[i]`
// tokens, its own included, which is in the cache already. `query` has `query_stride` numbers from token to token,
// `out` heads · dim.
EXPORT void paged_decode(int64_t dtype, int64_t threads, int64_t sequences, int64_t heads,
                         int64_t kv_heads, int64_t dim, int64_t block_size, int64_t window,
                         double scale, const void* query, int64_t query_stride, const void* keys,
                         const void* values, const int32_t* rows, const int32_t* lengths,
                         const int32_t* tables, int64_t table_stride, void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const Cache<T> cache((const T*)keys, (const T*)values, kv_heads, dim, block_size);
        const int64_t shared = heads / kv_heads, groups = (shared + GROUP - 1) / GROUP;
        const int64_t items = sequences * kv_heads * groups;
        if (items == 0) return;
        const int64_t longest = *std::max_element(lengths, lengths + sequences);
        const int64_t splits = choose_splits(items, std::min(longest, window), threads);
        std::vector<Heads<T>> parts(splits == 1 ? 0 : items * splits);

        auto place = [&](int64_t item, auto f) {
            const int64_t group = item % groups, kv_head = item / groups % kv_heads;
            const int64_t sequence = item / groups / kv_heads;
            const int64_t head = kv_head * shared + group * GROUP;
            f(sequence, kv_head, head, int(std::min<int64_t>(GROUP, shared - group * GROUP)));
        };
        auto output = [&](int64_t sequence, int64_t head) {
            return (T*)out + (rows[sequence] * heads + head) * dim;
        };
        const int n = int(std::min(threads, items * splits));
#pragma omp parallel for num_threads(n) if (n > 1) schedule(dynamic)
        for (int64_t work = 0; work < items * splits; work++) {
            place(work / splits, [&](int64_t sequence, int64_t kv_head, int64_t head, int count) {
                const int64_t length = lengths[sequence], split = work % splits;
                const int64_t seen = std::min(length, window), start = length - seen;
                Heads<T> alone;
                Heads<T>& part = splits == 1 ? alone : parts[work];
                const T* q = (const T*)query + rows[sequence] * query_stride + head * dim;
                with_dim(dim, [&](auto known) {
                    attend(part, cache, known, tables + sequence * table_stride, kv_head, q, count,
                           start + seen * split / splits, start + seen * (split + 1) / splits,
                           float(scale));
                });
                if (splits == 1)
                    for (int h = 0; h < count; h++)
                        write_merged(&part, 1, h, dim, output(sequence, head + h));
            });
        }
        if (splits == 1) return;
        for (int64_t item = 0; item < items; item++)
            place(item, [&](int64_t sequence, int64_t, int64_t head, int count) {
                for (int h = 0; h < count; h++)
                    write_merged(&parts[item * splits], splits, h, dim, output(sequence, head + h));
            });
    });
}
