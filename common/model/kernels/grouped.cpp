// Products with weights of 4 or 8 bits in groups of inputs, each of which has a scale and a zero
// point for an output: (number - zero point) · scale.
//
// Inputs are cut into runs, each of one group. A token's inputs of a run are rounded to multiples of
// a step of their own: to a byte for 4-bit weights, which are tens of times less precise, to two
// bytes for 8-bit weights. The sums over a run are of integers, exact; those over runs are float32,
// in order, within each block of inputs that tensor-parallel ranks may share (block_sums.h). In float32 nothing is rounded, and all sums are in order. So a token's result depends
// neither on how many others there are nor on the number of threads.
//
// A word of four bytes of a row holds 8 or 4 numbers in order, each byte of 4-bit weights one of the
// word's first four and one of its last. [rows][words] is stored as [rows / LANES][words][LANES];
// scales and zero points as [rows / GROUP][groups][GROUP]. Rows are padded to whole groups of rows.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "block_sums.h"
#include "kernels.h"
#include "packed.h"
#include "tiles.h"

namespace {

constexpr int64_t GROUP = 32;         // rows: threads share the rows in groups
constexpr int64_t LARGEST_TILE = 12;  // tokens
constexpr float SMALLEST = 1e-30f;    // a run of smaller numbers counts as zeros

typedef int16_t ShortVec __attribute__((vector_size(4 * LANES)));

INLINE Vec load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    const IntVec numbers = (IntVec)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
#elif defined(__AVX2__)
    const IntVec numbers = (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    const IntVec numbers = __builtin_convertvector(bytes, IntVec);
#endif
    return __builtin_convertvector(numbers, Vec);
}

#if defined(__AVX512BW__)
INLINE IntVec add_pairs(ShortVec a, ShortVec b) {
    return (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
INLINE ShortVec add_byte_pairs(BitVec a, BitVec b) {
    return (ShortVec)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
INLINE IntVec add_pairs(ShortVec a, ShortVec b) {
    return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
INLINE ShortVec add_byte_pairs(BitVec a, BitVec b) {
    return (ShortVec)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
#endif

// Adds to each lane the products of its four unsigned bytes below 2^BITS with four signed ones.
template <int BITS>
INLINE IntVec dot(IntVec sum, BitVec weights, uint32_t four) {
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(int(four)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights,
                                           _mm256_set1_epi32(int(four)));
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
    const BitVec x = BitVec{} + four;
    if (BITS == 4)  // two products of a nibble are far from 16 bits
        return sum + add_pairs(add_byte_pairs(weights, x), ShortVec{} + 1);
    const ShortVec even = (ShortVec)(weights & 0x00ff00ff);
    const ShortVec odd = (ShortVec)((weights >> 8) & 0x00ff00ff);
    return sum + add_pairs(even, ((ShortVec)x << 8) >> 8) + add_pairs(odd, (ShortVec)x >> 8);
#else
    for (int j = 0; j < 32; j += 8)
        sum += (IntVec)((weights >> j) & 255) * int32_t(int8_t(four >> j));
    return sum;
#endif
}

// What a token's run is beside its numbers.
struct Step {
    float size, sum;  // of what the numbers are multiples, and what they are together
};

// A token's numbers as integers of one or two bytes: 256 · the first + the second.
template <int DIGITS>
struct Rounded {
    static constexpr int SUMS = DIGITS;
    static constexpr float LARGEST = DIGITS == 1 ? 127 : 127 * 256 + 127;
    struct Input {
        uint32_t digits[DIGITS];  // four signed bytes each
    };
    struct Sum {
        IntVec digits[DIGITS];
    };

    static Step prepare(const float* x, int64_t count, int64_t stride, Input* out) {
        Vec largest = {}, finite = {};
        for_vectors(count, [&](int64_t i, int64_t some) {
            const Vec v = load_some(x + i, some);
            largest = max(max(v, -v), largest);
            finite += v * 0.0f;  // NaN where a number is not finite, which the result is then, too
        });
        const float top = ::largest(largest), ok = sum(finite);
        const float inverse = ok == 0 && top > SMALLEST ? LARGEST / top : 0;
        IntVec total = {};
        alignas(64) int8_t bytes[DIGITS][LANES];
        for_vectors(count, [&](int64_t i, int64_t some) {
            const Vec v = ok == 0 ? load_some(x + i, some) : Vec{};
            const Vec near = fma(v, broadcast(inverse), broadcast(ROUND)) - ROUND;
            IntVec rest = __builtin_convertvector(near, IntVec);
            total += rest;
            for (int d = DIGITS - 1; d > 0; d--) {
                const IntVec low = ((rest + 128) & 255) - 128;
                store_bytes(bytes[d], low);
                rest = (rest - low) >> 8;
            }
            store_bytes(bytes[0], rest);
            for (int64_t k = 0; k < some; k += 4)
                for (int d = 0; d < DIGITS; d++)
                    memcpy(&out[(i + k) / 4 * stride].digits[d], bytes[d] + k, 4);
        });
        const float size = top / LARGEST + ok;
        return {inverse == 0 ? ok : size, size * float(sum(total))};
    }

    template <int BITS>
    static INLINE Sum add(Sum sum, BitVec weights, Input x) {
        for (int d = 0; d < DIGITS; d++) sum.digits[d] = dot<BITS>(sum.digits[d], weights, x.digits[d]);
        return sum;
    }
    static INLINE Vec result(Sum sum, Step step) {
        Vec all = __builtin_convertvector(sum.digits[0], Vec);
        for (int d = 1; d < DIGITS; d++)
            all = fma(all, broadcast(256), __builtin_convertvector(sum.digits[d], Vec));
        return all * step.size;
    }
};

// A token's numbers as they are.
struct Exact {
    static constexpr int SUMS = 1;
    struct Input {
        float x[4];
    };
    typedef Vec Sum;

    static Step prepare(const float* x, int64_t count, int64_t stride, Input* out) {
        float sum = 0;
        for (int64_t i = 0; i < count; i++) sum += x[i];
        for (int64_t i = 0; i < count; i += 4) memcpy(out[i / 4 * stride].x, x + i, sizeof out->x);
        return {1, sum};
    }
    template <int BITS>
    static INLINE Sum add(Sum sum, BitVec weights, Input x) {
        for (int j = 0; j < 4; j++) {
            const IntVec number = (IntVec)((weights >> (8 * j)) & 255);
            sum = fma(__builtin_convertvector(number, Vec), broadcast(x.x[j]), sum);
        }
        return sum;
    }
    static INLINE Vec result(Sum sum, Step) { return sum; }
};

}  // namespace

// As the Python side describes a matrix (`GroupedMatrix` of packed.py).
struct Grouped {
    int64_t bits, rows, inputs, block, run, groups;  // block, run: inputs
    const uint32_t* words;
    const int32_t* order;   // input of each place, or null: as they are
    const int32_t* groups_of_runs;
    const void* scales;     // of the tokens' dtype
    const uint8_t* zeros;   // or null
    double zero;            // added to each
};

namespace {

// A product beside its tokens.
template <typename T>
struct Layer : Grouped {
    const T* bias;  // or null
    T* out;         // [tokens, rows], or null
    float* sums;    // the same, before they are rounded

    int64_t words_of_run() const { return run * bits / 32; }
    int64_t words_of_row() const { return inputs * bits / 32; }
    int64_t runs() const { return inputs / run; }
    int64_t runs_of_block() const { return block / run; }
    int64_t units() const { return inputs / 4; }  // a token's Inputs

    // Of LANES rows, and a run.
    INLINE int64_t place(int64_t row, int64_t number) const {
        return (row / GROUP * groups + groups_of_runs[number]) * GROUP + row % GROUP;
    }
    INLINE Vec scale(int64_t place) const { return load((const T*)scales + place); }
    INLINE Vec zero_point(int64_t place) const {
        return (zeros ? load_bytes(zeros + place) : Vec{}) + float(zero);
    }
    INLINE void finish(int64_t token, int64_t row, Vec sum) const {
        const int64_t some = std::min<int64_t>(LANES, rows - row);
        if (some <= 0) return;
        if (!out) return store_some(sums + token * rows + row, sum, some);
        if (bias) sum += load_some(bias + row, some);
        store_some(out + token * rows + row, sum, some);
    }
};

// TOKENS tokens from `first` on, of which `real` exist, by LANES · WIDTH rows. Asks for the next rows
// words meanwhile.
template <typename Kind, int BITS, int TOKENS, int WIDTH, typename T>
__attribute__((noinline)) void tile(const Layer<T>& layer, int64_t row, int64_t first,
                                    int64_t real, const typename Kind::Input* x,
                                    const Step* steps) {
    constexpr int PARTS = 8 / BITS;
    const int64_t apart = layer.words_of_row() * LANES, runs = layer.runs();
    const int64_t count = layer.words_of_run(), block = layer.runs_of_block();
    const uint32_t* words = layer.words + row * layer.words_of_row();
    Fetcher<WIDTH> fetcher(words, layer.words_of_row());
    Vec totals[TOKENS * WIDTH] = {};
    BlockSums<TOKENS * WIDTH> tree(layer.inputs / layer.block);
    for (int64_t run = 0; run < runs; run++) {
        typename Kind::Sum sums[TOKENS][WIDTH] = {};
        for (int64_t k = 0; k < count; k++, words += LANES) {
            fetcher.fetch();
            BitVec weights[PARTS][WIDTH];
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) {
                const BitVec word = load_words(words + v * apart);
                weights[0][v] = BITS == 4 ? word & 0x0f0f0f0f : word;
                if (BITS == 4) weights[PARTS - 1][v] = (word >> 4) & 0x0f0f0f0f;
            }
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++, x += TOKENS)
#pragma GCC unroll 16
                for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
                    for (int v = 0; v < WIDTH; v++)
                        sums[t][v] = Kind::template add<BITS>(sums[t][v], weights[part][v], x[t]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) {
            const int64_t place = layer.place(row + v * LANES, run);
            const Vec scale = layer.scale(place), zero = layer.zero_point(place);
#pragma GCC unroll 16
            for (int t = 0; t < TOKENS; t++) {
                const Vec all = Kind::result(sums[t][v], steps[t]);
                const Vec shifted = fma(-zero, broadcast(steps[t].sum), all);
                totals[t * WIDTH + v] = fma(scale, shifted, totals[t * WIDTH + v]);
            }
        }
        steps += TOKENS;
        if ((run + 1) % block == 0 && !tree.add(run / block, totals))
#pragma GCC unroll 32
            for (int i = 0; i < TOKENS * WIDTH; i++) totals[i] = Vec{};
    }
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++)
            if (t < real) layer.finish(first + t, row + v * LANES, totals[t * WIDTH + v]);
}

// The tokens of the next tile, if `left` are left: all, rounded up to a size that exists, or as
// many as there are registers for.
template <typename Kind>
constexpr int64_t tile_size(int64_t left) {
    int64_t best = 1;
    for (int64_t size : {2, 4, 6, 8, 12})
        if (best < left && 2 * size * Kind::SUMS <= REGISTERS) best = size;
    return best;
}

// The rows `begin … end`, whole groups, for one tile of tokens.
template <typename Kind, int BITS, int TOKENS, typename T>
void tiles(const Layer<T>& layer, int64_t begin, int64_t end, int64_t first, int64_t real,
           const typename Kind::Input* x, const Step* steps) {
    constexpr int WIDTH = TOKENS == 1 ? 4 : 2;
    static_assert(2 * LANES <= GROUP);
    for (; begin + WIDTH * LANES <= end; begin += WIDTH * LANES)
        tile<Kind, BITS, TOKENS, WIDTH>(layer, begin, first, real, x, steps);
    for (; begin < end; begin += 2 * LANES)
        tile<Kind, BITS, TOKENS, 2>(layer, begin, first, real, x, steps);
}

template <typename Kind>
struct Prepared {
    std::vector<typename Kind::Input> inputs;  // for each tile of tokens [units, tokens]
    std::vector<Step> steps;                   // for each tile of tokens [runs, tokens]

    template <typename T>
    void make_room(const Layer<T>& layer, int64_t tokens) {
        const size_t most = tokens + LARGEST_TILE;
        inputs.resize(std::max(inputs.size(), most * layer.units()));
        steps.resize(std::max(steps.size(), most * layer.runs()));
    }

    // Token `token` of `count`.
    template <typename T>
    void prepare(const Layer<T>& layer, int64_t token, int64_t count, const T* x) {
        static thread_local std::vector<float> row;
        row.resize(layer.inputs);
        if (layer.order) {
            for (int64_t i = 0; i < layer.inputs; i++) row[i] = load_part(x + layer.order[i], 1)[0];
        } else {
            for_vectors(layer.inputs, [&](int64_t i, int64_t some) {
                store_some(row.data() + i, load_some(x + i, some), some);
            });
        }
        const int64_t first = token - token % tile_size<Kind>(count);  // all but the last are alike
        const int64_t size = tile_size<Kind>(count - first);
        auto* out = inputs.data() + first * layer.units() + (token - first);
        Step* step = steps.data() + first * layer.runs() + (token - first);
        for (int64_t run = 0; run < layer.runs(); run++)
            step[run * size] = Kind::prepare(row.data() + run * layer.run, layer.run, size,
                                             out + run * layer.run / 4 * size);
    }
};

// The rows `begin … end` for all prepared tokens, a block of weights at a time.
template <typename Kind, int BITS, typename T>
void multiply_rows(const Layer<T>& layer, int64_t begin, int64_t end, int64_t count,
                   const Prepared<Kind>& prepared) {
    const int64_t bytes = GROUP * layer.words_of_row() * 4;
    const int64_t step = std::max<int64_t>(2, BLOCK_BYTES / bytes) * GROUP;
    for (; begin < end; begin += step) {
        const int64_t stop = std::min(end, begin + step);
        for (int64_t t = 0, size; t < count; t += size) {
            size = tile_size<Kind>(count - t);
            const auto* x = prepared.inputs.data() + t * layer.units();
            const Step* steps = prepared.steps.data() + t * layer.runs();
#define TILES(SIZE)                                                                    \
    case SIZE:                                                                         \
        if constexpr (2 * SIZE * Kind::SUMS <= REGISTERS)                              \
            tiles<Kind, BITS, SIZE>(layer, begin, stop, t, count - t, x, steps);       \
        break;
            switch (size) {
                TILES(1) TILES(2) TILES(4) TILES(6) TILES(8) TILES(12)
            }
#undef TILES
        }
    }
}

template <typename Kind, int BITS, typename T>
void multiply(Layer<T> layer, int64_t threads, int64_t count, const T* x, int64_t stride) {
    static thread_local Prepared<Kind> buffer;
    Prepared<Kind>& prepared = buffer;  // this thread's, for all
    const int64_t groups = (layer.rows + GROUP - 1) / GROUP;
    for (int64_t first = 0; first < count; first += MAX_TOKENS) {
        const int64_t some = std::min(MAX_TOKENS, count - first);
        prepared.make_room(layer, some);
        for_rows(threads, some, layer.inputs, [&](int64_t t) {
            prepared.prepare(layer, t, some, x + (first + t) * stride);
        });
        const int64_t row = layer.words_of_row() * (1 + some / 8);  // its cost
        const Team team(threads, layer.rows * row);
        share_ranges(team, groups, tile_of(GROUP * row), [&](int64_t from, int64_t to) {
            multiply_rows<Kind, BITS>(layer, from * GROUP, to * GROUP, some, prepared);
        });
        if (layer.out) layer.out += some * layer.rows;
        if (layer.sums) layer.sums += some * layer.rows;
    }
}

// Where a number of a packed row is: its word, and the lowest bit in it.
struct Place {
    int64_t word;
    int bit;

    Place(int64_t i, int64_t bits)
        : word(i * bits / 32), bit(int(bits == 4 ? i % 4 * 8 + i / 4 % 2 * 4 : i % 4 * 8)) {}
};

// Where a number of a row is before it is packed: 4-bit ones of a row's first half are in the low
// bits of bytes, those of its second half in the high bits.
struct PlainPlace {
    int64_t byte;
    int bit;

    PlainPlace(int64_t i, int64_t inputs, int64_t bits)
        : byte(bits == 4 ? i % (inputs / 2) : i), bit(bits == 4 && i >= inputs / 2 ? 4 : 0) {}
};

}  // namespace

// out[t] = x[t] · weightᵀ + bias, for `count` tokens whose rows are `stride` apart. `bias` may be null.
// `partial`: out is float32, without `bias`.
EXPORT void grouped_linear(int64_t dtype, int64_t threads, int64_t count, const void* x,
                           int64_t stride, const void* matrix, const void* bias, int64_t partial,
                           void* out) {
    const Grouped& grouped = *(const Grouped*)matrix;
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (!std::is_same<T, Float16>::value) {
            constexpr bool exact = std::is_same<T, float>::value;
            using Four = typename std::conditional<exact, Exact, Rounded<1>>::type;
            using Eight = typename std::conditional<exact, Exact, Rounded<2>>::type;
            const Layer<T> layer{grouped, (const T*)bias, partial ? nullptr : (T*)out,
                                 partial ? (float*)out : nullptr};
            if (grouped.bits == 4) {
                multiply<Four, 4>(layer, threads, count, (const T*)x, stride);
            } else {
                multiply<Eight, 8>(layer, threads, count, (const T*)x, stride);
            }
        }
    });
}

// A matrix of whole groups of rows is packed in its place, with its inputs in `order`, or as they are
// if that is null.
EXPORT void pack_grouped(int64_t, int64_t threads, int64_t rows, int64_t inputs, int64_t bits,
                         const void* order, void* weight) {
    const int64_t bytes = inputs * bits / 8;
    const uint32_t mask = (1u << bits) - 1;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        std::vector<uint8_t> copy(LANES * bytes);
#pragma omp for
        for (int64_t row = 0; row < rows; row += LANES) {
            uint32_t* words = (uint32_t*)weight + row * bytes / 4;
            memcpy(copy.data(), words, copy.size());
            std::fill_n(words, LANES * bytes / 4, 0);
            for (int64_t i = 0; i < inputs; i++) {
                const PlainPlace from(order ? ((const int32_t*)order)[i] : i, inputs, bits);
                const Place to(i, bits);
                for (int lane = 0; lane < LANES; lane++) {
                    const uint32_t number = (copy[lane * bytes + from.byte] >> from.bit) & mask;
                    words[to.word * LANES + lane] |= number << to.bit;
                }
            }
        }
    }
}

// out = the packed matrix as it was.
EXPORT void unpack_grouped(int64_t, int64_t threads, int64_t rows, int64_t inputs, int64_t bits,
                           const void* order, const void* weight, void* out) {
    const int64_t bytes = inputs * bits / 8;
    const uint32_t mask = (1u << bits) - 1;
#pragma omp parallel for num_threads(int(threads)) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t* words = (const uint32_t*)weight + row / LANES * LANES * bytes / 4 + row % LANES;
        uint8_t* numbers = (uint8_t*)out + row * bytes;
        std::fill_n(numbers, bytes, 0);
        for (int64_t i = 0; i < inputs; i++) {
            const PlainPlace to(order ? ((const int32_t*)order)[i] : i, inputs, bits);
            const Place from(i, bits);
            numbers[to.byte] |= uint8_t(((words[from.word * LANES] >> from.bit) & mask) << to.bit);
        }
    }
}
