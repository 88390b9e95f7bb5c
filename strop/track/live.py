"""Progress in the terminal: rows, evaluations and samples -> a picture of the run, or one plain line per step.

The picture is drawn when something happens, at most twice a second, and never by a thread that waits in a loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.config.recipe import Recipe
from strop.track import rows
from strop.track.draw import Curve, braille, clean, duration, shares
from strop.track.evaluation import Evaluation
from strop.track.samples import Sample
from strop.track.view import View

REFRESH_S = 0.5  # seconds between two drawings, at least
_RECENT = 20  # steps over which speed and the time split are averaged
_SAMPLE_CHARACTERS = 600

Cancel = Callable[[], None]


def live_view(recipe: Recipe, console: Console) -> View:
    """The picture when `console` is a terminal and the recipe wants it, else plain lines."""
    drawable = console.is_terminal and not console.is_dumb_terminal
    return Picture(console) if recipe.run.live and drawable else Lines(console)


def figures(row: Mapping[str, Any]) -> dict[str, str]:
    """What one step is summed up by, as short texts; only what the row holds."""
    shown = {
        "loss": (rows.LOSS, "{:.4f}"),
        "reward": (rows.REWARD, "{:.3f}"),
        "gap": (rows.GAP, "{:.1e}"),
        "tok/s": (rows.RATE, "{:,.0f}"),
        "s": (rows.STEP_TIME, "{:.1f}"),
    }
    return {name: form.format(row[key]) for name, (key, form) in shown.items() if key in row}


def accuracies(evaluation: Evaluation) -> str:
    """`sampled 41.2 %, greedy 45.0 %, pass@4 60.1 %`; of a reward model `pairs 93.0 %`."""
    parts = [f"{evaluation.measured} {evaluation.sampled_accuracy:.1%}"]
    if evaluation.greedy_accuracy is not None:
        parts.append(f"greedy {evaluation.greedy_accuracy:.1%}")
    parts += [f"pass@{k} {value:.1%}" for k, value in sorted(evaluation.pass_at_k.items()) if k > 1]
    return ", ".join(parts)


class Lines:
    """One plain line per step and per evaluation, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage, self._steps = "", 0
        self._accuracy: float | None = None

    def begin(self, stage: str, step: int, steps: int) -> None:
        self._stage, self._steps = stage, steps
        if step:
            self._print(f"{stage} goes on after step {step} of {steps}")

    def phase(self, name: str) -> None:
        """Nothing to say of it on a line of its own."""

    def row(self, row: Mapping[str, Any]) -> None:
        parts = figures(row)
        texts = [f"{name} {parts[name]}" for name in ("loss", "reward") if name in parts]
        if self._accuracy is not None:
            texts.append(f"accuracy {self._accuracy:.1%}")
        if "gap" in parts:
            texts.append(f"gap {parts['gap']}")
        texts += [f"{parts[name]} {name}" for name in ("tok/s", "s") if name in parts]
        self._print(f"{self._place(row['step'])}  {'  '.join(texts)}")

    def evaluation(self, evaluation: Evaluation) -> None:
        self._accuracy = evaluation.sampled_accuracy
        self._print(f"{self._place(evaluation.step)}  held out: {accuracies(evaluation)}")

    def samples(self, samples: list[Sample]) -> None:
        """Samples are many lines: they are in samples.jsonl."""

    def close(self) -> None:
        """Nothing is held open."""

    def _place(self, step: int) -> str:
        return f"{self._stage} {step:>{len(str(self._steps))}}/{self._steps}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _call_later(seconds: float, action: Callable[[], None]) -> Cancel:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer.cancel


class Throttle:
    """Lets `action` run at most every `period` seconds: a call that comes too early is made up for once, later."""

    def __init__(
        self,
        action: Callable[[], None],
        period: float,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Cancel] = _call_later,
    ) -> None:
        self._action, self._period, self._clock, self._call_later = action, period, clock, later
        self._last = float("-inf")
        self._cancel: Cancel | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            wait = self._last + self._period - self._clock()
            if wait > 0:
                if self._cancel is None:
                    self._cancel = self._call_later(wait, self._make_up)
                return
            self._last = self._clock()
        self._action()

    def close(self) -> None:
        """Forget what is still to be made up for."""
        with self._lock:
            if self._cancel is not None:
                self._cancel()
                self._cancel = None

    def _make_up(self) -> None:
        with self._lock:
            self._cancel = None
            self._last = self._clock()
        self._action()


class Picture:
    """Progress, reward and accuracy curves, speed, where the time goes, and a current sample, redrawn in place."""

    def __init__(self, console: Console, later: Callable[[float, Callable[[], None]], Cancel] = _call_later) -> None:
        self._console = console
        self._lock = threading.RLock()  # the late drawing of a Throttle comes from another thread
        self._began = time.monotonic()
        self._stage, self._step, self._steps, self._phase = "", 0, 0, ""
        self._reset_curves()
        self._accuracies: Curve = Curve()
        self._first_accuracy: float | None = None
        self._evaluation: Evaluation | None = None
        self._sample: Sample | None = None
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._draw, vertical_overflow="crop")
        self._draw_soon = Throttle(self._refresh, REFRESH_S, later=later)

    def begin(self, stage: str, step: int, steps: int) -> None:
        with self._lock:
            self._stage, self._step, self._steps = stage, step, steps
            self._reset_curves()
        if not self._live.is_started:
            self._live.start()
        self._draw_soon()

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase = name
        self._draw_soon()

    def row(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            self._step = int(row["step"])
            self._row = row
            self._recent.append(row)
            value = row.get(rows.REWARD, row.get(rows.LOSS))
            if value is not None:
                self._curve.add(float(value))
        self._draw_soon()

    def evaluation(self, evaluation: Evaluation) -> None:
        with self._lock:
            self._evaluation = evaluation
            self._accuracies.add(evaluation.sampled_accuracy)
            if self._first_accuracy is None:
                self._first_accuracy = evaluation.sampled_accuracy
        self._draw_soon()

    def samples(self, samples: list[Sample]) -> None:
        with self._lock:
            if samples:
                self._sample = samples[-1]  # a random one where there are several
        self._draw_soon()

    def close(self) -> None:
        self._draw_soon.close()
        with self._lock:
            self._phase = ""
        if self._live.is_started:
            self._live.refresh()
            self._live.stop()

    def _refresh(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def _reset_curves(self) -> None:
        self._row: Mapping[str, Any] = {}
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_RECENT)
        self._curve = Curve()

    def _draw(self) -> RenderableType:
        with self._lock:
            bar = ProgressBar(total=max(1, self._steps), completed=self._step)
            parts: list[RenderableType] = [self._headline(), bar]
            if self._curve.values or self._accuracies.values:
                parts += ["", self._curves()]
            if self._recent:
                parts += ["", self._speed()]
            if self._sample is not None:
                parts += ["", _sample_panel(self._sample)]
            return Group(*parts)

    def _headline(self) -> RenderableType:
        line = Table.grid(expand=True)
        line.add_column()
        line.add_column(justify="right")
        left = Text.assemble((self._stage, "bold"), f"  step {self._step}/{self._steps}", (f"  {self._phase}", "dim"))
        right = duration(time.monotonic() - self._began)
        if self._recent and self._step < self._steps:
            right += f", about {duration((self._steps - self._step) * self._mean(rows.STEP_TIME))} left"
        line.add_row(left, Text(right, style="dim"))
        return line

    def _curves(self) -> RenderableType:
        width = max(10, (self._console.width - 4) // 2)
        name, form = ("reward", "{:.3f}") if rows.REWARD in self._row else ("loss", "{:.4f}")
        grid = Table.grid(padding=(0, 2))
        cells: list[RenderableType] = []
        if self._curve.last is not None:
            title = Text.assemble((name, "bold"), "  " + form.format(self._curve.last))
            cells.append(_plot(title, self._curve.values, width, "cyan"))
        if self._evaluation is not None and self._first_accuracy is not None:
            found = f"  {self._first_accuracy:.1%} -> {accuracies(self._evaluation)}"
            title = Text.assemble(("held out", "bold"), found)
            cells.append(_plot(title, self._accuracies.values, width, "green"))
        grid.add_row(*cells)
        return grid

    def _speed(self) -> RenderableType:
        parts = figures(self._row)
        texts = [f"{self._mean(rows.STEP_TIME):.1f} s/step"]
        if rows.RATE in self._row:
            texts.append(f"{self._mean(rows.RATE):,.0f} tok/s")
        if rows.RSS in self._row:
            texts.append(f"{self._row[rows.RSS]:,.0f} MiB")
        if "gap" in parts:
            texts.append(f"sampler-trainer gap {parts['gap']}")
        phases: dict[str, float] = {}
        for row in self._recent:
            for name, seconds in rows.phase_seconds(row).items():
                phases[name] = phases.get(name, 0.0) + seconds
        return Group(Text("  ".join(texts)), shares(phases, max(10, self._console.width // 3)))

    def _mean(self, key: str) -> float:
        values = [float(row[key]) for row in self._recent if key in row]
        return sum(values) / max(1, len(values))


def _plot(title: Text, values: list[float], width: int, color: str) -> RenderableType:
    title.truncate(width, overflow="ellipsis")
    lines = braille(values, width, 4)
    return Group(title, *(Text(line, style=color) for line in lines))


def _sample_panel(sample: Sample) -> RenderableType:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    prompt = clean(sample.prompt[-_SAMPLE_CHARACTERS:]).strip()
    body = Text.assemble((prompt, "dim"), "\n", clean(sample.reply[:_SAMPLE_CHARACTERS]).strip(), overflow="fold")
    task = clean(sample.task_id.rpartition("/")[2])
    title = Text(f"{task}: {sample.why} of the step, {reward}, {sample.tokens} tokens")
    return Panel(body, title=title, title_align="left", border_style="dim", height=None)
