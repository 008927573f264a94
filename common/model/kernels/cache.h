// The paged cache of keys and values, a tile of tokens at a time.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kv_rows.h"
#include "vec.h"

constexpr int KEYS = 64;  // of a tile
constexpr int GROUPS = KEYS / LANES;

// What numbers are computed with: bfloat16 as they are, others in float32.
template <typename T>
using Stored = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, float>;

template <typename S>
constexpr int PER_WORD = 4 / sizeof(S);  // numbers in four bytes

INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Into the second cache, which waits for more lines at a time than the first one.
template <typename S>
INLINE void fetch(const S* numbers, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(S)) __builtin_prefetch(numbers + i, 0, 2);
}

// From the second cache into the first one. A read that waits for the second cache also waits for
// lines that are fetched from memory, since both wait in the same few places.
template <typename S>
INLINE void fetch_near(const S* numbers, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(S)) __builtin_prefetch(numbers + i, 0, 3);
}

// Keys and values of KEYS tokens of one KV head, in groups of LANES rows that follow each other.
// Groups from `begin` to `end` exist; rows of tokens that do not are zeros.
template <typename S>
struct Tile {
    const S *keys[GROUPS], *values[GROUPS];
    int begin, end;
    std::vector<S> copies;  // of groups that are not read in place

    bool has(int g) const { return g >= begin && g < end; }
    INLINE void fetch_keys(int g, int64_t row) const {
        if (has(g)) fetch(keys[g], LANES * row);
    }
    INLINE void fetch_values(int g, int64_t row) const {
        if (has(g)) fetch(values[g], LANES * row);
    }
};

// What the rows of a KV head see of a sequence: tokens from `begin`, a multiple of KEYS, to `end`. Its
// table begins with token `first`.
struct Tokens {
    const int32_t* table;
    int64_t kv_head, first, begin, end;
};

// [blocks, kv_heads, block_size] rows of keys, and as many of values.
template <typename T>
struct Cache {
    using S = Stored<T>;
    const uint8_t *keys, *values;
    int64_t format, kv_heads, dim, block_size;
    int64_t bytes;  // of a row
    int64_t row;    // numbers of a row of a tile: dim in whole vectors of words

    Cache(const void* keys, const void* values, int64_t format, int64_t kv_heads, int64_t dim,
          int64_t block_size)
        : keys((const uint8_t*)keys), values((const uint8_t*)values), format(format),
          kv_heads(kv_heads), dim(dim), block_size(block_size), bytes(row_bytes<T>(format, dim)),
          row(round_up(dim, LANES * PER_WORD<S>)) {}

    // Whether whole groups are read in place.
    bool in_place() const { return std::is_same_v<T, S> && format == AS_IT_IS && row == dim; }

    // Finds the tokens `at … at+KEYS-1`, of which those from the table's first to the end exist. A
    // group is read in place where it is whole in one block and its rows are whole vectors of what is
    // computed with, else it is copied.
    void find(const Tokens& tokens, int64_t at, Tile<S>& tile) const {
        const auto [table, kv_head, first, begin, end] = tokens;
        const int64_t before = std::clamp<int64_t>(first - at, 0, KEYS);
        const int64_t count = std::clamp<int64_t>(end - at, 0, KEYS);
        tile.begin = int(before / LANES);
        tile.end = before < count ? int((count + LANES - 1) / LANES) : tile.begin;
        if (format != AS_IT_IS)
            for_runs(table, kv_head, at + before - first, count - before, [&](int64_t n, int64_t place) {
                fetch(keys + place, n * bytes);
                fetch(values + place, n * bytes);
            });
        for (int g = tile.begin; g < tile.end; g++) {
            const int64_t from = std::max<int64_t>(g * LANES, before);
            const int64_t to = std::min<int64_t>((g + 1) * LANES, count);
            const int64_t token = at + from - first;
            const bool whole = to - from == LANES && token % block_size + LANES <= block_size;
            if (whole && in_place()) {
                const int64_t place = place_of(table, kv_head, token);
                tile.keys[g] = (const S*)(keys + place);
                tile.values[g] = (const S*)(values + place);
                continue;
            }
            tile.copies.resize(2 * KEYS * row);
            S* copy = tile.copies.data() + 2 * g * LANES * row;
            tile.keys[g] = copy;
            tile.values[g] = copy + LANES * row;
            if (to - from < LANES || row > dim) std::fill_n(copy, 2 * LANES * row, S{});
            S* out = copy + (from - g * LANES) * row;
            for_runs(table, kv_head, token, to - from, [&](int64_t n, int64_t place) {
                for (; n > 0; n--, place += bytes, out += row) {
                    read(keys + place, out);
                    read(values + place, out + LANES * row);
                }
            });
        }
    }

private:
    int64_t place_of(const int32_t* table, int64_t kv_head, int64_t token) const {
        const int64_t block = table[token / block_size], slot = token % block_size;
        return ((block * kv_heads + kv_head) * block_size + slot) * bytes;
    }

    // Calls f(n, place) for each run of `count` tokens in one block.
    template <typename F>
    void for_runs(const int32_t* table, int64_t kv_head, int64_t token, int64_t count, F f) const {
        for (const int64_t end = token + count; token < end;) {
            const int64_t n = std::min(end - token, block_size - token % block_size);
            f(n, place_of(table, kv_head, token));
            token += n;
        }
    }

    void read(const uint8_t* from, S* to) const {
        if (format != AS_IT_IS) {
            read_row(format, from, dim, to);
        } else if constexpr (std::is_same_v<T, S>) {
            memcpy(to, from, dim * sizeof(S));
        } else {
            for_vectors(dim, [&](int64_t i, int64_t some) {
                store_some(to + i, load_some((const T*)from + i, some), some);
            });
        }
    }
};
