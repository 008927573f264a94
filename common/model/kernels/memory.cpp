// Reads memory as fast as kernels can: the floor of a step is measured by it. Several streams at once are
// faster than one, as a product reads several rows.

#include <atomic>

#include "tiles.h"
#include "vec.h"

namespace {

constexpr int64_t AHEAD = 8 << 10;   // bytes that are asked for in the second cache, as by products
constexpr int64_t LINE = 64;         // bytes
constexpr int64_t STREAMS = 4;
constexpr int64_t RANGE = 256 << 10;  // bytes of a tile

}  // namespace

// total = the exclusive or of `count` lines of 64 bytes at `x`, a multiple of STREAMS.
EXPORT void read_memory(int64_t, int64_t threads, int64_t count, const void* x, uint64_t* total) {
    typedef uint64_t Line __attribute__((vector_size(LINE)));
    std::atomic<uint64_t> all{0};
    share_ranges(Team(threads, count * LINE / 4), count, RANGE / LINE, [&](int64_t i, int64_t end) {
        const int64_t apart = (end - i) / STREAMS * LINE;
        const char* at = (const char*)x + i * LINE;
        Line found = {};
        for (int64_t k = 0; k < apart; k += LINE)
#pragma GCC unroll 8
            for (int s = 0; s < STREAMS; s++) {
                const char* here = at + s * apart + k;
                __builtin_prefetch(here + AHEAD, 0, 2);
                Line line;
                memcpy(&line, here, LINE);
                found ^= line;
            }
        uint64_t one = 0;
        for (int k = 0; k < int(LINE / sizeof one); k++) one ^= found[k];
        all ^= one;
    });
    *total = all;
}
