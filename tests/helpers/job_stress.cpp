// One thread opens jobs of one tile and of many in turns, others take tiles all the time. Each job's
// context says that it is alive, until all of its tiles are done: prints how often a tile was not its
// job's own.

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "job.h"

struct Context {
    std::atomic<bool> alive{true};
    int64_t count;
    std::vector<std::atomic<int>> taken;
    explicit Context(int64_t count) : count(count), taken(count) {}
};

std::atomic<int64_t> wrong{0};

void compute(const void* p, Share& share) {
    Context& context = *(Context*)p;
    for (int64_t tile; share.next(tile);)
        if (!context.alive || tile >= context.count || context.taken[tile]++) wrong++;
}

int main(int, char** arguments) {
    const int64_t jobs = std::atoll(arguments[1]);
    static Job job;
    std::atomic<bool> over{false};
    std::vector<std::thread> guests;
    for (int i = 0; i < 2; i++)
        guests.emplace_back([&] {
            while (!over) {
                Share share(job);
                if (share.begin()) job.run(share);
            }
        });
    std::vector<Context*> contexts;  // kept, so that what is wrong is counted and does not crash
    for (int64_t i = 0; i < jobs; i++) {
        const int64_t count = i % 2 ? 40 : 1;
        Context* context = new Context(count);
        contexts.push_back(context);
        job.open(count, compute, context);
        {
            Share share(job);
            compute(context, share);
        }
        job.wait();
        for (auto& taken : context->taken) wrong += taken != 1;
        context->alive = false;
    }
    over = true;
    for (auto& guest : guests) guest.join();
    for (Context* context : contexts) delete context;
    std::printf("%lld\n", (long long)wrong);
}
