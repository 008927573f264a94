// The table of a host's cores in shared memory, and a process's guests.
//
// A core is the right to run one computing thread; the operating system chooses where. Its owner, a
// rank, says when it computes. While it does not, and has not for QUIET, a guest of another rank may
// hold the core. A guest looks at the core before each tile, so its owner waits for one tile when it
// begins a step. An owner whose guest does not leave in time (its process is stopped, or dead) takes
// the core back; such a guest finds out before its next tile.

#include "lent_cores.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "vec.h"

namespace lent_cores {
namespace {

constexpr int64_t QUIET = 8'000'000;       // nanoseconds: what a node needs between two steps, and more
constexpr int64_t LEAVE = 2'000'000;       // within which a guest leaves; a tile takes a twentieth
constexpr int64_t IDLE = 200'000;          // a guest without tiles sleeps after that
constexpr int64_t MOST_GUESTS = 15;

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// One core of the table: 64 bytes, zeros while it has no owner.
struct Core {
    static constexpr uint32_t OWNED = 1, COMPUTING = 2;  // above them, which guest holds it

    std::atomic<uint32_t> word;
    uint32_t unused;
    std::atomic<int64_t> idle_since;
    std::atomic<int64_t> lent;  // nanoseconds for which guests held it
    uint8_t rest[40];

    void own() {
        idle_since = now();
        word = OWNED;
    }

    // Takes it for the owner; waits for a guest's tile.
    void begin() {
        uint32_t seen = word.fetch_or(COMPUTING);
        const int64_t until = seen > OWNED ? now() + LEAVE : 0;
        for (int turn = 0; seen > (OWNED | COMPUTING); seen = word.load(), turn++) {
            if (now() > until) word = OWNED | COMPUTING;
            relax(turn);
        }
    }

    void end() {
        idle_since = now();
        word.fetch_and(~COMPUTING);
    }

    bool is_free(int64_t time) const {
        return word.load(std::memory_order_relaxed) == OWNED &&
               time - idle_since.load(std::memory_order_relaxed) > QUIET;
    }

    bool enter(uint32_t guest) {
        uint32_t free = OWNED;
        return word.compare_exchange_strong(free, OWNED | guest);
    }

    bool is_held_by(uint32_t guest) const {
        return word.load(std::memory_order_relaxed) == (OWNED | guest);
    }

    void leave(uint32_t guest) {  // if it is still the guest's
        uint32_t held = word.load();
        while (held >> 2 == guest >> 2 && !word.compare_exchange_weak(held, held & 3)) {
        }
    }
};
static_assert(sizeof(Core) == 64, "as lent_cores.py says");

struct Guest {
    std::atomic<uint32_t> asleep{0};  // a futex
    uint32_t name;                    // in a core's word
    std::thread thread;
};

// This process's part.
class Lender {
public:
    Lender(Core* cores, int64_t count, const int32_t* own, int64_t num_own) {
        std::vector<bool> mine(count);
        for (int64_t i = 0; i < num_own; i++) mine[own[i]] = true;
        for (int64_t i = 0; i < count; i++) (mine[i] ? own_ : others_).push_back(cores + i);
        for (Core* core : own_) core->own();
        const int64_t guests = std::min<int64_t>(others_.size(), MOST_GUESTS);
        std::random_device random;
        for (int64_t i = 0; i < guests; i++) {
            guests_.push_back(std::make_unique<Guest>());
            Guest& guest = *guests_.back();
            guest.name = (random() | 1) << 2;
            guest.thread = std::thread([this, &guest] { serve(guest); });
        }
    }

    ~Lender() {
        stopping_ = true;
        computing_ = false;
        for (auto& guest : guests_) {
            wake(*guest);
            guest->thread.join();
        }
        for (Core* core : own_) core->word = 0;
    }

    void begin() {
        for (Core* core : own_) core->begin();
        computing_ = true;
    }

    void end() {
        computing_ = false;
        for (Core* core : own_) core->end();
    }

    int guests() const { return computing_.load(std::memory_order_relaxed) ? guests_.size() : 0; }

    void call() {
        const int64_t time = now();
        size_t next = 0;
        for (Core* core : others_) {
            if (!core->is_free(time)) continue;
            while (next < guests_.size() && !wake(*guests_[next])) next++;
            if (next == guests_.size()) return;
        }
    }

    Job job;
    std::mutex in_use;

private:
    std::vector<Core*> own_, others_;
    std::vector<std::unique_ptr<Guest>> guests_;
    std::atomic<bool> computing_{false}, stopping_{false};

    static bool wake(Guest& guest) {
        if (!guest.asleep.exchange(0)) return false;
        syscall(SYS_futex, &guest.asleep, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
        return true;
    }

    void serve(Guest& guest) {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        pthread_setname_np(pthread_self(), "kernel-guest");
        while (!stopping_) {
            while (Core* core = computing_ ? enter(guest) : nullptr) {
                const int64_t since = now();
                const bool idle = compute(guest, *core);
                core->leave(guest.name);
                core->lent += now() - since;
                if (idle) break;
            }
            guest.asleep = 1;
            while (guest.asleep && !stopping_)
                syscall(SYS_futex, &guest.asleep, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
        }
    }

    Core* enter(const Guest& guest) {
        const int64_t time = now();
        for (Core* core : others_)
            if (core->is_free(time) && core->enter(guest.name)) return core;
        return nullptr;
    }

    // Takes tiles as long as the core is the guest's. Returns whether there were none for a while.
    bool compute(const Guest& guest, Core& core) {
        struct Held {
            const Core& core;
            uint32_t guest;
        } held{core, guest.name};
        const auto is_held = [](const void* p) {
            const Held& held = *(const Held*)p;
            return held.core.is_held_by(held.guest);
        };
        for (int64_t last = now(); core.is_held_by(guest.name) && computing_;) {
            if (job.has_tiles()) {
                Share share(job, is_held, &held);
                if (share.begin()) job.run(share);
                last = now();
            } else if (now() - last > IDLE) {
                return true;
            }
            relax(0);
        }
        return false;
    }
};

Lender* lender = nullptr;  // set and deleted while no kernel runs

}  // namespace

int guests() { return lender ? lender->guests() : 0; }

Use::Use(bool wanted) : job_(wanted && lender->in_use.try_lock() ? &lender->job : nullptr) {}

Use::~Use() {
    if (job_) lender->in_use.unlock();
}

void Use::call() const {
    if (job_) lender->call();
}

}  // namespace lent_cores

using namespace lent_cores;

// Makes this process the owner of the cores `own` of a table of `count`.
EXPORT void lend_join(void* cores, int64_t count, const int32_t* own, int64_t num_own) {
    lender = new Lender((Core*)cores, count, own, num_own);
}

// A step begins: this process's cores are its own.
EXPORT void lend_begin() { lender->begin(); }

// A step is over: others may use them.
EXPORT void lend_end() { lender->end(); }

// Ends the guests and gives up the cores.
EXPORT void lend_leave() {
    delete lender;
    lender = nullptr;
}
