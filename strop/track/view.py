"""Who looks on while a run goes: the protocol of live views, and the one that shows nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from strop.track.evaluation import Evaluation
from strop.track.samples import Sample


class View(Protocol):
    """Told of everything that happens; keeps at most a bounded window of it."""

    def begin(self, stage: str, step: int, steps: int) -> None:
        """A loop begins, or goes on from `step`, towards `steps`."""
        ...

    def phase(self, name: str) -> None:
        """A phase of the step begins."""
        ...

    def row(self, row: Mapping[str, Any]) -> None:
        """A step ended; `row` is its line of metrics.jsonl."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def samples(self, samples: list[Sample]) -> None: ...

    def close(self) -> None: ...


class NoView:
    """Shows nothing."""

    def begin(self, stage: str, step: int, steps: int) -> None: ...

    def phase(self, name: str) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def samples(self, samples: list[Sample]) -> None: ...

    def close(self) -> None: ...
