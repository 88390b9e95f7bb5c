"""What a terminal shows: everything once, seldom enough, and nothing that a model's text could do to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from strop.track.draw import Curve, braille, clean, duration, resample, shares
from strop.track.live import REFRESH_S, Lines, Picture, Throttle, live_view
from strop.track.run import Run, Watch
from strop.track.samples import Sample, Why
from strop.track.summary import print_summary
from tests.unit.track.fakes import all_stages, decode, evaluation, recipe
from tests.unit.track.make_run import make_run

ROW = {
    "stage": "grpo",
    "step": 3,
    "reward/mean": 0.41234,
    "sampler/gap_max": 1.23e-5,
    "time/step": 4.0,
    "time/sample": 2.0,
    "time/learn": 1.5,
    "time/cpu/learn": 3.0,
    "time/tokens_per_s": 1234.5,
    "memory/rss_mb": 2048.0,
}


def sample(reply: str) -> Sample:
    return Sample(
        why=Why.RANDOM,
        task_id="t7",
        prompt="What is 1 + 1?",
        reply=reply,
        reward=1.0,
        rewards={},
        ending="done",
        tokens=4,
    )


def terminal(width: int = 100) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def never(_: float, __: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


def drawn(view: Picture, console: Console) -> str:
    """What the view draws last."""
    before = len(written(console))
    view.close()
    return written(console)[before:]


def test_plain_lines_say_what_a_step_was() -> None:
    console = Console(file=StringIO(), width=60)
    view = Lines(console)
    view.begin("grpo", 0, 40)
    view.evaluation(evaluation("grpo", 0, 0.35))
    view.row(ROW)
    view.row({"stage": "grpo", "step": 4, "loss/nll": 1.5, "time/step": 0.25})
    view.close()
    assert written(console).splitlines() == [
        "grpo  0/40  held out: sampled 35.0%, greedy 17.5%, pass@4 70.0%",
        "grpo  3/40  reward 0.412  accuracy 35.0%  gap 1.2e-05  1,234 tok/s  4.0 s",
        "grpo  4/40  loss 1.5000  accuracy 35.0%  0.2 s",
    ]


def test_a_run_that_goes_on_says_so() -> None:
    console = Console(file=StringIO())
    Lines(console).begin("grpo", 20, 40)
    assert written(console) == "grpo goes on after step 20 of 40\n"


@pytest.mark.parametrize(
    ("live", "options", "kind"),
    [
        (True, {"force_terminal": True}, Picture),
        (False, {"force_terminal": True}, Lines),
        (True, {"force_terminal": False}, Lines),
        (True, {"force_terminal": True, "_environ": {"TERM": "dumb"}}, Lines),
    ],
)
def test_the_picture_is_for_terminals(live: bool, options: dict[str, Any], kind: type) -> None:
    assert type(live_view(recipe(live=live), Console(file=StringIO(), **options))) is kind


def test_the_picture_shows_everything() -> None:
    console = terminal()
    view = Picture(console, later=never)
    view.begin("grpo", 0, 40)
    view.evaluation(evaluation("grpo", 0, 0.25))
    view.row(ROW)
    view.evaluation(evaluation("grpo", 3, 0.5))
    view.samples([sample("It is 2.")])
    view.phase("learn")
    text = drawn(view, console)
    for part in (
        "grpo", "step 3/40", "about 2m28s left", "reward  0.412", "25.0% -> sampled 50.0%", "4.0 s/step", "1,234 tok/s",
        "2,048 MiB", "gap 1.2e-05", "sample 50%", "learn 38%", "other 12%", "What is 1 + 1?", "It is 2.",
        "random of the",
    ):  # fmt: skip
        assert part in text, part


def test_a_stage_without_reward_shows_its_loss() -> None:
    console = terminal()
    view = Picture(console, later=never)
    view.begin("sft", 0, 40)
    view.row({"stage": "sft", "step": 1, "loss/nll": 2.5, "time/step": 1.0})
    assert "loss  2.5000" in drawn(view, console)


def test_a_reply_cannot_steer_the_terminal() -> None:
    """K06, in the terminal."""
    console = terminal()
    view = Picture(console, later=never)
    view.begin("grpo", 0, 40)
    view.samples([sample("\x1b]0;title\x07\x1b[2J[bold]fat[/bold]\r\x9b31m\u202eback\x00")])
    text = drawn(view, console)
    assert "[bold]fat[/bold]" in text, "markup is text"
    for control in ("\x07", "\x1b]", "\r\x9b", "\x9b", "\u202e", "\x00"):
        assert control not in text
    assert "\u241b]0;title\u2407\u241b[2J" in text, "and is shown for what it is"


def test_any_width_will_do() -> None:
    for width in (1, 20, 40, 300):
        console = terminal(width)
        view = Picture(console, later=never)
        view.begin("grpo", 0, 40)
        view.row(ROW)
        view.evaluation(evaluation("grpo", 3, 0.5))
        view.samples([sample("wide \U0001f600 " * 50)])
        assert drawn(view, console)


class FakeTimers:
    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        entry = (self.now + seconds, action)
        self.waiting.append(entry)
        return lambda: self.waiting.remove(entry)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for entry in [entry for entry in self.waiting if entry[0] <= self.now]:
            self.waiting.remove(entry)
            entry[1]()


def test_drawing_is_seldom_and_the_last_news_is_drawn() -> None:
    timers, drawings = FakeTimers(), []
    throttle = Throttle(lambda: drawings.append(timers.now), REFRESH_S, clock=lambda: timers.now, later=timers.later)
    for _ in range(100):
        throttle()
        timers.advance(0.0625)
    assert len(drawings) == 13, "6.25 s of news, twice a second"
    assert all(b - a >= REFRESH_S for a, b in pairwise(drawings))
    throttle()
    timers.advance(1.0)
    seen = len(drawings)
    timers.advance(100.0)
    assert len(drawings) == seen and not timers.waiting, "nothing is drawn while nothing happens"
    throttle()
    throttle()
    throttle.close()
    assert not timers.waiting


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    view = Picture(terminal())
    view.begin("grpo", 0, 40)
    for step in range(20):
        view.row(ROW | {"step": step})
    view.close()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert threading.active_count() == before


def test_a_whole_run_is_drawn_and_its_view_is_bounded(tmp_path: Path) -> None:
    """I05, for the view: curves keep a bounded number of points."""
    console = terminal()
    view = Picture(console, later=never)
    asyncio.run(all_stages(Run.start(tmp_path / "run", recipe(), decode=decode, watch=Watch(view=view))))
    assert "step 5/5" in written(console)
    curve = Curve(points=8)
    for i in range(1000):
        curve.add(float(i))
        assert len(curve.values) <= 16
    assert curve.values == sorted(curve.values) and curve.values[0] < 100 and curve.values[-1] > 900
    assert curve.last == 999.0


def test_braille_draws_what_it_is_given() -> None:
    assert braille([0.0, 1.0], 1, 1) == [chr(0x2800 | 0x40 | 0x04 | 0x10 | 0x08)], "left half up, right half on"
    flat = braille([2.0] * 10, 4, 2)
    assert len(flat) == 2 and all(len(line) == 4 for line in flat)
    assert flat[0] == "\u2800" * 4 and "\u2800" not in flat[1]
    rising = braille([float(i) for i in range(100)], 10, 3)
    assert rising[0][:5] == "\u2800" * 5 and rising[0][-1] != "\u2800" and rising[2][0] != "\u2800"
    assert braille([], 3, 1) == ["\u2800" * 3]


def test_resampling_keeps_the_mean() -> None:
    values = list(np.arange(100.0))
    assert len(resample(values, 10)) == 10 and np.mean(resample(values, 10)) == np.mean(values)
    assert resample(values, 1000) == values


def test_a_bar_is_filled_by_its_shares() -> None:
    text = shares({"sample": 3.0, "learn": 1.0, "nothing": 0.0}, 20).plain
    assert text.count("\u2588") == 20 and "sample 75%" in text and "learn 25%" in text and "nothing" not in text
    assert shares({}, 20).plain == shares({"a": 0.0}, 20).plain == ""


def test_clean_text_keeps_what_people_write() -> None:
    text = "Zeile\n\tZeichen: \u00e4\u6f22\U0001f468\u200d\U0001f469"
    assert clean(text) == text
    assert clean("\x00\x1b\x7f\x85\u2028\u2066\ud800") == "\u2400\u241b\ufffd\ufffd\ufffd\ufffd\ufffd"


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0.4, 59.4, 61, 3600, 7620)] == ["0 s", "59 s", "1m01s", "1h00m", "2h07m"]


def test_the_summary_tells_what_changed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", sft=4, grpo=20, every=10)
    console = Console(file=StringIO(), width=120)
    print_summary(folder, folder / "report.html", console)
    text = written(console)
    for part in ("before sft", "after sft", "before grpo", "37.5%", "93.8%", "1 + 7 = 8", "20 steps of", "report.html"):
        assert part in text, part


def test_the_summary_of_a_run_that_did_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", grpo=20, stop_after=0)
    (folder / "evaluations.jsonl").unlink()
    console = Console(file=StringIO(), width=120)
    print_summary(folder, folder / "report.html", console)
    assert "no steps in 0 s" in written(console)
