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

from strop.config.adapter import AdapterConfig
from strop.engines.base import Engine
from strop.errors import EngineError, StropError
from strop.models.experts import Form

MakeEngine = Callable[[], Engine]
BUCKET_BYTES = 64 << 20  # of weights that come in one answer
WHOLE = ""  # the name of the engine that is not an adapter's


class RankError(EngineError):
    """A rank raised, died or did not answer: which, and why. The others were stopped; the engine is of no more use."""


class Ranks(Protocol):
    """Processes that each run their share of the same engines: one, and the adapters over it."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], engine: str = WHOLE) -> list[Any]:
        """Call an engine's `method` on every rank, on rank r with `arguments[r]`; the results in order of ranks.

        `engine` is the name of an adapter's, once "adapter" was called with that name.

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


class RankServer:
    """One rank: its engines, and what they can be asked by name."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.rank = rank
        self._methods = {WHOLE: self._methods_of(engine)}

    async def answer(self, engine: str, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Run one call. What the engine raises is an answer too."""
        try:
            found: Any = self._methods[engine][method](*arguments)
            if isinstance(found, Awaitable):
                found = await found
        except (StropError, ValueError, TypeError, RuntimeError, OSError, ArithmeticError, LookupError) as error:
            return Answer(error=error, traceback=traceback.format_exc())
        return Answer(result=found)

    def _methods_of(self, engine: Engine) -> dict[str, Callable[..., Any]]:
        weights, adapter_weights = _Stream(engine.weights, self.rank), _Stream(engine.adapter_weights, self.rank)

        def adapter(name: str, config: AdapterConfig, trainable: bool) -> None:
            self._methods[name] = self._methods_of(engine.adapter(name, config, trainable=trainable))

        return {
            "capabilities": lambda: engine.capabilities,
            "forward": engine.forward,
            "forward_backward": engine.forward_backward,
            "zero_grad": engine.zero_grad,
            "optim_step": engine.optim_step,
            "start_weights": weights.start,
            "next_weights": weights.next,
            "start_adapter_weights": adapter_weights.start,
            "next_adapter_weights": adapter_weights.next,
            "adapter": adapter,
            "save": engine.save,
            "load": engine.load,
            "resident": engine.resident,
        }


class _Stream:
    """Tensors that a rank sends, some megabytes at a time. All ranks take part, the first one answers."""

    def __init__(self, tensors: Callable[..., Iterator[tuple[str, Tensor]]], rank: int) -> None:
        self._tensors, self._rank = tensors, rank
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def start(self, *form: Form) -> None:
        """Begin anew; `form` is for a stream that comes in several."""
        self._left = self._tensors(*form)

    def next(self) -> list[tuple[str, Tensor]]:
        """The next tensors; none at the end."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._left:
            size += tensor.nbytes
            bucket.append((name, tensor if self._rank == 0 else tensor[:0]))
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
