"""A version to all sampler actors by one broadcast, in a process group of the trainer's process and theirs.

    meet: an actor opens a store, all join there, the trainer as rank 0 -> a version: sent here, received there, served

When an actor is lost, the group is too: those that are left meet again, and are sent the version once more, whole. So a
sampler that is there serves every version, and what it serves came in one piece.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from strop.errors import EngineError, RolloutError, StropError
from strop.rollout.router import SamplerLost
from strop.rollout.transfer import cast
from strop.weights.collective import Broken, NotServed, Sender

MEET_S = 120.0  # for processes that are there already to connect to each other

log = logging.getLogger(__name__)
Place = tuple[str, int]


def open_store(address: str) -> TCPStore:
    """In the process of a listener at `address`: a store on a port that nobody has."""
    return TCPStore(address, 0, None, True, timedelta(seconds=MEET_S), wait_for_workers=False)


def meet(place: Place, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    """Join a gloo group of its own, beside any other that this process is in. An exchange in it that takes longer than
    `timeout_s` fails. Broken when the others do not come."""
    try:
        return _met(place, rank, size, timeout_s)
    except RuntimeError as error:
        raise Broken(f"the group of a broadcast was not complete: {str(error).splitlines()[0]}") from error


def _met(place: Place, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    limit, meeting = timedelta(seconds=timeout_s), timedelta(seconds=min(timeout_s, MEET_S))
    store = TCPStore(place[0], place[1], None, False, meeting, wait_for_workers=False)
    group = ProcessGroup(store, rank, size)
    gloo = ProcessGroupGloo(store, rank, size, timeout=meeting)
    gloo.set_timeout(limit)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


class Listener(Protocol):
    """A sampler elsewhere that can be in a group. Any call raises SamplerLost when its process is gone."""

    async def hang_up(self) -> None:
        """Leave the group, if it is in one."""
        ...

    async def open_store(self) -> Place:
        """Where a new group can meet."""
        ...

    async def join(self, place: Place, rank: int, size: int, timeout_s: float) -> None:
        """See `meet`."""
        ...

    async def receive(self) -> None:
        """Take the version that is sent now, and serve it. Broken when the group is."""
        ...

    def serves(self, version: int) -> None: ...

    def close(self) -> None:
        """End its process."""
        ...


class Broadcast:
    """Delivers to `samplers` what is sent here; `dtype` is what they compute in.

    An actor that is silent for `timeout_s` is lost, as one that died is. The time of an exchange counts, and what the
    engine takes between two buckets, not a whole version.
    """

    def __init__(self, samplers: Sequence[Listener], *, timeout_s: float, dtype: torch.dtype | None = None) -> None:
        self._samplers = list(samplers)
        self._timeout_s = timeout_s
        self._dtype = dtype
        self._members: list[int] = []  # of the group that stands; none when none does
        self._sender: Sender | None = None

    async def deliver(
        self, weights: Iterable[tuple[str, Tensor]], version: int, among: Sequence[int]
    ) -> dict[int, SamplerLost]:
        """See `router.Courier`. `weights` is read again from its beginning when a sampler is lost on the way."""
        lost: dict[int, SamplerLost] = {}
        while left := [i for i in among if i not in lost]:
            if lost and iter(weights) is weights:
                raise RolloutError(
                    f"version {version} was on its way when {'; '.join(map(str, lost.values()))}: it cannot be read a "
                    "second time for the samplers that are left"
                )
            found = await self._meet(left) or await self._send(weights, version, left)
            if not found:
                break
            for i, error in found.items():
                log.warning("sampler %d was lost during a broadcast, which begins again without it: %s", i, error)
            lost |= found
        return lost

    async def _meet(self, left: list[int]) -> dict[int, SamplerLost]:
        """Make a group of these samplers, unless there is one. Those that were lost meanwhile, and why."""
        if self._members == left:
            return {}
        self._leave()
        asked = [asyncio.ensure_future(self._samplers[i].hang_up()) for i in left]
        await asyncio.wait(asked)
        if lost := _sorted(left, asked)[0]:  # the others would wait for them
            return lost
        try:
            place = await self._samplers[left[0]].open_store()
        except SamplerLost as error:
            return {left[0]: error}
        size = len(left) + 1
        joining = [
            asyncio.ensure_future(self._samplers[i].join(place, rank, size, self._timeout_s))
            for rank, i in enumerate(left, 1)
        ]
        here = asyncio.ensure_future(asyncio.to_thread(meet, place, 0, size, self._timeout_s))
        await asyncio.wait([here, *joining])
        lost, said = _sorted(left, joining)
        error = here.exception()
        if not lost and error is None and not said:
            self._sender, self._members = Sender(here.result()), left
        elif not lost:
            raise RolloutError(f"the samplers cannot meet for a broadcast: {_reasons(error, said)}") from error
        return lost

    async def _send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, left: list[int]
    ) -> dict[int, SamplerLost]:
        """Send a version over the group of these samplers. Those that were lost meanwhile, and why."""
        assert self._sender is not None
        receiving = [asyncio.ensure_future(self._samplers[i].receive()) for i in left]
        sending = asyncio.to_thread(self._sender.send, cast(weights, self._dtype), version)
        (error,) = await asyncio.gather(sending, return_exceptions=True)
        if error is not None:
            self._leave()
        _, silent = await asyncio.wait(receiving, timeout=self._timeout_s)
        lost, said = _sorted(left, receiving)
        for i, one in zip(left, receiving, strict=True):
            if one in silent:
                one.cancel()
                self._samplers[i].close()
                lost[i] = SamplerLost(f"its actor was silent in a broadcast for {self._timeout_s:g} s, and was killed")
        if error is None and not lost and not said:
            for i in left:
                self._samplers[i].serves(version)
            return {}
        self._leave()
        if lost and (error is None or isinstance(error, Broken)):
            return lost
        if error is None or isinstance(error, Broken | NotServed):
            raise EngineError(f"version {version} was broadcast in vain: {_reasons(error, said)}") from error
        raise error

    def _leave(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender, self._members = None, []


def _sorted(
    left: list[int], ended: Sequence[asyncio.Future[None]]
) -> tuple[dict[int, SamplerLost], dict[int, BaseException]]:
    """The samplers that are gone, and what others of them raised."""
    done = {i: one for i, one in zip(left, ended, strict=True) if one.done()}
    raised = {i: error for i, one in done.items() if (error := one.exception()) is not None}
    lost = {i: error for i, error in raised.items() if isinstance(error, SamplerLost)}
    said = {i: error for i, error in raised.items() if i not in lost}
    for error in said.values():
        if not isinstance(error, StropError):
            raise error
    return lost, said


def _reasons(here: BaseException | None, said: dict[int, BaseException]) -> str:
    """What went wrong, where; an error of a sampler's own before those that only noticed."""
    first = {i: error for i, error in said.items() if not isinstance(error, Broken)} or said
    return "; ".join([*([] if here is None else [str(here)]), *(f"sampler {i}: {error}" for i, error in first.items())])
