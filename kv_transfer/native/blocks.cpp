// Copies, sends, receives and hashes the bytes of scattered KV blocks, and hashes them as they move:
// one call for all byte ranges of a run, during which Python's lock is free.

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// ---- copying ----

constexpr size_t LINE = 64;

// What is AHEAD bytes further is fetched, line by line, if need be in the next range: ranges are
// scattered, and what the processor fetches ahead by itself ends with a page.
constexpr size_t AHEAD = 4096;

inline void fetch_ahead(const uint8_t* data, size_t at, size_t nbytes, const uint8_t* next) {
    size_t then = at + AHEAD;
    __builtin_prefetch(then < nbytes ? data + then : next + (then - nbytes));
}

// Past the caches: what is copied is larger than they are, and a line that is only written need
// not be read first. Four lines at a time, or a target a little ahead of its source modulo 4 KiB
// would stall each load on the store before it.
void copy_past_caches(uint8_t* target, const uint8_t* source, size_t nbytes, const uint8_t* next) {
#if defined(__AVX512F__) || defined(__AVX2__)
    size_t head = -reinterpret_cast<uintptr_t>(target) % LINE;
    if (nbytes < head + 4 * LINE) {
        std::memcpy(target, source, nbytes);
        return;
    }
    std::memcpy(target, source, head);
    size_t at = head;
    for (; at + 4 * LINE <= nbytes; at += 4 * LINE) {
        for (int i = 0; i < 4; i++) fetch_ahead(source, at + i * LINE, nbytes, next);
#if defined(__AVX512F__)
        __m512i lines[4];
        for (int i = 0; i < 4; i++) lines[i] = _mm512_loadu_si512(source + at + i * LINE);
        for (int i = 0; i < 4; i++)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at + i * LINE), lines[i]);
#else
        __m256i halves[8];
        for (int i = 0; i < 8; i++)
            halves[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + i * 32));
        for (int i = 0; i < 8; i++)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + i * 32), halves[i]);
#endif
    }
    std::memcpy(target + at, source + at, nbytes - at);
#else
    std::memcpy(target, source, nbytes);
#endif
}

void finish_copies() {
#if defined(__x86_64__)
    _mm_sfence();  // streamed stores are not ordered with what says that they are done
#endif
}

// ---- XXH3, 128 bits, default secret, no seed, inputs above 240 bytes: written from the algorithm's
// specification, version 0.2.0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) ----

constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                   PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                   PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MX1 = 0x165667919E3779F9;
constexpr size_t STRIPES = 16;  // of a block, after which the lanes are scrambled
constexpr size_t SECRET_NBYTES = 192;

alignas(64) const uint8_t SECRET[SECRET_NBYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

#if defined(__AVX512F__)
struct Lanes {
    __m512i values;
};

inline __m512i load(const uint8_t* at) { return _mm512_loadu_si512(at); }

inline void accumulate(Lanes& lanes, __m512i data, const uint8_t* secret) {
    __m512i keyed = _mm512_xor_si512(data, load(secret));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    __m512i crossed = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
    lanes.values = _mm512_add_epi64(lanes.values, _mm512_add_epi64(product, crossed));
}

inline void accumulate(Lanes& lanes, const uint8_t* stripe, const uint8_t* secret) {
    accumulate(lanes, load(stripe), secret);
}
#elif defined(__AVX2__)
struct Lanes {
    __m256i values[2];
};

inline __m256i load(const uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

inline void accumulate(Lanes& lanes, const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 2; i++) {
        __m256i data = load(stripe + 32 * i), keyed = _mm256_xor_si256(data, load(secret + 32 * i));
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        __m256i crossed = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        lanes.values[i] = _mm256_add_epi64(lanes.values[i], _mm256_add_epi64(product, crossed));
    }
}
#else
struct Lanes {
    uint64_t values[8];
};

inline void accumulate(Lanes& lanes, const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t data = word(stripe + 8 * i), keyed = data ^ word(secret + 8 * i);
        lanes.values[i ^ 1] += data;
        lanes.values[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
inline void scramble(Lanes& lanes) {
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    for (int i = 0; i < 2; i++) {
        __m256i value = lanes.values[i];
        value = _mm256_xor_si256(value, _mm256_srli_epi64(value, 47));
        value = _mm256_xor_si256(value, load(SECRET + SECRET_NBYTES - 64 + 32 * i));
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
        lanes.values[i] =
            _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(high, 32));
    }
}
#else
void scramble(Lanes& lanes) {  // once in 1 KiB: the compiler does it well enough
    uint64_t values[8];
    static_assert(sizeof values == sizeof lanes, "eight lanes");
    std::memcpy(values, &lanes, sizeof values);
    for (int i = 0; i < 8; i++) {
        uint64_t value = values[i] ^ (values[i] >> 47);
        values[i] = (value ^ word(SECRET + SECRET_NBYTES - 64 + 8 * i)) * PRIME32_1;
    }
    std::memcpy(&lanes, values, sizeof values);
}
#endif

uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merge(const Lanes& lanes, uint64_t result, const uint8_t* secret) {
    uint64_t values[8];
    std::memcpy(values, &lanes, sizeof values);
    for (int i = 0; i < 8; i += 2)
        result += fold(values[i] ^ word(secret + 8 * i), values[i + 1] ^ word(secret + 8 * i + 8));
    result = (result ^ (result >> 37)) * PRIME_MX1;
    return result ^ (result >> 32);
}

class XXH3 {
  public:
    // Of `total` bytes, above 240, which `update` is given in parts.
    explicit XXH3(uint64_t total) : total_(total), due_((total - 1) / 64) {
        const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
        std::memcpy(&lanes_, first, sizeof first);
    }

    void update(const uint8_t* data, size_t nbytes, const uint8_t* next) {
        if (carried_) {  // a stripe that began in an earlier part
            size_t taken = nbytes < 64 - carried_ ? nbytes : 64 - carried_;
            std::memcpy(carry_ + carried_, data, taken);
            carried_ += taken, data += taken, nbytes -= taken;
            if (carried_ < 64) return;
            if (due_) stripes(carry_, 1, next);
            remember(carry_, 64);
            carried_ = 0;
        }
        size_t whole = nbytes / 64;
        stripes(data, whole < due_ ? whole : due_, next);
        if (whole) remember(data + 64 * (whole - 1), 64);
        carried_ = nbytes % 64;
        std::memcpy(carry_, data + 64 * whole, carried_);
    }

    // Does as `update(source)` and copies: a line goes to the target as it is read for the hash, so
    // both take hardly longer than the slower of them.
    void copy(uint8_t* target, const uint8_t* source, size_t nbytes, const uint8_t* next,
              bool past_caches) {
        size_t begun = carried_ ? 64 - carried_ : 0;  // ends a stripe of an earlier part
        if (nbytes < begun) begun = nbytes;
        update(source, begun, source + begun);
        size_t copied = copy_lines(target, source, nbytes, next, begun, past_caches);
        std::memcpy(target + copied, source + copied, nbytes - copied);
        update(source + begun + copied, nbytes - begun - copied, next);
    }

    void digest(uint8_t* out) {  // 16 bytes, the most significant first
        remember(carry_, carried_);
        accumulate(lanes_, last_, SECRET + SECRET_NBYTES - 71);
        uint64_t low = merge(lanes_, total_ * PRIME64_1, SECRET + 11);
        uint64_t high = merge(lanes_, ~(total_ * PRIME64_2), SECRET + SECRET_NBYTES - 75);
        for (int i = 0; i < 8; i++) {
            out[i] = static_cast<uint8_t>(high >> (56 - 8 * i));
            out[8 + i] = static_cast<uint8_t>(low >> (56 - 8 * i));
        }
    }

  private:
    // Copies whole lines and hashes as many stripes, of which the first is at `begun`. Returns the
    // bytes copied.
    size_t copy_lines(uint8_t* target, const uint8_t* source, size_t nbytes, const uint8_t* next,
                      size_t begun, bool past_caches) {
        size_t at = 0;
        if (!lines_fit(target, begun)) return at;
        Lanes lanes = lanes_;
        uint64_t in_block = in_block_;
        for (; at + 5 * LINE <= nbytes && at / 64 + 4 <= due_; at += 4 * LINE) {
            for (int i = 0; i < 4; i++) fetch_ahead(source, at + i * LINE, nbytes, next);
            copy_four(lanes, in_block, target + at, source + at, begun, past_caches);
        }
        lanes_ = lanes, in_block_ = in_block, due_ -= at / 64;
        if (at) remember(source + begun + at - 64, 64);
        return at;
    }

    static void next_stripe(uint64_t& in_block, Lanes& lanes) {
        if (++in_block == STRIPES) scramble(lanes), in_block = 0;
    }

#if defined(__AVX512F__)
    static bool lines_fit(const uint8_t* target, size_t begun) {
        return reinterpret_cast<uintptr_t>(target) % LINE == 0 && begun % 4 == 0;
    }

    static void copy_four(Lanes& lanes, uint64_t& in_block, uint8_t* target, const uint8_t* source,
                          size_t begun, bool past_caches) {
        // A stripe is the end of one line and the beginning of the next: no load crosses lines.
        const __m512i words = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i picked = _mm512_add_epi32(words, _mm512_set1_epi32(static_cast<int>(begun / 4)));
        __m512i lines[5];
        for (int i = 0; i < 5; i++) lines[i] = load(source + i * LINE);
        for (int i = 0; i < 4; i++) {
            auto* line = reinterpret_cast<__m512i*>(target + i * LINE);
            past_caches ? _mm512_stream_si512(line, lines[i]) : _mm512_store_si512(line, lines[i]);
            __m512i stripe = _mm512_permutex2var_epi32(lines[i], picked, lines[i + 1]);
            accumulate(lanes, stripe, SECRET + 8 * in_block);
            next_stripe(in_block, lanes);
        }
    }
#elif defined(__AVX2__)
    static bool lines_fit(const uint8_t* target, size_t) {
        return reinterpret_cast<uintptr_t>(target) % LINE == 0;
    }

    static void copy_four(Lanes& lanes, uint64_t& in_block, uint8_t* target, const uint8_t* source,
                          size_t begun, bool past_caches) {
        __m256i halves[8];
        for (int i = 0; i < 8; i++) halves[i] = load(source + i * 32);
        for (int i = 0; i < 8; i++) {
            auto* half = reinterpret_cast<__m256i*>(target + i * 32);
            past_caches ? _mm256_stream_si256(half, halves[i]) : _mm256_store_si256(half, halves[i]);
        }
        for (int i = 0; i < 4; i++) {
            accumulate(lanes, source + begun + i * 64, SECRET + 8 * in_block);
            next_stripe(in_block, lanes);
        }
    }
#else
    static bool lines_fit(const uint8_t*, size_t) { return false; }

    static void copy_four(Lanes&, uint64_t&, uint8_t*, const uint8_t*, size_t, bool) {}
#endif

    void stripes(const uint8_t* data, uint64_t count, const uint8_t* next) {
        Lanes lanes = lanes_;
        due_ -= count;
        for (size_t at = 0, nbytes = count * 64; at < nbytes;) {
            uint64_t now = (nbytes - at) / 64;
            if (now > STRIPES - in_block_) now = STRIPES - in_block_;
            if (now == STRIPES && at + AHEAD + STRIPES * LINE <= nbytes) {  // most of a long range
                for (size_t i = 0; i < STRIPES; i++) {
                    __builtin_prefetch(data + at + AHEAD + i * LINE);
                    accumulate(lanes, data + at + i * 64, SECRET + 8 * i);
                }
            } else {
                for (size_t i = 0; i < now; i++) {
                    fetch_ahead(data, at + i * LINE, nbytes, next);
                    accumulate(lanes, data + at + i * 64, SECRET + 8 * (in_block_ + i));
                }
            }
            at += now * 64, in_block_ += now;
            if (in_block_ == STRIPES) scramble(lanes), in_block_ = 0;
        }
        lanes_ = lanes;
    }

    void remember(const uint8_t* data, size_t nbytes) {  // the last 64 bytes so far
        std::memmove(last_, last_ + nbytes, 64 - nbytes);
        std::memcpy(last_ + 64 - nbytes, data, nbytes);
    }

    Lanes lanes_;
    uint64_t total_, due_;  // stripes until the end, which the last 64 bytes are
    uint64_t in_block_ = 0;
    size_t carried_ = 0;
    uint8_t carry_[64], last_[64];
};

}  // namespace

// What is copied or hashed: in each of `num_planes` planes (one layer's keys or values), `stride`
// bytes apart and as long, the same `n` byte ranges.

static bool within(size_t stride, const int64_t* starts, const int64_t* lengths, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (starts[i] < 0 || lengths[i] < 0 || static_cast<size_t>(starts[i] + lengths[i]) > stride)
            return false;
    return true;
}

static uint64_t total(const int64_t* lengths, size_t n, size_t num_planes) {
    uint64_t in_plane = 0;
    for (size_t i = 0; i < n; i++) in_plane += lengths[i];
    return in_plane * num_planes;
}

// The byte after range `i` of a plane, in the order in which ranges are read.
static const uint8_t* after(const uint8_t* plane, const int64_t* starts, size_t i, size_t n,
                            size_t stride) {
    bool last = i + 1 == n;
    return plane + starts[last ? 0 : i + 1] + (last ? stride : 0);
}

// Returns 1, or 0 when a range is not within its plane: then nothing was copied.
EXPORT int kv_copy(uint8_t* target, size_t target_stride, const int64_t* to, const uint8_t* source,
                   size_t source_stride, const int64_t* from, const int64_t* lengths, size_t n,
                   size_t num_planes, uint64_t past_caches_nbytes) {
    if (!within(target_stride, to, lengths, n) || !within(source_stride, from, lengths, n)) return 0;
    bool past_caches = total(lengths, n, num_planes) >= past_caches_nbytes;
    for (size_t plane = 0; plane < num_planes; plane++) {
        for (size_t i = 0; i < n; i++) {
            const uint8_t* next = after(source, from, i, n, source_stride);
            if (past_caches)
                copy_past_caches(target + to[i], source + from[i], lengths[i], next);
            else
                std::memcpy(target + to[i], source + from[i], lengths[i]);
        }
        target += target_stride, source += source_stride;
    }
    if (past_caches) finish_copies();
    return 1;
}

// XXH3 of `prefix` and then of the ranges, altogether more than 240 bytes; `out` has 16. Returns as
// `kv_copy`.
EXPORT int kv_hash(const uint8_t* prefix, size_t prefix_nbytes, const uint8_t* memory,
                   size_t stride, const int64_t* starts, const int64_t* lengths, size_t n,
                   size_t num_planes, uint8_t* out) {
    if (!within(stride, starts, lengths, n)) return 0;
    XXH3 hash(prefix_nbytes + total(lengths, n, num_planes));
    hash.update(prefix, prefix_nbytes, memory);
    for (size_t plane = 0; plane < num_planes; plane++, memory += stride)
        for (size_t i = 0; i < n; i++)
            hash.update(memory + starts[i], lengths[i], after(memory, starts, i, n, stride));
    hash.digest(out);
    return 1;
}

// As `kv_copy`, and XXH3 of `prefix` and of the bytes that were read, as `kv_hash`.
EXPORT int kv_copy_hashed(const uint8_t* prefix, size_t prefix_nbytes, uint8_t* target,
                          size_t target_stride, const int64_t* to, const uint8_t* source,
                          size_t source_stride, const int64_t* from, const int64_t* lengths,
                          size_t n, size_t num_planes, uint64_t past_caches_nbytes,
                          uint8_t* out) {
    if (!within(target_stride, to, lengths, n) || !within(source_stride, from, lengths, n)) return 0;
    const uint64_t nbytes = total(lengths, n, num_planes);
    bool past_caches = nbytes >= past_caches_nbytes;
    XXH3 hash(prefix_nbytes + nbytes);
    hash.update(prefix, prefix_nbytes, source);
    for (size_t plane = 0; plane < num_planes; plane++) {
        for (size_t i = 0; i < n; i++)
            hash.copy(target + to[i], source + from[i], lengths[i],
                      after(source, from, i, n, source_stride), past_caches);
        target += target_stride, source += source_stride;
    }
    if (past_caches) finish_copies();
    hash.digest(out);
    return 1;
}

// A hash that goes on from call to call; `state` has `kv_hash_state_nbytes()`, aligned or not.
static_assert(std::is_trivially_copyable<XXH3>::value, "a state is copied");

EXPORT size_t kv_hash_state_nbytes() { return sizeof(XXH3); }

// Of `nbytes` in all, more than 240, of which the first are `prefix`.
EXPORT void kv_hash_begin(uint8_t* state, const uint8_t* prefix, size_t prefix_nbytes,
                          uint64_t nbytes) {
    XXH3 hash(nbytes);
    hash.update(prefix, prefix_nbytes, prefix);
    std::memcpy(state, &hash, sizeof hash);
}

// Goes on with ranges of a memory of `nbytes`. Returns 0 when one is not within it.
EXPORT int kv_hash_update(uint8_t* state, const uint8_t* memory, size_t nbytes,
                          const int64_t* starts, const int64_t* lengths, size_t n) {
    if (!within(nbytes, starts, lengths, n)) return 0;
    XXH3 hash(0);
    std::memcpy(&hash, state, sizeof hash);
    for (size_t i = 0; i < n; i++)
        hash.update(memory + starts[i], lengths[i], after(memory, starts, i, n, 0));
    std::memcpy(state, &hash, sizeof hash);
    return 1;
}

EXPORT void kv_hash_end(const uint8_t* state, uint8_t* out) {
    XXH3 hash(0);
    std::memcpy(&hash, state, sizeof hash);
    hash.digest(out);
}

// ---- sending and receiving ----

constexpr size_t BUFFERS = 1024;              // one system call takes (Linux: IOV_MAX)
constexpr size_t HASHED_AT_ONCE = 256 << 10;  // with the socket's copy it fits a core's second cache
constexpr size_t MOVED_AT_ONCE = 4 << 20;

// The bytes of `head` and then of the ranges, from `position` on.
struct Cursor {
    const uint8_t* head;
    uint64_t head_nbytes;
    uint8_t* memory;
    const int64_t *starts, *lengths;
    size_t n, range = 0;
    uint64_t within = 0;  // of the head, or else of the range

    void skip(uint64_t nbytes) {
        within += nbytes;
        if (head_nbytes && within >= head_nbytes) within -= head_nbytes, head_nbytes = 0;
        if (head_nbytes) return;
        while (range < n && within >= static_cast<uint64_t>(lengths[range]))
            within -= lengths[range++];
    }

    // Returns how many buffers it filled, of at most `most` bytes together.
    size_t buffers(iovec* out, size_t most) const {
        size_t count = 0;
        uint64_t at = within;
        if (head_nbytes && most) {
            out[count++] = {const_cast<uint8_t*>(head) + at, head_nbytes - at};
            at = 0;
        }
        for (size_t i = range; i < n && most && count < BUFFERS; i++, at = 0) {
            uint64_t nbytes = lengths[i] - at < most ? lengths[i] - at : most;
            out[count++] = {memory + starts[i] + at, nbytes};
            most -= nbytes;
        }
        return count;
    }
};

static void hash_moved(XXH3& hash, const iovec* buffers, size_t nbytes) {
    for (; nbytes; buffers++) {
        size_t now = buffers->iov_len < nbytes ? buffers->iov_len : nbytes;
        auto* data = static_cast<const uint8_t*>(buffers->iov_base);
        hash.update(data, now, data + now);
        nbytes -= now;
    }
}

// Sends `head` and the ranges through the socket `fd`, or receives the ranges (`head_nbytes` is 0),
// from `position` on, which it advances; at most about `limit` bytes. With a `state` it hashes the
// moved bytes of the ranges while they are in the core's caches. Returns 0 after a call that moved
// less than it could have, at the limit or at the end; an errno; -1: the peer has closed; -2: a
// range is not within the memory.
EXPORT int kv_move(int fd, int receiving, int flags, const uint8_t* head, size_t head_nbytes,
                   uint8_t* memory, size_t memory_nbytes, const int64_t* starts,
                   const int64_t* lengths, size_t n, uint64_t* position, uint64_t limit,
                   uint8_t* state) {
    if (!within(memory_nbytes, starts, lengths, n)) return -2;
    Cursor cursor{head, head_nbytes, memory, starts, lengths, n};
    cursor.skip(*position);
    XXH3 hash(1);
    if (state) std::memcpy(&hash, state, sizeof hash);
    iovec buffers[BUFFERS];
    int result = 0;
    for (const uint64_t first = *position; *position - first < limit;) {
        msghdr message{};
        message.msg_iov = buffers;
        message.msg_iovlen = cursor.buffers(buffers, state ? HASHED_AT_ONCE : MOVED_AT_ONCE);
        size_t wanted = 0;
        for (size_t i = 0; i < message.msg_iovlen; i++) wanted += buffers[i].iov_len;
        if (!wanted) break;
        ssize_t moved = receiving ? recvmsg(fd, &message, flags | MSG_WAITALL)
                                  : sendmsg(fd, &message, flags | MSG_NOSIGNAL);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) {
            result = moved ? errno : -1;
            break;
        }
        size_t done = static_cast<size_t>(moved);
        if (state && !cursor.head_nbytes) hash_moved(hash, buffers, done);
        if (state && cursor.head_nbytes) {
            size_t of_head = buffers[0].iov_len;
            if (done > of_head) hash_moved(hash, buffers + 1, done - of_head);
        }
        cursor.skip(done), *position += done;
        if (done < wanted) break;
    }
    if (state) std::memcpy(state, &hash, sizeof hash);
    return result;
}
