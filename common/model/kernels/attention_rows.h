// Rows of attention (a query head of a token each) that share a KV head, and what they have seen of its
// tokens so far: tile by tile, with weights relative to the highest score (arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cache.h"
#include "products.h"
#include "vec.h"

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

// Rows of one KV head, and what they have seen. Each thread has one, for all its works.
template <typename T, typename Products>
struct Rows {
    using S = Stored<T>;
    using U = Unit<S>;
    static constexpr int64_t CHUNK = std::max(Products::ROWS, Products::FEW);
    Products products;
    int64_t dim, depth, padded;  // `depth`: units of a row; `padded`: numbers of its sums
    int64_t count;
    std::vector<U> queries;  // [rows, depth]
    std::vector<int64_t> from, to;  // of each row: which keys it may see
    Seen part, all;
    Tokens tokens;
    const Tokens* then;
    int64_t found;     // tiles: the number of the first one that is not in `tiles` yet
    Tile<S> tiles[3];  // by number, modulo 3: one is computed, two are fetched meanwhile
    std::vector<float> scores;  // [CHUNK, KEYS]
    std::vector<U> weights;     // [CHUNK, UNITS]

    // Makes room for `most` rows. Memory is kept from call to call.
    void prepare(const Cache<T>& cache, int64_t most) {
        products.prepare(cache.row);
        dim = cache.dim, depth = products.depth, padded = products.padded;
        most = round_up(most, CHUNK);
        grow(queries, most * depth);
        grow(from, most);
        grow(to, most);
        for (Seen* seen : {&part, &all}) {
            grow(seen->sums, most * padded);
            grow(seen->highest, most);
            grow(seen->weight, most);
        }
        grow(scores, CHUNK * KEYS);
        grow(weights, CHUNK * Products::UNITS);
    }

    // Row `r` is the query `from`, with zeros behind.
    void set_query(int64_t r, const T* from) {
        U* query = &queries[r * depth];
        std::fill_n(query, depth, U{});
        if constexpr (PER_UNIT<S> == 2) {
            memcpy((void*)query, from, dim * sizeof(T));
        } else {
            for_vectors(dim, [&](int64_t i, int64_t some) {
                store_some(query + i, load_some(from + i, some), some);
            });
        }
    }

    // Begins a work. `following` is the next one, whose tiles are fetched at the end of this one.
    void begin_tokens(const Tokens& own, const Tokens* following) {
        tokens = own, then = following;
        found = own.begin / KEYS;
    }

    // The tokens `start … end-1`, from a multiple of KEYS on.
    void see(const Cache<T>& cache, int64_t start, int64_t end, float scale) {
        part.begin(count, padded);
        products.begin(queries.data(), count);
        found = std::max(found, start / KEYS);
        for (int64_t n = start / KEYS; n * KEYS < end; n++) {
            find_tiles(cache, n + 2);
            const Tile<S>&tile = tiles[n % 3], &next = tiles[(n + 1) % 3], &later = tiles[(n + 2) % 3];
            if (count <= Products::FEW) {
                products.score_few(tile, later, queries.data(), count, scores.data());
                softmax(0, count, n * KEYS, end, scale);
                products.add_few(tile, next, later, weights.data(), count, part.sums.data());
            } else {
                see_many(tile, next, n * KEYS, end, scale);
            }
        }
        products.end();
    }

    void find_tiles(const Cache<T>& cache, int64_t last) {
        for (; found <= last; found++) {
            const int64_t behind = found * KEYS - round_up(tokens.end, KEYS);
            Tile<S>& tile = tiles[found % 3];
            if (behind < 0 || !then) {
                cache.find(tokens, found * KEYS, tile);
            } else {
                cache.find(*then, then->begin + behind, tile);
            }
        }
    }

    void see_many(const Tile<S>& tile, const Tile<S>& next, int64_t at, int64_t end, float scale) {
        for (int g = 0; g < GROUPS; g++) {
            next.fetch_keys(g, products.row);
            next.fetch_values(g, products.row);
        }
        products.pack_keys(tile);
        products.pack_values(tile);
        for (int64_t first = 0; first < count; first += Products::ROWS) {
            const int64_t some = std::min<int64_t>(Products::ROWS, count - first);
            if (!sees(first, some, at)) continue;
            products.score(&queries[first * depth], some, scores.data());
            softmax(first, some, at, end, scale);
            products.add(weights.data(), some, &part.sums[first * padded]);
        }
    }

    // Adds the part to what was seen before.
    void add_part() {
        for (int64_t r = 0; r < count; r++) {
            const Vec before = broadcast(all.highest[r]), here = broadcast(part.highest[r]);
            const Vec base = or_zero(max(before, here));
            const Vec kept = exp2(before - base), share = exp2(here - base);
            all.highest[r] = std::max(all.highest[r], part.highest[r]);
            all.weight[r] = all.weight[r] * kept[0] + part.weight[r] * share[0];
            for (int64_t i = r * padded; i < (r + 1) * padded; i += LANES)
                store(&all.sums[i],
                      fma(share, load(&part.sums[i]), load(&all.sums[i]) * kept));
        }
    }

    // Writes row r; `load_values` says in which order its sums are.
    void write(int64_t r, T* out) const {
        const float *sums = &all.sums[r * padded], weight = all.weight[r];
        if constexpr (PER_WORD<S> == 2) {
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
    // Whether one of the rows sees one of the keys from token `at` on.
    bool sees(int64_t first, int64_t some, int64_t at) const {
        bool found = false;
        for (int64_t r = first; r < first + some; r++) found |= from[r] < at + KEYS && to[r] > at;
        return found;
    }

    // The highest score; 0 where a row has seen nothing.
    static INLINE Vec or_zero(Vec highest) { return highest == broadcast(-INFINITY) ? Vec{} : highest; }

    // Scores become weights relative to the highest score so far, and what was summed before
    // follows (arXiv:1805.02867). Weights are powers of two: `scale` has the logarithm of e in it.
    void softmax(int64_t first, int64_t some, int64_t at, int64_t end, float scale) {
        Vec bases[CHUNK], shrinks[CHUNK];
        for (int64_t r = 0; r < some; r++) {
            float* row = &scores[r * KEYS];
            hide(row, from[first + r] - at, std::min(to[first + r], end) - at);
            Vec top = broadcast(-INFINITY);
#pragma GCC unroll 8
            for (int k = 0; k < KEYS; k += LANES) top = max(load(row + k), top);
            float& highest = part.highest[first + r];
            const Vec before = broadcast(highest), now = max(maxima(top) * scale, before);
            highest = now[0];
            bases[r] = or_zero(now);
            shrinks[r] = exp2(before - bases[r]);
        }
        for (int64_t r = 0; r < some; r++) {
            Vec total = {};
#pragma GCC unroll 8
            for (int k = 0; k < KEYS; k += LANES) {
                const Vec share = exp2(fma(load(&scores[r * KEYS + k]), broadcast(scale), -bases[r]));
                store_units(&weights[r * Products::UNITS + k / PER_UNIT<S>], share);
                total += share;
            }
            float& weight = part.weight[first + r];
            weight = fma(broadcast(weight), shrinks[r], ::sums(total))[0];
            float* sums = &part.sums[(first + r) * padded];
            for (int64_t i = 0; i < padded; i += LANES) store(sums + i, load(sums + i) * shrinks[r]);
        }
    }

    // A row sees the keys `from … to-1` of the tile.
    static INLINE void hide(float* scores, int64_t from, int64_t to) {
        for (int64_t k = 0; k < std::min<int64_t>(from, KEYS); k++) scores[k] = -INFINITY;
        for (int64_t k = std::clamp<int64_t>(to, 0, KEYS); k < KEYS; k++) scores[k] = -INFINITY;
    }
};
