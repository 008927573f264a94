// Products with the weights of linear layers, in one pass over them: for few tokens as fast as
// memory is read, for many as fast as the CPU multiplies.
//
// A weight [rows, inputs] is held in words of four bytes of a row: 1 float32, 2 bfloat16 or 4 int8.
// [rows][words] is stored as [rows / LANES][words][LANES], so that one vector has the same inputs of
// LANES rows and sums need no adding up across a vector. (BLIS packs its
// operands so, doi:10.1145/2764454.)
//
// Each output is one chain of sums over the inputs, in order, whatever else is in the batch: a
// token's result depends neither on how many others there are nor on the number of threads. Where
// tensor-parallel ranks share the inputs there is a chain for each block of them (block_sums.h).

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "block_sums.h"
#include "kernels.h"
#include "packed.h"
#include "tiles.h"

namespace {

constexpr int64_t GROUP = 2 * LANES;        // rows: threads share the rows in groups
constexpr int64_t TILES_BYTES = 512 << 10;  // of weights, and of tokens: tiles stay in the second cache

INLINE Vec to_float(BitVec bits) { return bit_cast<Vec>(bits); }

template <typename T>
INLINE float to_float(T x) {
    if constexpr (std::is_same<T, float>::value) {
        return x;
    } else {
        return bit_cast<float>(uint32_t(x.bits) << 16);
    }
}

// A kind of product has, for one word of NUMBERS of a token, `Input`; for the sums of LANES rows, `Sum`; what
// it knows of a token beside its inputs, `Token`. `prepare` makes a token's inputs, `stride` apart,
// of its row; `result` turns sums into the product.

struct Plain {
    static constexpr int SUMS = 1;  // registers of a Sum
    typedef Vec Sum;
    struct Token {};
    static INLINE Sum start(const Token&) { return Vec{}; }
    static INLINE Vec result(Sum sum, const Token&) { return sum; }
};

struct Float32 : Plain {
    static constexpr int64_t NUMBERS = 1;
    typedef float Input;
    template <typename T>
    static void prepare(const T* row, int64_t words, int64_t stride, Input* out, Token*) {
        for (int64_t k = 0; k < words; k++) out[k * stride] = to_float(row[k]);
    }
    static INLINE Sum add(Sum sum, BitVec words, Input x) {
        return fma(to_float(words), broadcast(x), sum);
    }
};

#if defined(__AVX512BF16__)
struct Bf16 : Plain {
    static constexpr int64_t NUMBERS = 2;
    typedef uint32_t Input;
    template <typename T>
    static void prepare(const T* row, int64_t words, int64_t stride, Input* out, Token*) {
        for (int64_t k = 0; k < words; k++) memcpy(out + k * stride, row + 2 * k, sizeof(Input));
    }
    static INLINE Sum add(Sum sum, BitVec words, Input x) {
        __m512i both = _mm512_set1_epi32(int(x));
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)both);
    }
};
#else
struct Bf16 : Plain {
    static constexpr int64_t NUMBERS = 2;
    struct Input {
        float first, second;
    };
    template <typename T>
    static void prepare(const T* row, int64_t words, int64_t stride, Input* out, Token*) {
        for (int64_t k = 0; k < words; k++)
            out[k * stride] = {to_float(row[2 * k]), to_float(row[2 * k + 1])};
    }
    static INLINE Sum add(Sum sum, BitVec words, Input x) {
        sum = fma(to_float(words << 16), broadcast(x.first), sum);
        return fma(to_float(words & 0xffff0000), broadcast(x.second), sum);
    }
};
#endif

// int8, of which 128 was added to each.
struct Int8 : Plain {
    static constexpr int64_t NUMBERS = 4;
    struct Input {
        float x[4];
    };
    template <typename T>
    static void prepare(const T* row, int64_t words, int64_t stride, Input* out, Token*) {
        for (int64_t k = 0; k < words; k++)
            for (int j = 0; j < 4; j++) out[k * stride].x[j] = to_float(row[4 * k + j]);
    }
    static INLINE Sum add(Sum sum, BitVec words, Input x) {
        IntVec four = bit_cast<IntVec>(words ^ 0x80808080);
        for (int j = 0; j < 4; j++) {
            Vec w = __builtin_convertvector((four << (24 - 8 * j)) >> 24, Vec);
            sum = fma(w, broadcast(x.x[j]), sum);
        }
        return sum;
    }
};

#if defined(__AVX512VNNI__)
// The same in integers. A token is rounded to 16 bits, 256 · high + low, of its own step: more than
// bfloat16 has. Sums are exact; the 128 of each weight adds 128 times the token's digits, which is
// where sums start from.
struct Int8Dot {
    static constexpr int SUMS = 2;
    static constexpr int64_t NUMBERS = 4;
    struct Input {
        uint32_t high, low;  // four signed digits each
    };
    struct Sum {
        IntVec high, low;
    };
    struct Token {
        float step;
        int32_t high, low;
    };
    static constexpr float LARGEST = 127 * 256 + 127;

    template <typename T>
    static void prepare(const T* row, int64_t words, int64_t stride, Input* out, Token* token) {
        Vec largest = {}, finite = {};
        for_vectors(4 * words, [&](int64_t i, int64_t count) {
            Vec x = load_some(row + i, count);
            largest = max(max(x, -x), largest);
            finite += x * 0.0f;  // NaN where a number is not finite, which the result is then, too
        });
        const float top = ::largest(largest), ok = sum(finite);
        const float inverse = ok == 0 && top > 0 ? LARGEST / top : 0;
        static thread_local std::vector<int8_t> digits;
        digits.resize(8 * words + 2 * LANES);
        int8_t *highs = digits.data(), *lows = highs + 4 * words + LANES;
        IntVec all_highs = {}, all_lows = {};
        for_vectors(4 * words, [&](int64_t i, int64_t count) {
            Vec x = fma(load_some(row + i, count), broadcast(inverse), broadcast(ROUND)) - ROUND;
            IntVec rounded = __builtin_convertvector(ok == 0 ? x : Vec{}, IntVec);
            IntVec low = ((rounded + 128) & 255) - 128, high = (rounded - low) >> 8;
            all_highs += high;
            all_lows += low;
            store_bytes(highs + i, high);
            store_bytes(lows + i, low);
        });
        for (int64_t k = 0; k < words; k++) {
            memcpy(&out[k * stride].high, highs + 4 * k, 4);
            memcpy(&out[k * stride].low, lows + 4 * k, 4);
        }
        *token = {top / LARGEST + ok, -128 * sum(all_highs), -128 * sum(all_lows)};
    }
    static INLINE Sum start(const Token& token) {
        return {IntVec{} + token.high, IntVec{} + token.low};
    }
    static INLINE Sum add(Sum sum, BitVec words, Input x) {
        __m512i w = (__m512i)words;
        sum.high = (IntVec)_mm512_dpbusd_epi32((__m512i)sum.high, w, _mm512_set1_epi32(x.high));
        sum.low = (IntVec)_mm512_dpbusd_epi32((__m512i)sum.low, w, _mm512_set1_epi32(x.low));
        return sum;
    }
    static INLINE Vec result(Sum sum, const Token& token) {
        Vec high = __builtin_convertvector(sum.high, Vec);
        Vec low = __builtin_convertvector(sum.low, Vec);
        return fma(high, broadcast(256), low) * token.step;
    }
};
#endif

// What a product is of, beside its tokens.
template <typename T>
struct Layer {
    const uint32_t* words;
    int64_t rows, inputs;  // inputs: in words
    int64_t block;         // of inputs, in words
    const T* scales;       // of the rows, or null
    const T* bias;         // of the rows, or null
    T* out;                // [tokens, rows], or null
    float* sums;           // the same, before they are rounded

    int64_t blocks() const { return inputs / block; }
};

template <typename T>
INLINE Vec scaled(const Layer<T>& layer, int64_t row, Vec sum) {
    return layer.scales ? sum * load(layer.scales + row) : sum;
}

template <typename T>
INLINE void finish(const Layer<T>& layer, int64_t token, int64_t row, Vec sum) {
    const int64_t place = token * layer.rows + row;
    if (!layer.out) return store(layer.sums + place, sum);
    if (layer.bias) sum += load(layer.bias + row);
    store(layer.out + place, sum);
}

// TOKENS tokens from `first` on, of which `real` exist, by LANES · WIDTH rows; `tokens`: of each
// block of inputs. Asks for the next rows' words meanwhile, if they are not in the cache yet.
template <typename Kind, int TOKENS, int WIDTH, bool FETCH, typename T>
__attribute__((noinline)) void tile(const Layer<T>& layer, int64_t row, int64_t first,
                                    int64_t real, const typename Kind::Input* x,
                                    const typename Kind::Token* tokens) {
    const int64_t apart = layer.inputs * LANES, blocks = layer.blocks();
    const uint32_t* words = layer.words + row * layer.inputs;
    Fetcher<WIDTH> fetcher(words, layer.inputs);
    BlockSums<TOKENS * WIDTH> tree(blocks);
    for (int64_t block = 0;; block++) {
        typename Kind::Sum sums[TOKENS][WIDTH];
#pragma GCC unroll 32
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 32
            for (int v = 0; v < WIDTH; v++) sums[t][v] = Kind::start(tokens[t * blocks + block]);
        for (int64_t k = 0; k < layer.block; k++) {
            if (FETCH) fetcher.fetch();
            BitVec w[WIDTH];
#pragma GCC unroll 32
            for (int v = 0; v < WIDTH; v++) w[v] = load_words(words + v * apart);
#pragma GCC unroll 32
            for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 32
                for (int v = 0; v < WIDTH; v++) sums[t][v] = Kind::add(sums[t][v], w[v], x[t]);
            x += TOKENS;
            words += LANES;
        }
        Vec totals[TOKENS * WIDTH];
#pragma GCC unroll 32
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 32
            for (int v = 0; v < WIDTH; v++)
                totals[t * WIDTH + v] =
                    scaled(layer, row + v * LANES,
                           Kind::result(sums[t][v], tokens[t * blocks + block]));
        if (!tree.add(block, totals)) continue;
#pragma GCC unroll 32
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 32
            for (int v = 0; v < WIDTH; v++)
                if (t < real) finish(layer, first + t, row + v * LANES, totals[t * WIDTH + v]);
        return;
    }
}

// The rows `begin … end`, whole groups, for one tile of tokens.
template <typename Kind, int TOKENS, typename T>
void tiles(const Layer<T>& layer, int64_t begin, int64_t end, int64_t first, int64_t real,
           const typename Kind::Input* x, const typename Kind::Token* tokens, bool fetch) {
    constexpr int WIDTH = TOKENS * Kind::SUMS * 6 <= REGISTERS ? 4 : 2;
    for (; begin + WIDTH * LANES <= end; begin += WIDTH * LANES) {
        if (fetch) {
            tile<Kind, TOKENS, WIDTH, true>(layer, begin, first, real, x, tokens);
        } else {
            tile<Kind, TOKENS, WIDTH, false>(layer, begin, first, real, x, tokens);
        }
    }
    if (begin < end) tile<Kind, TOKENS, 2, false>(layer, begin, first, real, x, tokens);
}

// What multiplying `tokens` costs, in words read for one token; with more, the work counts.
struct Cost {
    int64_t rows, row;

    template <typename T>
    Cost(const Layer<T>& layer, int64_t tokens)
        : rows(layer.rows), row(layer.inputs * (1 + tokens / 8)) {}

    Team team(int64_t threads) const { return Team(threads, rows * row); }
    int64_t groups() const { return tile_of(GROUP * row); }  // of a thread's range
};

// The tokens of the next tile, if `left` are left: all, rounded up to a size that exists, or as
// many as there are registers for.
template <typename Kind>
constexpr int64_t tile_size(int64_t left) {
    int64_t best = 1;
    for (int64_t size : {2, 3, 4, 6, 8, 12})
        if (best < left && 2 * size * Kind::SUMS <= REGISTERS) best = size;
    return best;
}

// The rows `begin … end` for all prepared tokens, a block of weights at a time.
template <typename Kind, typename T>
void multiply_rows(const Layer<T>& layer, int64_t begin, int64_t end, int64_t count,
                   const typename Kind::Input* x, const typename Kind::Token* tokens) {
    const int64_t bytes = GROUP * layer.inputs * 4;
    const int64_t step = std::max<int64_t>(2, BLOCK_BYTES / bytes) * GROUP;
    for (; begin < end; begin += step) {
        const int64_t stop = std::min(end, begin + step);
        for (int64_t t = 0, size; t < count; t += size) {
            size = tile_size<Kind>(count - t);
            const auto* inputs = x + t * layer.inputs;
            const auto* infos = tokens + t * layer.blocks();
#define TILES(SIZE)                                                                              \
    case SIZE:                                                                                   \
        if constexpr (2 * SIZE * Kind::SUMS <= REGISTERS)                                        \
            tiles<Kind, SIZE>(layer, begin, stop, t, count - t, inputs, infos, t == 0);     \
        break;
            switch (size) {
                TILES(1) TILES(2) TILES(3) TILES(4) TILES(6) TILES(8) TILES(12)
            }
#undef TILES
        }
    }
}

template <typename Kind, typename T>
void prepare_token(const Layer<T>& layer, int64_t token, int64_t count, const T* x, int64_t stride,
                   typename Kind::Input* inputs, typename Kind::Token* tokens) {
    const int64_t first = token - token % tile_size<Kind>(count);  // all but the last are alike
    const int64_t size = tile_size<Kind>(count - first);
    auto* out = inputs + first * layer.inputs + (token - first);
    const T* row = x + token * stride;
    const int64_t step = layer.block * Kind::NUMBERS;
    for (int64_t block = 0; block < layer.blocks(); block++)
        Kind::prepare(row + block * step, layer.block, size, out + block * layer.block * size,
                      tokens + token * layer.blocks() + block);
}

template <typename Kind, typename T>
void multiply(Layer<T> layer, int64_t threads, int64_t count, const T* x, int64_t stride) {
    static thread_local std::vector<typename Kind::Input> buffer;
    static thread_local std::vector<typename Kind::Token> blocks;
    const int64_t groups = layer.rows / GROUP;
    for (int64_t first = 0; first < count; first += MAX_TOKENS) {
        const int64_t some = std::min(MAX_TOKENS, count - first);
        buffer.resize(std::max<size_t>(buffer.size(), (some + 12) * layer.inputs));
        blocks.resize(std::max<size_t>(blocks.size(), (some + 12) * layer.blocks()));
        auto* inputs = buffer.data();
        auto* tokens = blocks.data();
        const Cost cost(layer, some);
        for_rows(threads, some, layer.inputs, [&](int64_t t) {
            prepare_token<Kind>(layer, t, some, x + first * stride, stride, inputs, tokens);
        });
        share_ranges(cost.team(threads), groups, cost.groups(), [&](int64_t from, int64_t to) {
            multiply_rows<Kind>(layer, from * GROUP, to * GROUP, some, inputs, tokens);
        });
        if (layer.out) layer.out += some * layer.rows;
        if (layer.sums) layer.sums += some * layer.rows;
    }
}

#if defined(HAS_AMX)
// bfloat16 by the CPU's matrix unit: a packed weight is in the order of its tiles already. Sums have
// one order here, too, and another one than vectors have: a matrix is multiplied by one of the two
// for any number of tokens.

bool fits_tiles(int64_t block) { return block % TILE == 0 && has_tiles(); }

// `first` tokens from `token` on, and `second` more behind them, by the rows `row … row+31`. Tiles 0
// to 3 are sums of two sets of tokens by two panels of rows, 4 and 5 tokens, 6 and 7 rows. COLD: the
// weights come from memory.
template <bool COLD>
void multiply_tiles(const Layer<BFloat16>& layer, int64_t row, int64_t token, int64_t first,
                    int64_t second, const BFloat16* x, int64_t stride) {
    const uint32_t *upper = layer.words + row * layer.inputs, *lower = upper + TILE * layer.inputs;
    const BFloat16* one = x + token * stride;
    const BFloat16* other = one + TILE * stride;
    constexpr int64_t BYTES_AHEAD = 4 << 10;
    alignas(64) Vec sums[4 * TILE] = {};  // tiles may have fewer rows
    const int64_t tokens[] = {first, first, second, second};
    BlockSums<4 * TILE> tree(layer.blocks());
    for (int64_t block = 0;; block++) {
        settle_memory();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = block * layer.block; k < (block + 1) * layer.block; k += TILE) {
            for (int64_t i = 0; COLD && i < TILE * 64; i += 64) {
                __builtin_prefetch((const char*)(upper + k * TILE) + BYTES_AHEAD + i);
                __builtin_prefetch((const char*)(lower + k * TILE) + BYTES_AHEAD + i);
            }
            _tile_loadd(6, upper + k * TILE, 64);
            _tile_loadd(7, lower + k * TILE, 64);
            _tile_loadd(4, one + 2 * k, stride * sizeof(BFloat16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (second > 0) {
                _tile_loadd(5, other + 2 * k, stride * sizeof(BFloat16));
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + TILE, 64);
        if (second > 0) {
            _tile_stored(2, sums + 2 * TILE, 64);
            _tile_stored(3, sums + 3 * TILE, 64);
        }
        if (!tree.add(block, sums)) continue;
        for (int64_t i = 0; i < 4; i++)
            for (int64_t t = 0; t < tokens[i]; t++)
                finish(layer, token + i / 2 * TILE + t, row + i % 2 * TILE, sums[i * TILE + t]);
        return;
    }
}

void multiply_by_tiles(const Layer<BFloat16>& layer, int64_t threads, int64_t count,
                       const BFloat16* x, int64_t stride) {
    const int64_t groups = layer.rows / GROUP;
    const int64_t step = std::max<int64_t>(1, TILES_BYTES / (GROUP * layer.inputs * 4));
    const int64_t most = std::max<int64_t>(64, TILES_BYTES / (layer.inputs * 4) / 64 * 64);
    const Cost cost(layer, count);
    share_ranges(cost.team(threads), groups, cost.groups(), [&](int64_t begin, int64_t end) {
        int64_t configured = 0;
        for (int64_t from = 0; from < count; from += most) {
            const int64_t to = std::min(count, from + most);
            for (int64_t group = begin; group < end; group += step)
                for (int64_t token = from; token < to; token += 2 * TILE) {
                    const int64_t first = std::min(TILE, to - token);
                    const int64_t second = std::clamp<int64_t>(to - token - TILE, 0, TILE);
                    if (configured != first + second)
                        configure_tiles({first, first, second, second, first, second, TILE, TILE},
                                        {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE});
                    configured = first + second;
                    for (int64_t g = group; g < std::min(end, group + step); g++)
                        if (token == from) {
                            multiply_tiles<true>(layer, g * GROUP, token, first, second, x, stride);
                        } else {
                            multiply_tiles<false>(layer, g * GROUP, token, first, second, x, stride);
                        }
                }
        }
        _tile_release();
    });
}
#endif

template <typename T>
void multiply_int8(const Layer<T>& layer, int64_t threads, int64_t count, const T* x,
                   int64_t stride) {
#if defined(__AVX512VNNI__)
    if constexpr (!std::is_same<T, float>::value) {
        return multiply<Int8Dot>(layer, threads, count, x, stride);
    }
#endif
    multiply<Int8>(layer, threads, count, x, stride);
}

}  // namespace

// out[t] = x[t] · weightᵀ · scales + bias, for `count` tokens whose rows are `stride` apart. The
// weight is packed, of the dtype, or with `scales` int8; `rows` is a multiple of 32. `scales` and
// `bias` may be null. Sums are of blocks of `block` inputs, whole words, of which there is a power of
// two. `partial`: out is float32, without `bias`.
EXPORT void linear(int64_t dtype, int64_t threads, int64_t count, int64_t rows, int64_t inputs,
                   int64_t block, const void* x, int64_t stride, const void* weight,
                   const void* scales, const void* bias, int64_t partial, void* out) {
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (!std::is_same<T, Float16>::value) {
            const int64_t numbers = scales ? 4 : 4 / sizeof(T);  // of a word
            Layer<T> layer{(const uint32_t*)weight, rows,           inputs / numbers,
                           block / numbers,         (const T*)scales, (const T*)bias,
                           partial ? nullptr : (T*)out, partial ? (float*)out : nullptr};
            if (scales) {
                multiply_int8<T>(layer, threads, count, (const T*)x, stride);
            } else if constexpr (std::is_same<T, float>::value) {
                multiply<Float32>(layer, threads, count, (const T*)x, stride);
            } else {
#if defined(HAS_AMX)
                if (fits_tiles(layer.block))
                    return multiply_by_tiles(layer, threads, count, (const T*)x, stride);
#endif
                multiply<Bf16>(layer, threads, count, (const T*)x, stride);
            }
        }
    });
}

// `weight`, `rows` rows of `words` words, is packed in its place; `flip` is applied to each word.
EXPORT void pack_rows(int64_t, int64_t threads, int64_t rows, int64_t words, int64_t flip,
                      void* weight) {
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        std::vector<uint32_t> copy(LANES * words);
#pragma omp for
        for (int64_t row = 0; row < rows; row += LANES) {
            uint32_t* block = (uint32_t*)weight + row * words;
            memcpy(copy.data(), block, copy.size() * 4);
            for (int64_t k = 0; k < words; k++)
                for (int i = 0; i < LANES; i++)
                    block[k * LANES + i] = copy[i * words + k] ^ uint32_t(flip);
        }
    }
}

// out[i] = row ids[i] of a packed weight, as it was.
EXPORT void unpack_rows(int64_t, int64_t threads, int64_t count, int64_t words, int64_t flip,
                        const void* ids, const void* weight, void* out) {
    for_rows(threads, count, words, [&](int64_t i) {
        const int64_t row = ((const int64_t*)ids)[i];
        const uint32_t* from = (const uint32_t*)weight + row / LANES * LANES * words + row % LANES;
        uint32_t* to = (uint32_t*)out + i * words;
        for (int64_t k = 0; k < words; k++) to[k] = from[k * LANES] ^ uint32_t(flip);
    });
}
