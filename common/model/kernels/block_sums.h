// Sums over blocks of a product's inputs: neighbours are added up, then neighbouring pairs, and so
// on. Tensor-parallel ranks that have a half or a quarter of the blocks each make sums that this tree
// has, too; adding up theirs in the same way gives the bits that one rank makes of all blocks.
// (Tree-Based Invariant Kernels, arXiv:2511.17826.)
#pragma once

#include "vec.h"

constexpr int64_t MAX_BLOCKS = 8;  // a power of two, and the most ranks that agree
constexpr int LEVELS = 3;
static_assert(1 << LEVELS == MAX_BLOCKS);

// COUNT vectors of sums.
template <int COUNT>
class BlockSums {
public:
    // `blocks`: a power of two, MAX_BLOCKS at most.
    explicit BlockSums(int64_t blocks) : blocks(blocks) {}

    // Takes the sums of block `number`, in order. After the last one they are those of all blocks, and
    // it returns true.
    INLINE bool add(int64_t number, Vec* sums) {
        int level = 0;
        for (; number >> level & 1; level++)
#pragma GCC unroll 64
            for (int i = 0; i < COUNT; i++) sums[i] = waiting[level][i] + sums[i];
        if (number + 1 == blocks) return true;
#pragma GCC unroll 64
        for (int i = 0; i < COUNT; i++) waiting[level][i] = sums[i];
        return false;
    }

private:
    const int64_t blocks;
    Vec waiting[LEVELS][COUNT];  // for their right neighbours
};
