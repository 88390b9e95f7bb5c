"""Who waited for whom, from the spans of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.track.charts import cost
from strop.track.history import History, Stage
from strop.track.timeline import STEPS, draws_ahead, pieces, timeline, waits


def row(
    step: int, *, sample: float = 2.0, learn: float = 6.0, publish: float = 1.0, whole: float = 10.0
) -> dict[str, Any]:
    return {
        "stage": "grpo",
        "step": step,
        "time/step": whole,
        "time/sample": sample,
        "time/learn": learn,
        "time/publish": publish,
        "time/cpu/learn": 1.0,
        "time/tokens_per_s": 7.0,
    }


def history(rows: list[dict[str, Any]], name: str = "grpo", **recipe: Any) -> History:
    stages = [
        Stage(name="sft", metrics=[{"stage": "sft", "step": 1, "time/learn": 1.0}]),
        Stage(name=name, metrics=rows),
    ]
    return History(folder=Path("run"), recipe=recipe, recipe_text="", sessions=[], stages=stages, samples=[])


def test_phases_follow_each_other_and_fill_each_step() -> None:
    found = pieces([row(1), row(2)])
    assert [(p.step, p.phase, p.start, p.seconds) for p in found] == [
        (1, "sample", 0, 2), (1, "learn", 2, 6), (1, "publish", 8, 1), (1, "other", 9, 1),
        (2, "sample", 10, 2), (2, "learn", 12, 6), (2, "publish", 18, 1), (2, "other", 19, 1),
    ]  # fmt: skip
    assert waits(found) == pytest.approx({"samplers": 0.7, "trainer": 0.2})


def test_the_figure_shows_the_last_steps_and_both_lanes() -> None:
    figure = timeline(history([row(step) for step in range(1, 20)]))
    assert figure.count("<title>") == STEPS * 5  # publishing is in both lanes
    assert "step 19 sample: 2 s" in figure and "step 11 learn" not in figure
    assert "the trainer waits for attempts 20% of the time, samplers for weights 70%" in figure
    assert figure in cost(history([row(step) for step in range(1, 20)]))


def test_nothing_sampled_is_no_figure() -> None:
    assert timeline(history([])) == ""


@pytest.mark.parametrize(
    ("recipe", "ahead"),
    [
        ({"sampler": {"actors": 2}, "async_grpo": {"max_lag": 1}}, True),
        ({"engine": {"parallel": {"data": 2, "tensor": 1, "compute": "model"}}, "async_grpo": {"max_lag": 1}}, True),
        ({"sampler": {"kind": "vllm"}, "async_grpo": {"max_lag": 1}}, True),
        ({"sampler": {"actors": 2}, "async_grpo": {"max_lag": 0}}, False),
        ({"sampler": {"actors": 0, "kind": "builtin"}, "async_grpo": {"max_lag": 2}}, False),
    ],
)
def test_attempts_go_on_where_samplers_are_apart_and_tasks_are_open(recipe: dict[str, Any], ahead: bool) -> None:
    """In one process nobody draws while gradients are computed, whatever is open."""
    run = history([row(1)], "async_grpo", **recipe)
    assert draws_ahead(run, run.stages[-1]) is ahead
    assert ("up to 70%" in timeline(run)) is ahead
