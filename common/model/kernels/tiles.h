// Shares a kernel's tiles among threads: this process's own, and those on cores that neighbours lend
// (lent_cores.h). A thread takes one tile at a time, so none waits for a slow one longer than a tile.
#pragma once

#include <atomic>
#include <cstdint>

#include "lent_cores.h"

// The number of threads that are worth waking to read this many numbers.
inline int useful_threads(int64_t numbers, int64_t threads) {
    const int64_t worth = 1 + numbers / 16384;
    return int(worth < threads ? worth : threads);
}

// Says how many threads a kernel may use: its own, and with `lent` those on lent cores.
struct Team {
    int own;
    bool lent;

    // `numbers`: that the kernel reads.
    Team(int64_t threads, int64_t numbers)
        : own(useful_threads(numbers, threads)),
          lent(lent_cores::guests() > 0 && useful_threads(numbers, threads + 1) > threads) {}

    int64_t size() const { return own + (lent ? lent_cores::guests() : 0); }
};

// Calls f(share) on each thread of the team; `share.next(tile)` gives it the tiles 0 … count-1, each
// to one thread, in order. Returns when all are done. What f makes before its first tile is the
// thread's own.
template <typename F>
void share_tiles(const Team& team, int64_t count, const F& f) {
    Job alone;
    lent_cores::Use use(team.lent && count > 1);
    Job& job = use.job() ? *use.job() : alone;
    job.open(count, [](const void* body, Share& share) { (*(const F*)body)(share); }, &f);
    use.call();
    const int n = int(team.own < count ? team.own : count);
#pragma omp parallel num_threads(n) if (n > 1)
    {
        Share share(job);
        f(share);
    }
    job.wait();
}

// Calls f(begin, end) for the numbers 0 … count-1, in ranges of `each`.
template <typename F>
void share_ranges(const Team& team, int64_t count, int64_t each, const F& f) {
    if (team.size() == 1 || count <= each) return f(int64_t(0), count);
    share_tiles(team, (count + each - 1) / each, [&](Share& share) {
        for (int64_t tile; share.next(tile);) {
            const int64_t end = (tile + 1) * each;
            f(tile * each, end < count ? end : count);
        }
    });
}

// How many of what reads `numbers` each make a tile: some ten microseconds.
inline int64_t tile_of(int64_t numbers) {
    const int64_t each = 65536 / (numbers > 0 ? numbers : 1);
    return each > 1 ? each : 1;
}

// Calls f(row) for the rows 0 … count-1, each of which reads `numbers`.
template <typename F>
void for_rows(int64_t threads, int64_t count, int64_t numbers, const F& f) {
    const Team team(threads, count * numbers);
    share_ranges(team, count, tile_of(numbers), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) f(row);
    });
}
