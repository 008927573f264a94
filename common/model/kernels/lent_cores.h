// Cores that nodes of one host lend each other: while a node computes and its neighbour does not, a
// thread of the node's own, a guest, takes tiles of its kernels in the neighbour's stead.
#pragma once

#include "job.h"

namespace lent_cores {

// How many guests may compute beside this process's own threads; 0 outside a step, and where cores
// are not lent.
int guests();

// The job that guests see, for one kernel at a time: `job` is null if it is not `wanted` or in use.
class Use {
public:
    explicit Use(bool wanted);
    ~Use();
    Use(const Use&) = delete;
    Job* job() const { return job_; }
    void call() const;  // wakes guests for whom there is a core

private:
    Job* job_;
};

}  // namespace lent_cores
