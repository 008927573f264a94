"""Stateless random numbers: Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), keyed by seed and position."""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Returns four random 32-bit words for a 128-bit counter and a 64-bit key (32-bit words)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) with 53 random bits. Seed and position have up to 64 bits."""
    counter = (position & _MASK, position >> 32 & _MASK, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
