"""Seeds of many attempts at once: the numbers of numpy's SeedSequence, without making one for each.

O'Neill 2015, "Developing a seed_seq alternative", as numpy.random.SeedSequence has it; numpy promises that its numbers
stay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Uint32s = NDArray[np.uint32]

_POOL = 4  # words
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)


def attempt_seeds(seed: int, step: int, tasks: range, attempts: int) -> NDArray[np.uint64]:
    """The 64-bit seed of each attempt, [P, G]: a hash of where it stands in the run.

    Attempt g at task p has `SeedSequence(seed, spawn_key=(step, p, g)).generate_state(1, np.uint64)`. Raises ValueError
    for numbers below 0, and for a task or an attempt that takes more than 32 bits.
    """
    if min(seed, step, tasks.start, attempts) < 0 or max(tasks.stop, attempts) > 1 << 32:
        raise ValueError(f"seed {seed}, step {step}, tasks {tasks}, attempts {attempts}: from 0 on, and below 2**32")
    words = _words(seed)
    words += [0] * (_POOL - len(words))
    entropy: list[Uint32s] = [np.full((1, 1), word, np.uint32) for word in words + _words(step)]
    entropy += [np.array(tasks, np.uint32)[:, None], np.arange(attempts, dtype=np.uint32)[None]]
    with np.errstate(over="ignore"):  # products wrap
        return _state(_pool(entropy))


def _words(number: int) -> list[int]:
    """A number in words of 32 bits, the lowest first."""
    words = [number & 0xFFFFFFFF]
    while number := number >> 32:
        words.append(number & 0xFFFFFFFF)
    return words


class _Hash:
    """One stream of constants, and what it makes of the words that come."""

    def __init__(self, start: int, factor: int) -> None:
        self._constant, self._factor = start, factor

    def __call__(self, word: Uint32s) -> Uint32s:
        hashed = word ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & 0xFFFFFFFF
        hashed = hashed * np.uint32(self._constant)
        return hashed ^ hashed >> _SHIFT


def _mix(one: Uint32s, other: Uint32s) -> Uint32s:
    mixed = _MIX_LEFT * one - _MIX_RIGHT * other
    return mixed ^ mixed >> _SHIFT


def _pool(entropy: list[Uint32s]) -> list[Uint32s]:
    hashed = _Hash(_INIT_A, _MULT_A)
    pool = [hashed(word) for word in entropy[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashed(pool[source]))
    for word in entropy[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mix(pool[target], hashed(word))
    return pool


def _state(pool: list[Uint32s]) -> NDArray[np.uint64]:
    hashed = _Hash(_INIT_B, _MULT_B)
    low, high = hashed(pool[0]), hashed(pool[1])
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
