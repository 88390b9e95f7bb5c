"""Whole runs of the loops that imitate: a teacher, or the best of their own attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.errors import ConfigError, DataError, RolloutError

HERE = Path(__file__).parent
MODEL = """{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
  num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64, tie_word_embeddings: false}"""
RECIPE = f"""
seed: 3
threads: 1
model: {{fresh: {MODEL}, tokenizer: '{HERE}/tiny_task.py:tokenizer'}}
renderer: {{kind: plain}}
tasks: {{source: python, path: '{HERE}/tiny_task.py:sums', holdout: 8, reward: '{HERE}/tiny_task.py:even_digits'}}
draw: {{max_tokens: 6, temperature: 1.3}}
engine: {{pack_tokens: 128}}
evaluate: {{attempts: 2, solved_at: 0.5}}
"""
SAME = (
    f"{{fresh: {MODEL}, tokenizer: '{HERE}/tiny_task.py:tokenizer'}}"  # drawn by the recipe's seed, as the student is
)
SHARP = SAME.replace("model_type: qwen3", "model_type: qwen3, initializer_range: 0.3")
STEPS = "steps: 12, tasks_per_step: 16, schedule: {lr: 1e-2}"


def run(folder: Path, loop: str, *overrides: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    path = folder / "tiny.yaml"
    path.write_text(RECIPE + loop + "\n")
    runner.train(load_recipe(path, [f"run.folder={folder}/run", *overrides]), path, resume=False)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def distill(*teachers: str, objective: str = "{}", more: str = STEPS) -> str:
    return f"distill: {{teachers: [{', '.join(teachers)}], objective: {objective}, {more}}}"


@pytest.mark.parametrize(
    "objective",
    [
        "{kind: forward_kl}",
        "{kind: forward_kl, top_k: 8, tail: renormalised}",
        "{kind: reverse_kl, top_k: 4}",
        "{kind: jensen_shannon, beta: 0.3}",
        "{kind: reward, discount: 0.5}",
    ],
)
def test_the_student_comes_nearer_to_its_teacher(tmp_path: Path, objective: str) -> None:
    rows = run(tmp_path, distill(f"{{model: {SHARP}}}", objective=objective))
    apart = [row["distill/divergence"] for row in rows]
    assert sum(apart[-3:]) / 3 < 0.75 * apart[0], apart
    assert all(row["sampler/gap_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize("objective", ["{kind: forward_kl}", "{kind: reverse_kl, top_k: 4}", "{kind: reward}"])
def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path: Path, objective: str) -> None:
    """At the temperature of the attempts, for both; the same weights differ by rounding at most."""
    (row,) = run(tmp_path, distill(f"{{model: {SAME}}}", objective=objective, more="steps: 1, tasks_per_step: 8"))
    assert abs(row["distill/divergence"]) < 1e-5
    assert row["optim/grad_norm"] < 1e-3


def test_each_teacher_teaches_its_tasks(tmp_path: Path) -> None:
    """With the student's copy for the sum 5, the sharp one's weight is 0 there: less is left to learn than alone."""
    more = "steps: 1, tasks_per_step: 92"
    teachers = (f"{{model: {SHARP}}}", f"{{model: {SAME}, weight: 1e6, teaches: {{answer: '5'}}}}")
    (tmp_path / "both").mkdir()
    (tmp_path / "one").mkdir()
    (both,) = run(tmp_path / "both", distill(*teachers, more=more), "draw.max_tokens=1", "tasks.holdout=0")
    (one,) = run(tmp_path / "one", distill(teachers[0], more=more), "draw.max_tokens=1", "tasks.holdout=0")
    share = both["distill/divergence"] / one["distill/divergence"]
    assert 1 - 12 / 92 < share < 1 - 2 / 92, share  # 6 of 100 sums are 5


def test_a_task_without_a_teacher_and_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no teacher"):
        run(tmp_path, distill(f"{{model: {SAME}, teaches: {{answer: '5'}}}}"))
    other = tmp_path / "other.py"
    other.write_text((HERE / "tiny_task.py").read_text().replace("0123456789+=?", "1023456789+=?"))
    (tmp_path / "run").rename(tmp_path / "before")
    with pytest.raises(ConfigError, match=r"distill.teachers.0.model has another tokenizer"):
        run(tmp_path, distill(f"{{model: {SAME.replace(str(HERE / 'tiny_task.py'), str(other))}}}"))


def test_every_turn_is_taught(tmp_path: Path) -> None:
    two = (f"tasks.env={HERE}/tiny_task.py:Again", "tasks.max_turns=2")
    (row,) = run(tmp_path, distill(f"{{model: {SHARP}}}", more="steps: 1, tasks_per_step: 8, group_size: 2"), *two)
    assert row["sampler/gap_max"] < 1e-4 and row["distill/divergence"] > 0.1


def test_imitating_the_best_attempts_raises_the_reward(tmp_path: Path) -> None:
    loop = "best_of_n: {steps: 15, tasks_per_step: 16, group_size: 4, min_reward: 0.5, schedule: {lr: 1e-2}}"
    rows = run(tmp_path, loop)
    reward = [row["reward/mean"] for row in rows]
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.2
    assert all(
        0 < row["best_of_n/kept"] <= 0.25 and row["best_of_n/kept"] <= row["best_of_n/solved_tasks"] for row in rows
    )
    assert rows[-1]["loss/nll"] < rows[0]["loss/nll"]


def test_a_step_in_which_nothing_is_good_enough_ends_without_an_update(tmp_path: Path) -> None:
    """G12, for imitation."""
    rows = run(tmp_path, "best_of_n: {steps: 2, tasks_per_step: 4, group_size: 2, min_reward: 9}")
    assert [row["step"] for row in rows] == [1, 2] and all("optim/grad_norm" not in row for row in rows)
    assert all(row["best_of_n/kept"] == 0 and "loss/nll" not in row for row in rows)


@pytest.mark.parametrize("loop", [distill(f"{{model: {SAME}}}"), "best_of_n: {steps: 2}"])
def test_failing_rewards_stop_the_run(tmp_path: Path, loop: str) -> None:
    with pytest.raises(RolloutError, match="no score for"):
        run(tmp_path, loop, f"tasks.reward={HERE}/tiny_task.py:broken", "tasks.holdout=0")
