"""Ranks as child processes of this one, on this machine: started, called, watched, and stopped together.

    call -> one message to each child -> every child computes, exchanging tensors over gloo or NCCL -> answers in order

Messages between parent and children go through pipes that nobody else can open; tensors in them through shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from strop.environment import keep_memory
from strop.errors import StropError
from strop.runtime.ranks import WHOLE, Answer, MakeEngine, RankError, RankServer, agreed

GRACE_S = 5.0  # for the other ranks to answer too, once one has failed: they may be waiting for it


class ProcessRanks:
    """A rank for each `make_engine`, which is called in the child, inside a process group of them all.

    Every function must be importable by name. A call that takes longer than `timeout_s` is given up, and so are ranks
    that die. Raises RankError when a rank cannot start.
    """

    def __init__(
        self, make_engines: Sequence[MakeEngine], *, timeout_s: float = 600.0, threads: int = 1, backend: str = "gloo"
    ) -> None:
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="strop-ranks-")  # 0700: the store within is nobody else's
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["strop.runtime.worker"])
        self._pipes: list[Connection[Any, Any]] = []
        self._children: list[ForkServerProcess] = []
        store = Path(self._folder.name) / "store"
        for rank, make in enumerate(make_engines):
            here, there = context.Pipe()
            child = context.Process(
                target=_child, args=(there, make, _Place(rank, len(make_engines), store, threads, backend)), daemon=True
            )
            child.start()
            there.close()
            self._pipes.append(here)
            self._children.append(child)
        self._broken: str | None = None
        started = False
        try:
            agreed(self._answers("start"))
            started = True
        finally:
            if not started:
                self._stop("they did not start")

    @property
    def size(self) -> int:
        return len(self._children)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], engine: str = WHOLE) -> list[Any]:
        if self._broken is not None:
            raise RankError(f"{method}: this engine's ranks were stopped: {self._broken}")
        for rank, (pipe, given) in enumerate(zip(self._pipes, arguments, strict=True)):
            try:
                pipe.send((engine, method, given))
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self._stop(f"rank {rank} is gone{self._ending(rank)} ({method})") from error
        try:
            return agreed(self._answers(method))
        except RankError as error:
            raise self._stop(str(error)) from error

    def close(self) -> None:
        self._stop("closed")

    def _answers(self, method: str) -> list[Answer]:
        """One answer of every rank; RankError when one dies or is silent for too long."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < self.size:
            waiting = {rank: self._pipes[rank] for rank in range(self.size) if rank not in answers}
            ready = wait(waiting.values(), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                failed = [rank for rank, a in answers.items() if a.error is not None]
                if failed:
                    raise self._stop(f"rank {failed[0]} raised in {method}:\n{answers[failed[0]].traceback}")
                raise self._stop(
                    f"rank {', '.join(map(str, waiting))} did not answer {method} within {self._timeout_s:g} s"
                )
            for rank, pipe in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise self._stop(f"rank {rank} died{self._ending(rank)} in {method}") from error
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [answers[rank] for rank in range(self.size)]

    def _ending(self, rank: int) -> str:
        child = self._children[rank]
        child.join(timeout=1.0)
        if child.exitcode is None:
            return ""
        return f" ({signal.Signals(-child.exitcode).name})" if child.exitcode < 0 else f" (exit {child.exitcode})"

    def _stop(self, why: str) -> RankError:
        if self._broken is None:
            self._broken = why
            for child in self._children:
                child.kill()  # a stopped process does not hear a milder signal
            for child in self._children:
                child.join()
            for pipe in self._pipes:
                pipe.close()
            self._folder.cleanup()
        return RankError(why)


@dataclass(frozen=True, slots=True)
class _Place:
    """Who a child is, and where it meets the others."""

    rank: int
    size: int
    store: Path
    threads: int
    backend: str


def _child(pipe: Connection[Any, Any], make: MakeEngine, place: _Place) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and stops its children
    torch.set_num_threads(place.threads)
    keep_memory()
    # Weights that two kinds of ranks cut are gathered in two exchanges, rarely: torch need not say so each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    store = FileStore(str(place.store), place.size)
    dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.size)
    try:
        engine = make()
    except (StropError, ValueError, TypeError, RuntimeError, OSError) as error:
        pipe.send(Answer(error=error, traceback=traceback.format_exc()))
        with suppress(EOFError, ConnectionResetError):  # others may still be meeting this rank: the parent ends all
            pipe.recv()
        return
    pipe.send(Answer())
    asyncio.run(_serve(pipe, RankServer(engine, place.rank)))


async def _serve(pipe: Connection[Any, Any], server: RankServer) -> None:
    while True:
        try:
            engine, method, arguments = pipe.recv()
        except EOFError:
            return
        found: Answer | None = None
        try:
            found = await server.answer(engine, method, arguments)
        finally:
            if found is None:  # this ends the rank, which says why before it goes
                unforeseen = RuntimeError(f"rank {server.rank} ends: {sys.exception()!r}")
                pipe.send(Answer(error=unforeseen, traceback=traceback.format_exc()))
        pipe.send(found)
