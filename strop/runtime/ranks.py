"""Ranks: processes that hold one engine together, and are always called all at once.

How they are started and reached is a backend's business: child processes of this one (`processes`), actors of a
cluster. What each of them runs is a `RankServer`.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from strop.engines.base import Engine
from strop.errors import EngineError, StropError


class RankError(EngineError):
    """A rank raised, died or did not answer: which, and why. The others were stopped; the engine is of no more use."""


class Ranks(Protocol):
    """Processes that each run the same engine's share."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the engine's `method` on every rank, on rank r with `arguments[r]`; the results in order of ranks.

        An error that every rank raises alike (a mistake in the arguments) comes back as it is, and the ranks go on.
        Anything else (one rank that raises, dies, or is silent for too long) is a RankError that names the rank.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says to a call: its result, or the error with the text of its traceback."""

    result: Any = None
    error: Exception | None = None
    traceback: str = ""


MakeEngine = Callable[[], Engine]
BUCKET_BYTES = 64 << 20  # of weights that come in one answer


class RankServer:
    """One rank: an engine, and what it can be asked by name."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self.rank = rank
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._methods: dict[str, Callable[..., Any]] = {
            "capabilities": lambda: engine.capabilities,
            "forward": engine.forward,
            "forward_backward": engine.forward_backward,
            "zero_grad": engine.zero_grad,
            "optim_step": engine.optim_step,
            "start_weights": self._start_weights,
            "next_weights": self._next_weights,
            "save": engine.save,
            "load": engine.load,
            "resident": engine.resident,
        }

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Run one call. What the engine raises is an answer too."""
        try:
            found: Any = self._methods[method](*arguments)
            if isinstance(found, Awaitable):
                found = await found
        except (StropError, ValueError, TypeError, RuntimeError, OSError, ArithmeticError, LookupError) as error:
            return Answer(error=error, traceback=traceback.format_exc())
        return Answer(result=found)

    def _start_weights(self) -> None:
        self._weights = self._engine.weights()

    def _next_weights(self) -> list[tuple[str, Tensor]]:
        """The next tensors, some megabytes of them; none at the end. All ranks take part, the first one answers."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._weights:
            size += tensor.nbytes
            bucket.append((name, tensor if self.rank == 0 else tensor[:0]))
            if size >= BUCKET_BYTES:
                break
        return bucket


def agreed(answers: Sequence[Answer]) -> list[Any]:
    """The results, when every rank has one. An error that all raise alike is raised; of others the rank is named."""
    errors = [(rank, a) for rank, a in enumerate(answers) if a.error is not None]
    if not errors:
        return [a.result for a in answers]
    first_rank, first = errors[0]
    assert first.error is not None
    same = all(type(a.error) is type(first.error) and str(a.error) == str(first.error) for _, a in errors)
    if len(errors) == len(answers) and same:
        raise first.error
    raise RankError(f"rank {first_rank} of {len(answers)} raised, and not all ranks did:\n{first.traceback}")
