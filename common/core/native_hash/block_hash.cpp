// The chain of block hashes: BLAKE2b (RFC 7693) with 16 bytes of digest, of the parent's digest and
// the block's tokens. One call for all blocks of a prompt; from Python a call of hashlib for each
// block takes ten times as long.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t DIGEST = 16, INPUT = 128;
constexpr uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
constexpr uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

inline uint64_t rotated(uint64_t x, int n) { return (x >> n) | (x << (64 - n)); }

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
    a += b + x;
    d = rotated(d ^ a, 32);
    c += d;
    b = rotated(b ^ c, 24);
    a += b + y;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 63);
}

template <int ROUND>
inline void round_of(uint64_t* v, const uint64_t* m) {
    constexpr const uint8_t* s = SIGMA[ROUND % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

void compress(uint64_t* h, const uint8_t* input, uint64_t hashed, bool last) {
    uint64_t m[16], v[16];
    std::memcpy(m, input, INPUT);
    for (int i = 0; i < 8; ++i) {
        v[i] = h[i];
        v[i + 8] = IV[i];
    }
    v[12] ^= hashed;
    if (last) v[14] = ~v[14];
    round_of<0>(v, m);
    round_of<1>(v, m);
    round_of<2>(v, m);
    round_of<3>(v, m);
    round_of<4>(v, m);
    round_of<5>(v, m);
    round_of<6>(v, m);
    round_of<7>(v, m);
    round_of<8>(v, m);
    round_of<9>(v, m);
    round_of<10>(v, m);
    round_of<11>(v, m);
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

// Hashes the parent's digest, of `parent_size` bytes, and the block behind it.
void hash_block(const uint8_t* parent, size_t parent_size, const uint8_t* block, size_t size,
                uint8_t* digest) {
    uint64_t h[8];
    std::memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000 ^ DIGEST;
    uint8_t input[INPUT];
    std::memcpy(input, parent, parent_size);
    size_t filled = parent_size, hashed = 0;
    while (true) {
        const size_t taken = size < INPUT - filled ? size : INPUT - filled;
        std::memcpy(input + filled, block, taken);
        block += taken, size -= taken, filled += taken, hashed += filled;
        if (!size) break;
        compress(h, input, hashed, false);
        filled = 0;
    }
    std::memset(input + filled, 0, INPUT - filled);
    compress(h, input, hashed, true);
    std::memcpy(digest, h, DIGEST);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void chain_hashes(
    const uint8_t* tokens, size_t num_blocks, size_t block_nbytes, const uint8_t* parent,
    size_t parent_size, uint8_t* digests) {
    for (size_t i = 0; i < num_blocks; ++i) {
        hash_block(parent, parent_size, tokens + i * block_nbytes, block_nbytes, digests);
        parent = digests, parent_size = DIGEST;
        digests += DIGEST;
    }
}
