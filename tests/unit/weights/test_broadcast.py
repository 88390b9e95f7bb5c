"""Versions by broadcast to listeners that die, fall silent or refuse: who serves what afterwards, and who is named.

Real gloo groups, of threads in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from strop.errors import EngineError, RolloutError
from strop.ops.checksum import checksum
from strop.rollout.router import SamplerLost
from strop.runtime.ranks import RankError
from strop.weights.broadcast import Broadcast, Place, meet, open_store
from strop.weights.collective import Broken, Receiver
from tests.unit.rollout.test_router import Slow

NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


class Kept(Slow):
    """A sampler that keeps what it was given, or refuses it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.weights: dict[str, Tensor] = {}

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.version = version


class Listener:
    """What an actor does, and the ways in which one fails."""

    fate = ""  # "dies" when a version comes, "died before", or "is silent"

    def __init__(self) -> None:
        self.sampler = Kept()
        self.version = 0
        self.meetings = 0
        self.closed = False
        self.receiver: Receiver | None = None

    async def hang_up(self) -> None:
        if self.fate == "died before":
            raise SamplerLost("its actor died")
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    async def open_store(self) -> Place:
        self.store = open_store("127.0.0.1")
        return "127.0.0.1", self.store.port

    async def join(self, place: Place, rank: int, size: int, timeout_s: float) -> None:
        self.meetings += 1
        self.receiver = Receiver(await asyncio.to_thread(meet, place, rank, size, timeout_s))

    async def receive(self) -> None:
        assert self.receiver is not None
        if self.fate in ("dies", "died before"):
            self.receiver.close()
            self.receiver, self.fate = None, "died before"
            raise SamplerLost("its actor died")
        if self.fate == "is silent":
            await asyncio.sleep(1000)
        try:
            await self.receiver.load(self.sampler)
        except Broken:
            await self.hang_up()
            raise

    def serves(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.closed = True


class Weights:
    """Those of a version, to be read as often as it takes."""

    def __init__(self, value: float, fails: Exception | None = None) -> None:
        self.value, self.fails = value, fails

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.full((3, 2), self.value).t()
        yield "n", NAN.expand(3)
        if self.fails is not None:
            raise self.fails
        yield "i", torch.arange(4)


def fleet(timeout_s: float = 30.0, dtype: torch.dtype | None = None) -> tuple[list[Listener], Broadcast]:
    listeners = [Listener() for _ in range(3)]
    return listeners, Broadcast(listeners, timeout_s=timeout_s, dtype=dtype)


def test_all_serve_the_bytes_that_were_sent_and_meet_once() -> None:
    listeners, courier = fleet()

    async def work() -> None:
        for version in (1, 2):
            assert await courier.deliver(Weights(version), version, range(3)) == {}
            for one in listeners:
                assert one.version == one.sampler.version == version
                sums = {name: checksum(tensor) for name, tensor in one.sampler.weights.items()}
                assert sums == {name: checksum(tensor) for name, tensor in Weights(version)}
        assert [one.meetings for one in listeners] == [1, 1, 1]

    asyncio.run(work())


def test_they_come_in_the_format_of_the_receivers() -> None:
    listeners, courier = fleet(dtype=torch.bfloat16)
    asyncio.run(courier.deliver(Weights(1.0), 1, range(3)))
    formats = {name: tensor.dtype for name, tensor in listeners[2].sampler.weights.items()}
    assert formats == {"a": torch.bfloat16, "n": torch.bfloat16, "i": torch.int64}


@pytest.mark.parametrize("fate", ["dies", "died before", "is silent"])
@pytest.mark.parametrize("first", [True, False])
def test_one_that_is_lost_is_named_and_the_others_serve_the_version(fate: str, first: bool) -> None:
    listeners, courier = fleet(timeout_s=2.0)

    async def work() -> None:
        if not first:
            await courier.deliver(Weights(1), 1, range(3))
        listeners[1].fate = fate
        lost = await courier.deliver(Weights(2), 2, range(3))
        assert list(lost) == [1] and ("died" in str(lost[1]) or "silent in a broadcast for 2 s" in str(lost[1]))
        assert listeners[1].closed is (fate == "is silent")
        assert listeners[1].sampler.version == (0 if first else 1), "it serves what it did"
        for i in (0, 2):
            assert listeners[i].version == listeners[i].sampler.version == 2
            assert float(listeners[i].sampler.weights["a"][0, 0]) == 2
        assert await courier.deliver(Weights(3), 3, [0, 2]) == {}
        assert [one.sampler.version for one in listeners] == [3, 0 if first else 1, 3]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_when_all_are_lost_all_are_named() -> None:
    listeners, courier = fleet()
    for one in listeners:
        one.fate = "dies"
    lost = asyncio.run(courier.deliver(Weights(1), 1, range(3)))
    assert sorted(lost) == [0, 1, 2]


def test_one_that_refuses_is_named_with_its_reason_and_the_next_version_goes_to_all() -> None:
    listeners, courier = fleet()

    async def work() -> None:
        await courier.deliver(Weights(1), 1, range(3))
        listeners[2].sampler.fails = EngineError("missing b")
        with pytest.raises(EngineError, match=r"version 2 .*not every sampler could load it.*sampler 2: missing b"):
            await courier.deliver(Weights(2), 2, range(3))
        assert listeners[2].sampler.version == 1
        listeners[2].sampler.fails = None
        assert await courier.deliver(Weights(3), 3, range(3)) == {}
        assert [one.sampler.version for one in listeners] == [3, 3, 3]

    asyncio.run(work())


def test_what_the_engine_raises_is_raised_as_it_is_and_nobody_serves_half() -> None:
    """A restart by policy looks for RankError."""
    listeners, courier = fleet()

    async def work() -> None:
        await courier.deliver(Weights(1), 1, range(3))
        with pytest.raises(RankError, match="rank 1 died"):
            await courier.deliver(Weights(2, RankError("rank 1 died")), 2, range(3))
        assert [float(one.sampler.weights["a"][0, 0]) for one in listeners] == [1, 1, 1]
        assert await courier.deliver(Weights(3), 3, range(3)) == {}

    asyncio.run(work())


def test_weights_that_can_be_read_once_are_not_sent_in_part() -> None:
    listeners, courier = fleet()
    listeners[0].fate = "dies"
    with pytest.raises(RolloutError, match="its actor died: it cannot be read a second time"):
        asyncio.run(courier.deliver(iter(Weights(1)), 1, range(3)))
    assert [one.sampler.version for one in listeners] == [0, 0, 0]
