"""Where a step's time goes: `with spans.span("sample")` -> wall and CPU seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from strop.track.rows import RESERVED_SPANS


@dataclass(frozen=True, slots=True)
class Clock:
    """Two clocks in seconds: the wall's, and this process's CPU time over all its threads."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


class Spans:
    """Adds up the seconds of named phases since the last `take`.

    A span inside another takes its time from the outer one, so that phases never overlap and can be stacked.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, tuple[float, float]] = {}
        self._mark = (clock.wall(), clock.cpu())
        self._began = clock.wall()

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        if name in RESERVED_SPANS:
            raise ValueError(f"a span cannot be called {name!r}: that key of metrics.jsonl means something else")
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def restart(self) -> None:
        """Begin the next step now."""
        self._began = self._clock.wall()
        self._seconds = {}

    def take(self) -> tuple[float, dict[str, float]]:
        """(wall seconds since the step began, {"time/<span>": s, "time/cpu/<span>": s}), and begin the next step."""
        step = self._clock.wall() - self._began
        phases = {f"time/{name}": wall for name, (wall, _) in self._seconds.items()}
        phases |= {f"time/cpu/{name}": cpu for name, (_, cpu) in self._seconds.items()}
        self.restart()
        return step, phases

    def _charge(self) -> None:
        """Give the time since the last mark to the innermost open span."""
        now = (self._clock.wall(), self._clock.cpu())
        if self._open:
            wall, cpu = self._seconds.get(self._open[-1], (0.0, 0.0))
            self._seconds[self._open[-1]] = (wall + now[0] - self._mark[0], cpu + now[1] - self._mark[1])
        self._mark = now
