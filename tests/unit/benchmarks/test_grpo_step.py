"""The benchmark's arithmetic: what it reads from a side, and the floor it prints. Nothing is timed here."""

from __future__ import annotations

import pytest

from benchmarks import grpo_step
from benchmarks.peers import common


def test_the_last_step_of_a_side_counts(capsys: pytest.CaptureFixture[str]) -> None:
    print("a library says hello")
    common.report_step(rollout=9.0, learn=9.0, step=18.0, wall=20.0, completion_tokens=100)
    common.report_step(rollout=1.23456, learn=2.0, step=3.5, wall=4.0, completion_tokens=101)
    common.report_result(base_rss_mb=300)
    measured = grpo_step.parse(capsys.readouterr().out)
    assert (measured.rollout, measured.learn, measured.step, measured.completion_tokens) == (1.235, 2.0, 3.5, 101)
    assert measured.base_rss_mb == 300
    assert measured.peak_rss_mb >= common.memory_mb("VmRSS") > 50  # this process has torch loaded


@pytest.mark.parametrize("output", ["", 'STEP {"step": 1}', 'RESULT {"peak_rss_mb": 1, "base_rss_mb": 1}'])
def test_a_side_that_did_not_finish_is_an_error(output: str) -> None:
    with pytest.raises(ValueError, match="STEP lines"):
        grpo_step.parse(output)


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "parameters"), [("A", 1311, 3_213_824), ("B", 7014, 3_213_824), ("C", 298, 29_369_856)]
)
def test_the_workloads_stay_what_they_were(name: str, prompt_tokens: int, parameters: int) -> None:
    workload = common.WORKLOADS[name]
    model = common.MODELS[workload.model]
    norms = model.layers * (2 * model.hidden + 2 * model.head_channels) + model.hidden
    assert sum(len(prompt.split()) for prompt in workload.prompts()) == prompt_tokens
    assert model.body_parameters + 2 * model.head_parameters + norms == parameters
    assert workload.prompts() == workload.prompts()


def test_the_floor_counts_prompts_once_and_the_head_on_replies_only() -> None:
    workload = common.WORKLOADS["A"]
    body, head = 3_145_728, 32_768
    assert workload.floor_flop(0) == 8 * body * 1311
    assert workload.floor_flop(10) - workload.floor_flop(0) == 8 * (body + head) * 10


def test_medians_are_taken_figure_by_figure() -> None:
    runs = [
        grpo_step.Measured(rollout=r, learn=s, step=s, wall=s, completion_tokens=7, peak_rss_mb=int(s), base_rss_mb=1)
        for r, s in ((1.0, 30.0), (3.0, 10.0), (2.0, 20.0))
    ]
    middle = grpo_step.middle(runs)
    assert (middle.rollout, middle.step, middle.peak_rss_mb) == (2.0, 20.0, 20)
