// One kernel's tiles, and a thread's share of them.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

// One turn of a loop that waits for another thread: that may need this thread's core after a while.
inline void relax(int turn) {
    if (turn > 500) {
        sched_yield();
    } else {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

class Share;

// Hands out tiles. A ticket holds the job's generation and its next tile, so a thread that comes late
// cannot take a tile of another job for one of its own. Who holds a tile keeps the job, its body and
// its context alive until the tile is done.
class Job {
public:
    using Body = void (*)(const void* context, Share&);
    // The owner's thread, while no thread holds a tile. The old ticket goes first, so a thread that
    // sees the new count finds that the ticket it has read is not the present one.
    void open(int64_t count, Body body, const void* context) {
        const uint64_t ticket = ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
        ticket_.store(ticket | NONE, std::memory_order_relaxed);
        count_.store(uint32_t(count), std::memory_order_release);
        body_ = body;
        context_ = context;
        left_.store(count, std::memory_order_relaxed);
        ticket_.store(ticket, std::memory_order_release);
    }

    uint32_t generation() const {
        return uint32_t(ticket_.load(std::memory_order_acquire) >> 32);
    }

    bool has_tiles() const { return has_tiles(ticket_.load(std::memory_order_acquire)); }

    // The next tile; -1: none is left, or the generation is another.
    int64_t take(uint32_t generation) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (ticket >> 32 == generation && has_tiles(ticket))
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel))
                return uint32_t(ticket);
        return -1;
    }

    void done() { left_.fetch_sub(1, std::memory_order_release); }
    void run(Share& share) const { body_(context_, share); }

    void wait() const {
        for (int turn = 0; left_.load(std::memory_order_acquire) > 0; turn++) relax(turn);
    }

private:
    static constexpr uint64_t NONE = 0xffffffff;  // in place of the next tile

    bool has_tiles(uint64_t ticket) const {
        return uint32_t(ticket) < count_.load(std::memory_order_acquire);
    }

    std::atomic<uint64_t> ticket_{0};
    std::atomic<uint32_t> count_{0};
    std::atomic<int64_t> left_{0};
    Body body_ = nullptr;
    const void* context_ = nullptr;
};

// The tiles that one thread takes of the job's present generation, as long as it `may_go_on`.
class Share {
public:
    using MayGoOn = bool (*)(const void*);

    explicit Share(Job& job, MayGoOn may_go_on = nullptr, const void* asked = nullptr)
        : job_(job), generation_(job.generation()), may_go_on_(may_go_on), asked_(asked) {}
    ~Share() { finish(); }
    Share(const Share&) = delete;

    // Takes the first tile, which `next` then returns: the job is alive from here on.
    bool begin() {
        tile_ = job_.take(generation_);
        return first_ = tile_ >= 0;
    }

    bool next(int64_t& tile) {
        if (!first_) {
            finish();
            if (may_go_on_ && !may_go_on_(asked_)) return false;
            tile_ = job_.take(generation_);
        }
        first_ = false;
        tile = tile_;
        return tile_ >= 0;
    }

private:
    void finish() {
        if (tile_ >= 0) job_.done();
        tile_ = -1;
    }

    Job& job_;
    const uint32_t generation_;
    const MayGoOn may_go_on_;
    const void* asked_;
    int64_t tile_ = -1;
    bool first_ = false;
};
