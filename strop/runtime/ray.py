"""Ranks as actors of a Ray cluster: placed together, each with what it was promised, watched, and stopped together.

    placement group -> an actor for each rank -> rank 0 opens a store to meet at -> process group -> calls, as anywhere

Ray places and supervises; tensors of a model move between ranks by torch.distributed alone.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from strop.config.parallel import RuntimeConfig
from strop.environment import keep_memory
from strop.errors import ConfigError, StropError
from strop.runtime.ranks import WHOLE, Answer, MakeEngine, RankError, RankServer, agreed

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError("engine.runtime.kind is ray, which is not installed: pip install 'strop[ray]'") from error

GRACE_S = 5.0  # for the other ranks to answer too, once one has failed
WATCH = "watch"  # a thread of each rank that is free while the rank computes, or waits for the others


def connect(config: RuntimeConfig) -> None:
    """Join the cluster that `config` names, or start one on this machine; once for a process."""
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if config.address is not None:
        ray.init(address=config.address, **quiet)
    else:
        ray.init(include_dashboard=False, **quiet)


class Rank:
    """One actor: a rank of an engine."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._server: RankServer | None = None
        self._store: TCPStore | None = None  # where the ranks meet; the first one opens it

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Where the ranks can meet: this machine's address, and a port that is taken at once, or others might."""
        address = str(ray.util.get_node_ip_address())
        self._store = TCPStore(address, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        return address, self._store.port

    def start(self, place: tuple[str, int], make: MakeEngine, timeout_s: float) -> Answer:
        """Meet the other ranks, and make this rank's share of the engine."""
        torch.set_num_threads(1)
        keep_memory()
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        limit = timedelta(seconds=timeout_s)
        store = self._store or TCPStore(place[0], place[1], None, False, limit, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=limit)
        try:
            self._server = RankServer(make(), self._rank)
        except (StropError, ValueError, TypeError, RuntimeError, OSError) as error:
            return Answer(error=error, traceback=traceback.format_exc())
        return Answer()

    def alive(self) -> None:
        """Answer: a process that is stopped, or never gives up Python's lock, does not."""

    def answer(self, engine: str, method: str, arguments: tuple[Any, ...]) -> Answer:
        assert self._server is not None
        return asyncio.run(self._server.answer(engine, method, arguments))


class RayRanks:
    """An actor for each `make_engine`, which is called in it, inside a process group of them all.

    Raises RankError when a rank cannot start, or the cluster has not what they need within the time.
    """

    def __init__(self, make_engines: Sequence[MakeEngine], config: RuntimeConfig) -> None:
        connect(config)
        self._timeout_s = config.timeout_s
        self._broken: str | None = None
        self._actors: list[Any] = []
        needs = {"CPU": config.cpus_per_rank} | ({"GPU": config.gpus_per_rank} if config.gpus_per_rank else {})
        self._group = placement_group([needs] * len(make_engines), strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=min(config.timeout_s, 60.0))
        except GetTimeoutError as error:
            remove_placement_group(self._group)
            raise RankError(
                f"the Ray cluster has no room for {len(make_engines)} ranks of {needs}; it has "
                f"{ray.cluster_resources()}: lower engine.parallel or engine.runtime.cpus_per_rank"
            ) from error
        remote: Any = ray.remote  # its own annotations leave these groups out
        actor = remote(concurrency_groups={WATCH: 1})(Rank)
        for rank in range(len(make_engines)):
            options = actor.options(
                num_cpus=config.cpus_per_rank,
                num_gpus=config.gpus_per_rank or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            )
            self._actors.append(options.remote(rank, len(make_engines)))
        self._end = weakref.finalize(self, _end, self._actors, self._group)  # nobody holds it: make room
        place = self._get([self._actors[0].open_store.remote(config.timeout_s)], "open_store")[0]
        started = [
            actor.start.remote(place, make, config.timeout_s)
            for actor, make in zip(self._actors, make_engines, strict=True)
        ]
        agreed(self._get(started, "start"))

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], engine: str = WHOLE) -> list[Any]:
        if self._broken is not None:
            raise RankError(f"{method}: this engine's ranks were stopped: {self._broken}")
        asked = [
            actor.answer.remote(engine, method, given) for actor, given in zip(self._actors, arguments, strict=True)
        ]
        found = self._get(asked, method)
        try:
            return agreed(found)
        except RankError as error:
            raise self._stop(str(error)) from error

    def close(self) -> None:
        self._stop("closed")

    def _get(self, asked: list[Any], method: str) -> list[Any]:
        """All results, in order; RankError when an actor dies or is silent for too long."""
        rank_of = {ref: rank for rank, ref in enumerate(asked)}
        found: dict[int, Any] = {}
        left = self._timeout_s
        while waiting := [ref for ref, rank in rank_of.items() if rank not in found]:
            ready, _ = ray.wait(waiting, num_returns=1, timeout=left)
            if not ready:
                failed = [rank for rank, a in found.items() if isinstance(a, Answer) and a.error is not None]
                if failed:
                    raise self._stop(f"rank {failed[0]} raised in {method}:\n{found[failed[0]].traceback}")
                raise self._stop(self._silence([rank_of[ref] for ref in waiting], method))
            rank = rank_of[ready[0]]
            try:
                found[rank] = ray.get(ready[0])
            except RayActorError as error:
                raise self._stop(f"rank {rank} died in {method}: {error}") from error
            except RayTaskError as error:
                raise self._stop(f"rank {rank} raised in {method}:\n{error}") from error
            if isinstance(found[rank], Answer) and found[rank].error is not None:
                left = min(left, GRACE_S)
        return [found[rank] for rank in range(len(asked))]

    def _silence(self, ranks: list[int], method: str) -> str:
        """What to say of ranks that did not answer: those that hang are told from those that only wait for them."""
        rank_of = {self._actors[rank].alive.options(concurrency_group=WATCH).remote(): rank for rank in ranks}
        there, _ = ray.wait(list(rank_of), num_returns=len(rank_of), timeout=GRACE_S)
        waiting = sorted(rank_of[ref] for ref in there)
        hanging = [rank for rank in ranks if rank not in waiting]
        said = f"did not answer {method} within {self._timeout_s:g} s"
        if not hanging or not waiting:
            return f"rank {_listed(ranks)} {said}"
        return f"rank {_listed(hanging)} {said} and hangs; rank {_listed(waiting)} did not either, and is alive"

    def _stop(self, why: str) -> RankError:
        if self._broken is None:
            self._broken = why
            self._end()
        return RankError(why)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _end(actors: list[Any], group: Any) -> None:
    """Kill a group of ranks, and give back what was reserved for it."""
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
