// Attention of the new tokens of each sequence over its paged KV cache, read in place: one token or
// thousands. Tiles of keys and values are copied out of their blocks into the order in which a small
// matrix product reads them, once for all rows that share them; scores never leave the first cache
// (FlashAttention-2, arXiv:2307.08691). bfloat16 is multiplied as such where the CPU can, and in
// float32 elsewhere.
//
// A row (a query head of a token) is summed in one order that depends on its position alone: tiles
// begin at multiples of KEYS tokens, each part of PART tokens is summed by itself, and parts are
// added up from the first to the last (as in Flash-Decoding, where they are computed at the same
// time). So a row has the same bits in a prompt, in a chunk of it, alone and in a batch.

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_rows.h"
#include "cache.h"
#include "kernels.h"
#include "products.h"
#include "tile_products.h"
#include "tiles.h"

namespace {

constexpr int PART = 8 * KEYS;   // tokens that are summed before they are added up
constexpr int64_t BLOCK = 384;   // rows that share a tile's copy, at most
constexpr int64_t FEW_ROWS = 64;  // rows whose parts may be computed at the same time

// What one call computes; `paged_attention` says what each is.
struct Call {
    int64_t threads, sequences, heads, kv_heads, window;
    bool chunked;
    float scale;
    const void* query;
    int64_t query_stride;
    const int32_t *rows, *counts, *starts, *skipped, *tables;
    int64_t table_stride;
    void* out;

    int64_t shared() const { return heads / kv_heads; }

    int64_t first_seen(int64_t position) const {
        return chunked ? position / window * window : std::max<int64_t>(0, position + 1 - window);
    }
};

// Rows of one sequence that share a KV head, and the tokens that any of them sees.
struct Work {
    int64_t sequence, kv_head, first, count;
    int64_t begin, end;  // begin: a multiple of KEYS
    int64_t stored;      // where its first part's results are, if they are stored

    int64_t parts() const { return (end - 1) / PART - begin / PART + 1; }
    int64_t part_begin(int64_t p) const { return std::max(begin, (begin / PART + p) * PART); }
    int64_t part_end(int64_t p) const { return std::min(end, (begin / PART + p + 1) * PART); }
};

// One part of a work, or all.
struct Task {
    const Work* work;
    int64_t part;  // -1: all
};

// All works of a call; what sees the most comes first.
std::vector<Work> works_of(const Call& call) {
    std::vector<Work> all;
    const int64_t shared = call.shared();
    for (int64_t i = 0; i < call.sequences; i++)
        for (int64_t first = 0; first < call.counts[i] * shared; first += BLOCK) {
            const int64_t some = std::min(BLOCK, call.counts[i] * shared - first);
            const int64_t start = call.skipped[i] + call.starts[i];
            const int64_t begin = call.first_seen(start + first / shared) / KEYS * KEYS;
            const int64_t end = start + (first + some - 1) / shared + 1;
            for (int64_t h = 0; h < call.kv_heads; h++)
                all.push_back({i, h, first, some, begin, end, 0});
        }
    std::reverse(all.begin(), all.end());
    return all;
}

// The numbers that all works read, of rows of `row`; keys and values.
int64_t numbers_of(const std::vector<Work>& all, int64_t row) {
    int64_t keys = 0;
    for (const Work& work : all) keys += (work.end - work.begin) * (1 + work.count / 8);
    return 2 * keys * row;
}

// A thread's share of a call: the rows of one work at a time.
template <typename T, typename Products>
class Worker {
public:
    Worker(const Call& call, const Cache<T>& cache, Rows<T, Products>& rows)
        : call(call), cache(cache), rows(rows) {}

    void begin(const Work& work, const Work* following = nullptr) {
        rows.count = work.count;
        if (following) then = tokens(*following);
        rows.begin_tokens(tokens(work), following && cache.in_place() ? &then : nullptr);
        for (int64_t r = 0; r < work.count; r++) {
            const int64_t position = call.skipped[work.sequence] + call.starts[work.sequence] +
                                     (work.first + r) / call.shared();
            rows.from[r] = call.first_seen(position);
            rows.to[r] = position + 1;
            rows.set_query(r, (const T*)call.query + token(work, r) * call.query_stride +
                                  head(work, r) * cache.dim);
        }
        rows.all.begin(work.count, rows.padded);
    }

    void see(const Work& work, int64_t p) {
        rows.see(cache, work.part_begin(p), work.part_end(p), call.scale);
    }

    void write(const Work& work) {
        for (int64_t r = 0; r < work.count; r++)
            rows.write(r, (T*)call.out + (token(work, r) * call.heads + head(work, r)) * cache.dim);
    }

    // A part's results to their place, or back.
    void move(const Work& work, int64_t p, float* results, bool back) {
        float* at = results + work.stored + p * work.count * (rows.padded + 2);
        for (auto [numbers, count] : {std::pair{&rows.part.sums, work.count * rows.padded},
                                      std::pair{&rows.part.highest, work.count},
                                      std::pair{&rows.part.weight, work.count}}) {
            memcpy(back ? numbers->data() : at, back ? at : numbers->data(), count * sizeof(float));
            at += count;
        }
    }

private:
    const Call& call;
    const Cache<T>& cache;
    Rows<T, Products>& rows;
    Tokens then;

    Tokens tokens(const Work& work) const {
        return {call.tables + work.sequence * call.table_stride, work.kv_head,
                call.skipped[work.sequence], work.begin, work.end};
    }
    int64_t token(const Work& work, int64_t r) const {
        return call.rows[work.sequence] + (work.first + r) / call.shared();
    }
    int64_t head(const Work& work, int64_t r) const {
        return work.kv_head * call.shared() + (work.first + r) % call.shared();
    }
};

template <typename T, typename Products>
Rows<T, Products>& rows_of_thread() {
    static thread_local Rows<T, Products> rows;
    return rows;
}

template <typename Products, typename T>
void attend(const Call& call, const Cache<T>& cache) {
    std::vector<Work> all = works_of(call);
    int64_t most = 0, stored = 0;
    // Where there are few works, their parts are tasks, and added up afterwards.
    const Team team(call.threads, numbers_of(all, cache.row));
    const bool splits = team.size() > 1 && int64_t(all.size()) < 4 * team.size();
    const int64_t padded = round_up(cache.row, COLUMNS);
    std::vector<Task> tasks;
    std::vector<Work*> split;
    for (Work& work : all) {
        most = std::max(most, work.count);
        if (splits && work.count <= FEW_ROWS && work.parts() > 1) {
            split.push_back(&work);
            work.stored = stored;
            stored += work.parts() * work.count * (padded + 2);
            for (int64_t p = 0; p < work.parts(); p++) tasks.push_back({&work, p});
        } else {
            tasks.push_back({&work, -1});
        }
    }
    std::vector<float> results(stored);  // of parts: sums, highest, weight
    const auto on_each = [&](int64_t count, const auto& compute) {
        share_tiles(team, count, [&](Share& share) {
            Rows<T, Products>& rows = rows_of_thread<T, Products>();
            rows.prepare(cache, most);
            Worker<T, Products> worker(call, cache, rows);
            for (int64_t i; share.next(i);) compute(i, worker, rows);
        });
    };
    on_each(tasks.size(), [&](int64_t i, auto& worker, auto& rows) {
        const Work& work = *tasks[i].work;
        const bool alone = team.size() == 1 && i + 1 < int64_t(tasks.size());
        worker.begin(work, alone ? tasks[i + 1].work : nullptr);
        if (tasks[i].part >= 0) {
            worker.see(work, tasks[i].part);
            return worker.move(work, tasks[i].part, results.data(), false);
        }
        for (int64_t p = 0; p < work.parts(); p++) {
            worker.see(work, p);
            rows.add_part();
        }
        worker.write(work);
    });
    on_each(split.size(), [&](int64_t i, auto& worker, auto& rows) {
        const Work& work = *split[i];
        worker.begin(work);
        for (int64_t p = 0; p < work.parts(); p++) {
            worker.move(work, p, results.data(), true);
            rows.add_part();
        }
        worker.write(work);
    });
}

}  // namespace

// out[row] = attention of each new token over the tokens before it and itself: the last `window` of
// them, or with `chunked` those of its own chunk of `window` tokens. Sequence i computes `counts[i]`
// tokens, whose rows begin at `rows[i]`, after `starts[i]` that are in the cache; its keys are all
// there. Its table begins `skipped[i]` tokens behind the sequence's first one, and `starts` counts
// from there. `query` has `query_stride` numbers from token to token, `out` heads · dim. `dim` is
// even.
EXPORT void paged_attention(int64_t dtype, int64_t threads, int64_t sequences, int64_t heads,
                            int64_t kv_heads, int64_t dim, int64_t block_size, int64_t format,
                            int64_t window, int64_t chunked, double scale, const void* query,
                            int64_t query_stride,
                            const void* keys, const void* values, const int32_t* rows,
                            const int32_t* counts, const int32_t* starts, const int32_t* skipped,
                            const int32_t* tables, int64_t table_stride, void* out) {
    const float in_twos = float(scale * 1.4426950408889634);  // e^x = 2^(x · log2 e)
    const Call call{threads, sequences, heads,  kv_heads, window,  chunked != 0, in_twos,      query,
                    query_stride, rows, counts, starts,   skipped, tables,       table_stride, out};
    with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const Cache<T> cache(keys, values, format, kv_heads, dim, block_size);
#if defined(HAS_AMX)
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (has_tiles()) return attend<TileProducts>(call, cache);
        }
#endif
        attend<VectorProducts<Stored<T>>>(call, cache);
    });
}
