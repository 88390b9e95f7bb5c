"""Whole runs of tiny recipes: they learn, they resume after SIGKILL to the same metrics, and they say what went
wrong."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.errors import EngineError, RolloutError, StropError

HERE = Path(__file__).parent
RECIPE = f"""
seed: 3
threads: 1
model:
  fresh: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64, tie_word_embeddings: false}}
  tokenizer: {HERE}/tiny_task.py:tokenizer
renderer: {{kind: plain}}
tasks: {{source: python, path: {HERE}/tiny_task.py:sums, holdout: 8, reward: {HERE}/tiny_task.py:even_digits}}
draw: {{max_tokens: 6}}
engine: {{pack_tokens: 256}}
evaluate: {{every: 2, attempts: 2, solved_at: 0.5}}
grpo:
  {{steps: 5, tasks_per_step: 6, group_size: 4, updates_per_step: 2,
   kl: {{coefficient: 0.01, target: 1e-4, horizon: 99}},
   schedule: {{lr: 3e-3, kind: linear}}}}
run: {{save_every: 1}}
"""


def write(folder: Path, *overrides: str) -> tuple[Path, list[str]]:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE)
    return path, [f"run.folder={folder}/run", *overrides]


def run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    path, given = write(folder, *overrides)
    runner.train(load_recipe(path, given), path, resume=resume)
    return folder / "run"


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Metrics without what a clock or the machine decides."""
    clocks = ("time/", "memory/", "tokens/per_second", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(clocks) and "per_s" not in k} for row in rows(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("whole"))


def test_a_run_leaves_everything_behind(whole: Path) -> None:
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows(whole, "evaluations.jsonl")] == [0, 2, 4, 5]
    assert all(row["sampler/gap_max"] <= 1e-5 for row in rows(whole)), "sampler and trainer run the same model"
    assert all(math.isfinite(v) for row in rows(whole) for v in row.values() if isinstance(v, float))
    assert (whole / "report.html").is_file() and (whole / "recipe.yaml").is_file() and rows(whole, "samples.jsonl")
    again = load_recipe(whole / "recipe.yaml")
    assert again.model.fresh is not None and again.grpo is not None and again.grpo.steps == 5
    assert "kl/reference" in rows(whole)[1]


def test_the_exported_folder_is_a_model_for_everybody(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "export")
    tokenizer = AutoTokenizer.from_pretrained(whole / "export")
    ids = tokenizer("1+2=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 4, 15)


def test_the_same_seed_gives_the_same_metrics_and_another_does_not(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    assert numbers(run(tmp_path / "same")) == numbers(whole)
    assert numbers(run(tmp_path / "other", "seed=4")) != numbers(whole)


def start(folder: Path, *, resume: bool) -> subprocess.Popen[bytes]:
    path, overrides = write(folder)
    code = (
        "import sys, pathlib, torch; torch.set_num_threads(1)\n"
        "from strop import recipe; from strop.config.loader import load_recipe\n"
        "p = pathlib.Path(sys.argv[1]); recipe.train(load_recipe(p, sys.argv[3:]), p, resume=sys.argv[2] == '1')\n"
    )
    command = [sys.executable, "-c", code, str(path), str(int(resume)), *overrides]
    root = str(HERE.parents[2])
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_a_run_killed_anywhere_and_resumed_is_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    """D02, D05-D07: SIGKILL once in the first steps and once more later; the metrics are those of the whole run."""
    for at_least in (1, 3):
        process = start(tmp_path, resume=at_least > 1)
        file = tmp_path / "run" / "metrics.jsonl"
        for _ in range(6000):
            if process.poll() is not None or (file.exists() and file.read_text().count("\n") >= at_least):
                break
            time.sleep(0.01)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    end = start(tmp_path, resume=True)
    assert end.wait(timeout=300) == 0
    assert numbers(tmp_path / "run") == numbers(whole)
    kept = [{k: v for k, v in row.items() if k != "time"} for row in rows(tmp_path / "run", "evaluations.jsonl")]
    assert kept == [{k: v for k, v in row.items() if k != "time"} for row in rows(whole, "evaluations.jsonl")]


def test_supervised_then_by_reward(tmp_path: Path) -> None:
    """Two stages in one run; the second starts from what the first learned, and stops early when it is good enough."""
    folder = run(
        tmp_path,
        "sft.steps=8",
        "sft.tasks_per_step=16",
        "sft.schedule.lr=1e-2",
        "sft.stop_at_accuracy=0.0",
        "grpo.steps=2",
    )
    stages = [(row["stage"], row["step"]) for row in rows(folder)]
    assert stages == [("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2)], "stopped at the first evaluation"
    assert rows(folder)[1]["loss/nll"] < rows(folder)[0]["loss/nll"]


def test_reward_teaches(tmp_path: Path) -> None:
    often = ("grpo.steps=25", "grpo.tasks_per_step=16", "grpo.kl={}", "grpo.schedule.lr=1e-2")
    folder = run(tmp_path, *often, "evaluate.every=0", "run.save_every=0")
    reward = [row["reward/mean"] for row in rows(folder)]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.25


def test_an_environment_of_several_turns_trains_every_turn(tmp_path: Path) -> None:
    folder = run(
        tmp_path, f"tasks.env={HERE}/tiny_task.py:Again", "tasks.max_turns=2", "grpo.steps=1", "evaluate.attempts=1"
    )
    (row,) = rows(folder)
    assert row["sampler/gap_max"] <= 1e-5 and row["optim/skipped"] == 0


def test_uniform_rewards_end_the_step_without_an_update(tmp_path: Path) -> None:
    """G12: nothing to learn is not an error, and the step still publishes, records and saves."""
    folder = run(tmp_path, "tasks.reward=exact", "grpo.steps=2", "evaluate.every=0")
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert all("optim/grad_norm" not in row for row in rows(folder) if row["rollout/uniform_groups"] == 1.0)


def test_failing_rewards_stop_the_run_and_are_named(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no score for"):
        run(tmp_path, f"tasks.reward={HERE}/tiny_task.py:broken", "tasks.holdout=0")


def test_a_gap_between_sampler_and_trainer_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"max_gap"):
        run(tmp_path, "sampler.max_gap=1e-12")


def test_long_sequences_are_an_error_that_names_the_task_or_counted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(StropError, match=r"engine\.pack_tokens"):
        run(tmp_path / "a", "engine.pack_tokens=7")
    folder = run(tmp_path / "b", "engine.pack_tokens=7", "tasks.too_long=drop", "grpo.steps=1")
    assert rows(folder)[0]["data/dropped"] > 0


def test_skipped_steps_in_a_row_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.algos.losses import ClippedSurrogate

    honest = ClippedSurrogate.__call__
    monkeypatch.setattr(
        ClippedSurrogate, "__call__", lambda self, *args: (honest(self, *args)[0] * math.inf, honest(self, *args)[1])
    )
    with pytest.raises(EngineError, match="in a row"):
        run(tmp_path, "grpo.steps=5")
