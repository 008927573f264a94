// The CPU's matrix unit for bfloat16 (Intel AMX): eight tiles of at most 16 rows of 64 bytes.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t TILE = 16;  // rows of a tile, and words of a row

// Whether the kernel lets this process use the unit (Linux: arch_prctl, ARCH_REQ_XCOMP_PERM).
inline bool has_tiles() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// Makes the compiler write what is to be read by the unit, of whose loads it does not know.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Gives each tile its number of rows and of words in a row; both are 1 at least. What tiles hold is
// lost.
inline void configure_tiles(const int64_t (&rows)[8], const int64_t (&words)[8]) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = uint8_t(rows[i] > 0 ? rows[i] : 1);
        config.bytes[i] = uint16_t(4 * (words[i] > 0 ? words[i] : 1));
    }
    settle_memory();
    _tile_loadconfig(&config);
}
#endif
