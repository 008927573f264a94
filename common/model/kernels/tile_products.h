// The products of attention in bfloat16 by the CPU's matrix unit. Its sums have one order, too, and
// another one than the vector unit's: a process uses one of the two for all rows.
#pragma once

#include "amx.h"
#include "products.h"

#if defined(HAS_AMX)
class TileProducts : public Packed<BFloat16> {
public:
    static constexpr int ROWS = TILE, FEW = TILE;

    // For many rows tiles 0 and 1 are sums of rows, 2 their queries or weights, 3 and 4 keys or values.
    // For few 0 to 3 are scores, a row for each key, 4 and 5 keys, and 6 queries, turned.
    void begin(const Pair* queries, int64_t count) {
        if (count > FEW) {
            configure_tiles({TILE, TILE, TILE, TILE, TILE}, {TILE, TILE, TILE, TILE, TILE});
            return;
        }
        configure_tiles({TILE, TILE, TILE, TILE, TILE, TILE, TILE},
                        {count, count, count, count, TILE, TILE, count});
        grow(turned, depth * count);
        for (int64_t d = 0; d < depth; d++)
            for (int64_t r = 0; r < count; r++) turned[d * count + r] = queries[r * depth + d];
    }
    void end() { _tile_release(); }

    // The same as in VectorProducts, always for ROWS rows.
    void score(const Pair* queries, int64_t, float* scores) {
        settle_memory();
        for (int k = 0; k < KEYS; k += 2 * TILE) {
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < depth; d += TILE) {
                _tile_loadd(2, queries + d, depth * 4);
                _tile_loadd(3, keys_at(k, d), COLUMNS * 4);
                _tile_loadd(4, keys_at(k + TILE, d), COLUMNS * 4);
                _tile_dpbf16ps(0, 2, 3);
                _tile_dpbf16ps(1, 2, 4);
            }
            _tile_stored(0, scores + k, KEYS * 4);
            _tile_stored(1, scores + k + TILE, KEYS * 4);
        }
    }

    void add(const Pair* weights, int64_t, float* sums) {
        settle_memory();
        for (int64_t i = 0; i < row; i += 2 * TILE) {
            _tile_loadd(0, sums + i, padded * 4);
            _tile_loadd(1, sums + i + TILE, padded * 4);
            for (int64_t k = 0; k < UNITS; k += TILE) {
                _tile_loadd(2, weights + k, UNITS * 4);
                _tile_loadd(3, values_at(k, i), COLUMNS * 4);
                _tile_loadd(4, values_at(k, i + TILE), COLUMNS * 4);
                _tile_dpbf16ps(0, 2, 3);
                _tile_dpbf16ps(1, 2, 4);
            }
            _tile_stored(0, sums + i, padded * 4);
            _tile_stored(1, sums + i + TILE, padded * 4);
        }
    }

    // Keys as the left side: they are read in place, and scores are turned instead.
    void score_few(const Tile<BFloat16>& tile, const Tile<BFloat16>& later, const Pair*, int64_t rows,
                   float* scores) {
        static_assert(GROUPS == 4);
        for (int g = 0; g < GROUPS; g++) later.fetch_keys(g, row);
        const BFloat16* keys[GROUPS];
        for (int g = 0; g < GROUPS; g++)
            keys[g] = tile.keys[std::clamp(g, tile.begin, tile.end - 1)];
        settle_memory();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < depth; d += TILE) {
            _tile_loadd(6, &turned[d * rows], rows * 4);
            _tile_loadd(4, keys[0] + 2 * d, row * 2);
            _tile_loadd(5, keys[1] + 2 * d, row * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, keys[2] + 2 * d, row * 2);
            _tile_loadd(5, keys[3] + 2 * d, row * 2);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 5, 6);
        }
        alignas(64) float found[KEYS * FEW];  // [KEYS, rows]
        _tile_stored(0, found, rows * 4);
        _tile_stored(1, found + TILE * rows, rows * 4);
        _tile_stored(2, found + 2 * TILE * rows, rows * 4);
        _tile_stored(3, found + 3 * TILE * rows, rows * 4);
        const __m512i keys_apart = _mm512_mullo_epi32(
            _mm512_set1_epi32(int(rows)),
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < KEYS; k += LANES)
                store(scores + r * KEYS + k,
                      (Vec)_mm512_i32gather_ps(keys_apart, found + k * rows + r, 4));
    }

    // The unit's order of sums by the vector unit, since values need not be packed for it: those of
    // even keys and of odd keys, of 2 · TILE keys, are added up before they are added to `sums`.
    void add_few(const Tile<BFloat16>& tile, const Tile<BFloat16>&, const Tile<BFloat16>& later,
                 const Pair* weights, int64_t rows, float* sums) {
        for (int g = 0; g < GROUPS; g++) later.fetch_values(g, row);
        for (int64_t r = 0; r < rows; r += 4)
            with_rows(std::min<int64_t>(4, rows - r), [&](auto R) {
                for (int64_t i = 0; i < row; i += 2 * LANES)
                    add_columns<R>(tile, i, weights + r * UNITS, sums + r * padded + i);
            });
    }

private:
    std::vector<Pair> turned;  // [depth, rows]

    template <int R>
    INLINE void add_columns(const Tile<BFloat16>& tile, int64_t i, const Pair* weights,
                            float* sums) const {
        alignas(64) float factors[R][KEYS];
        for (int r = 0; r < R; r++)
            for (int k = 0; k < KEYS; k += LANES)
                store(&factors[r][k], load((const BFloat16*)(weights + r * UNITS) + k));
        for (int half = 0; half < GROUPS; half += 2) {
            Vec found[R][2][2] = {};  // of even and odd keys; even and odd columns
            for (int g = std::max(half, tile.begin); g < std::min(half + 2, tile.end); g++) {
                const BFloat16* values = tile.values[g] + i;
                for (int k = 0; k < LANES; k += 2)
#pragma GCC unroll 2
                    for (int j = 0; j < 2; j++, values += row) {
                        const Vec words = load((const float*)values);
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++) {
                            const Vec factor = broadcast(factors[r][g * LANES + k + j]);
                            found[r][j][0] = fma(factor, even(words), found[r][j][0]);
                            found[r][j][1] = fma(factor, odd(words), found[r][j][1]);
                        }
                    }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                    float* sum = sums + r * padded + j * LANES;
                    store(sum, load(sum) + (found[r][0][j] + found[r][1][j]));
                }
        }
    }
};
#endif
