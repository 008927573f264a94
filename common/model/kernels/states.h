// The tokens of a step of layers that keep a state (`ssd.cpp`, `selective.cpp`): where the states of
// their sequences lie, and the short convolution before them.
#pragma once

#include <algorithm>
#include <vector>

#include "tiles.h"
#include "vec.h"

namespace states {

constexpr int64_t CHANNELS = 64;  // of the convolution, that a thread takes at once

// The tokens of one sequence in a step, and where its states lie.
struct Sequence {
    int64_t row, count, start, block_size, numbers;
    const int32_t* table;
    float* states;

    const float* before() const {
        return start > 0 ? states + table[(start - 1) / block_size] * numbers : nullptr;
    }
    // Where the state after token t of the step is kept, if it is.
    float* after(int64_t t) const {
        const int64_t position = start + t;
        const bool ends = t + 1 == count || (position + 1) % block_size == 0;
        const int32_t block = ends ? table[position / block_size] : -1;
        return block < 0 ? nullptr : states + block * numbers;
    }
};

// The sequences of a step; a state has `numbers`.
struct Sequences {
    int64_t count, block_size, numbers;
    const int32_t *rows, *counts, *starts, *tables;
    int64_t table_width;
    float* states;

    Sequence operator[](int64_t s) const {
        return {rows[s], counts[s], starts[s], block_size, numbers, tables + s * table_width, states};
    }
    int64_t tokens() const { return rows[count - 1] + counts[count - 1]; }
    int64_t mean() const { return tokens() / count + 1; }  // tokens of a sequence
};

// The convolution's last inputs, [kernel - 1, width], lie `offset` numbers into a state.
struct Convolution {
    int64_t width, kernel, offset;
    const float *weights, *bias;  // [kernel, width], [width]

    // Convolves channels first … first + count - 1 of a sequence's inputs, and applies SiLU.
    template <typename T>
    void channels(const Sequence& sequence, int64_t first, int64_t count, const T* inputs,
                  float* out) const {
        const int64_t before = kernel - 1, held_at = offset + first;
        std::vector<float> past(before * count);
        if (const float* from = sequence.before())
            for (int64_t j = 0; j < before; j++)
                std::copy_n(from + held_at + j * width, count, past.data() + j * count);
        for (int64_t t = 0; t < sequence.count; t++) {
            const int64_t place = (sequence.row + t) * width + first;
            for_vectors(count, [&](int64_t i, int64_t some) {
                const Vec now = load_some(inputs + place + i, some);
                const float* weight = weights + first + i;
                Vec total = load_some(bias + first + i, some);
                for (int64_t j = 0; j < before; j++) {
                    float* held = past.data() + j * count + i;
                    const Vec old = load_some(held, some);
                    total = fma(old, load_some(weight + j * width, some), total);
                    store_some(held, j + 1 < before ? load_some(held + count, some) : now, some);
                }
                total = fma(now, load_some(weight + before * width, some), total);
                store_some(out + place + i, total / (exp(-total) + 1.0f), some);
            });
            if (float* to = sequence.after(t))
                for (int64_t j = 0; j < before; j++)
                    std::copy_n(past.data() + j * count, count, to + held_at + j * width);
        }
    }

    // `inputs` and `out` are [T, width].
    template <typename T>
    void run(int64_t threads, const Sequences& sequences, const T* inputs, float* out) const {
        const int64_t parts = (width + CHANNELS - 1) / CHANNELS;
        for_rows(threads, sequences.count * parts, sequences.mean() * CHANNELS * kernel,
                 [&](int64_t item) {
                     const int64_t first = item % parts * CHANNELS;
                     channels(sequences[item / parts], first, std::min(CHANNELS, width - first),
                              inputs, out);
                 });
    }
};

}  // namespace states
