"""Host buffers: reused, bounded while idle, those of the layout used longest ago freed first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.engines.fsdp2.host import DirectCopier, HostBuffers, _layout


def test_a_buffer_is_used_again() -> None:
    pool = HostBuffers(1 << 20, pinned=False)
    first = pool.take(1000)
    assert (pool.in_use, pool.idle, pool.peak) == (1024, 0, 1024)
    pool.give(first)
    assert (pool.in_use, pool.idle) == (0, 1024)
    assert pool.take(900) is first, "sizes of one layout share buffers"
    assert pool.take(900) is not first
    assert (pool.in_use, pool.idle, pool.peak) == (2048, 0, 2048)


def test_idle_bytes_never_exceed_the_cap_and_the_layout_used_longest_ago_goes_first() -> None:
    pool = HostBuffers(8192, pinned=False)
    a, b, c = pool.take(1024), pool.take(2048), pool.take(4096)
    for buffer in (a, b, c):
        pool.give(buffer)
    assert pool.idle == 7168
    assert pool.take(1024) is a  # now 2048 is the layout used longest ago
    pool.give(pool.take(1500))
    assert pool.idle == 2048 + 4096 + _layout(1500) <= 8192
    pool.give(a)
    assert pool.idle == 4096 + _layout(1500) + 1024, "2048 went, nothing else"
    assert pool.take(4096) is c and pool.take(1024) is a
    assert pool.take(2048) is not b


def test_a_cap_of_nothing_keeps_nothing_and_what_is_in_use_may_exceed_it() -> None:
    pool = HostBuffers(0, pinned=False)
    held = [pool.take(10_000) for _ in range(5)]
    assert pool.in_use == 5 * _layout(10_000)
    for buffer in held:
        pool.give(buffer)
    assert (pool.in_use, pool.idle) == (0, 0)


@given(st.integers(0, 1 << 40))
def test_a_layout_is_at_most_an_eighth_too_large(nbytes: int) -> None:
    layout = _layout(nbytes)
    assert nbytes <= layout < max(nbytes * 1.125 + 1, nbytes + 512)
    assert _layout(layout) == layout


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=40), st.integers(0, 40_000))
def test_the_counts_are_what_is_there(steps: list[tuple[bool, int]], cap: int) -> None:
    pool = HostBuffers(cap, pinned=False)
    held: list[torch.Tensor] = []
    for take, size in steps:
        if take or not held:
            held.append(pool.take(size))
        else:
            pool.give(held.pop(size % len(held)))
        assert pool.in_use == sum(buffer.nbytes for buffer in held)
        assert pool.idle == sum(b.nbytes for waiting in pool._idle.values() for b in waiting) <= cap


def test_the_direct_copier_goes_there_and_back() -> None:
    copier, buffer = DirectCopier(), torch.empty(64, dtype=torch.uint8)
    source = torch.arange(10, dtype=torch.uint8)
    sent = copier.to_host(source, buffer)
    assert sent.ended()
    source.zero_()
    back, came = copier.to_device(buffer, 10)
    came.wait()
    assert back.tolist() == list(range(10))
