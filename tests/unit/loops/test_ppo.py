"""Whole PPO runs of a tiny recipe: policy and critic learn, and both come back from a kill as they were."""

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
from safetensors.torch import load_file

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.errors import ConfigError, EngineError
from strop.models.heads import make_value_model
from tests.tiny_models import tiny_module

HERE = Path(__file__).parent
RECIPE = f"""
seed: 3
threads: 1
model:
  fresh: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64, tie_word_embeddings: false}}
  tokenizer: {HERE}/tiny_task.py:tokenizer
  kernels: torch
renderer: {{kind: plain}}
tasks: {{source: python, path: {HERE}/tiny_task.py:sums, holdout: 8, reward: {HERE}/tiny_task.py:even_digits}}
draw: {{max_tokens: 6}}
engine: {{pack_tokens: 256}}
evaluate: {{every: 2, attempts: 2, solved_at: 0.5}}
ppo:
  {{steps: 5, tasks_per_step: 12, group_size: 2, updates_per_step: 2, epochs: 2, bootstrap_truncated: true,
   kl: {{coefficient: 0.01, place: reward, estimator: k1, target: 0.001, horizon: 100}},
   schedule: {{lr: 3e-3, kind: linear}}, critic: {{schedule: {{lr: 3e-3}}, warmup_steps: 1}}}}
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


def test_a_run_says_how_policy_and_critic_fare(whole: Path) -> None:
    first, *later = rows(whole)
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4, 5]
    assert "optim/grad_norm" not in first and "policy/ratio_mean" not in first, "only the critic learns while it warms"
    assert first["value/explained_variance"] == pytest.approx(0.0, abs=1e-6), "a head of zeros explains nothing"
    assert first["critic/grad_norm"] > 0 and first["critic/lr"] == 3e-3
    for row in later:
        assert row["sampler/gap_max"] <= 1e-5, "sampler and trainer run the same model"
        assert row["advantage/std"] > 0 and row["critic/skipped"] == 0 and row["optim/skipped"] == 0
        assert "kl/reference" in row and row["kl/coefficient"] > 0
    assert len({row["kl/coefficient"] for row in later}) > 1, "the coefficient is led"
    assert [row["optim/lr"] for row in later] == sorted((row["optim/lr"] for row in later), reverse=True)
    assert all(math.isfinite(v) for row in rows(whole) for v in row.values() if isinstance(v, float))


def test_a_checkpoint_holds_both_engines_and_an_export_the_policy(whole: Path) -> None:
    newest = sorted((whole / "checkpoints").iterdir())[-1]
    listed = json.loads((newest / "manifest.json").read_text())["files"]
    assert {"engine/model.safetensors", "engine/critic/model.safetensors", "engine/critic/optimizer.safetensors"} <= {
        *listed
    }
    critic = load_file(newest / "engine" / "critic" / "model.safetensors")
    assert critic["score.weight"].any() and "lm_head.weight" not in critic
    assert "score.weight" not in load_file(newest / "engine" / "model.safetensors")
    assert "score.weight" not in load_file(whole / "export" / "model.safetensors")


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


def test_a_run_killed_and_resumed_is_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    """D02, D05-D07 with two engines: SIGKILL, and the metrics are those of the whole run."""
    process = start(tmp_path, resume=False)
    file = tmp_path / "run" / "metrics.jsonl"
    for _ in range(12000):
        if process.poll() is not None or (file.exists() and file.read_text().count("\n") >= 2):
            break
        time.sleep(0.01)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = start(tmp_path, resume=True)
    assert end.wait(timeout=300) == 0
    assert numbers(tmp_path / "run") == numbers(whole)
    a, b = (
        load_file(sorted((r / "checkpoints").iterdir())[-1] / "engine/critic/model.safetensors")
        for r in (whole, tmp_path / "run")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


RATES = ("ppo.schedule.lr=1e-2", "ppo.bootstrap_truncated=false", "ppo.kl={coefficient: 0}", "ppo.steps=14")
QUIET = ("evaluate.every=0", "run.save_every=0")


def test_reward_teaches(tmp_path: Path) -> None:
    critic = "ppo.critic={schedule: {lr: 1e-2}, warmup_steps: 1}"
    reward = [row["reward/mean"] for row in rows(run(tmp_path, *RATES, *QUIET, "ppo.tasks_per_step=16", critic))]
    assert sum(reward[-4:]) / 4 > reward[0] + 0.25


def test_the_critic_comes_to_know_what_to_expect(tmp_path: Path) -> None:
    """The policy stays as it is, so that there is something to know."""
    critic = "ppo.critic={schedule: {lr: 1e-2}, warmup_steps: 13}"
    folder = run(tmp_path, *RATES, *QUIET, "ppo.tasks_per_step=48", critic)
    explained = [row["value/explained_variance"] for row in rows(folder)]
    assert max(explained[:3]) < 0.05 and max(explained[-4:]) > 0.1
    assert sum("policy/entropy" in row for row in rows(folder)) == 1, "one step of the policy"


def test_a_critic_of_its_own_is_loaded_with_its_head(tmp_path: Path) -> None:
    """Its first values are those of its folder; a folder without a head is an error that names the weights."""
    torch.manual_seed(5)
    module = tiny_module("qwen3")
    head = torch.nn.Linear(32, 1)
    torch.nn.init.constant_(head.weight, 0.0)
    torch.nn.init.constant_(head.bias, 7.0)
    make_value_model(module, head)
    folder = tmp_path / "critic"
    module.save_pretrained(folder)
    own = [f"ppo.critic.model={{path: {folder}, tokenizer: {HERE}/tiny_task.py:tokenizer}}", "ppo.critic.head=loaded"]
    brief = ["ppo.steps=2", "ppo.tasks_per_step=4", "ppo.critic.clip=null", "evaluate.every=0"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    row = rows(run(tmp_path / "a", *own, *brief))[0]
    assert 6.5 < row["value/mean"] < 7.5, "far too hopeful, as its folder says"
    bare = tiny_module("qwen3")
    bare.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"missing score\.weight"):
        run(tmp_path / "b", *own, *brief)


def test_everything_that_scores_can_be_combined(tmp_path: Path) -> None:
    """Decoupled ratios, corrections, rejections, selections and a divergence in the loss, with a critic."""
    (row, *_) = rows(
        run(
            tmp_path,
            "ppo.steps=2",
            "ppo.critic.warmup_steps=0",
            "ppo.kl={coefficient: 0.01, place: loss, estimator: k3}",
            "ppo.ratio_to=trainer",
            "ppo.correction={level: token}",
            "ppo.reject={divergence: k2, level: token, stay_counted: false}",
            "ppo.top_entropy=0.5",
            "ppo.whiten=false",
            "evaluate.every=0",
        )
    )
    assert row["optim/skipped"] == 0 and row["sampler/gap_max"] <= 1e-5 and "kl/reference" in row


def test_under_an_adapter_the_critic_is_trained_whole(tmp_path: Path) -> None:
    """It begins as the policy is, its adapter merged, and comes back from a checkpoint beside it."""
    brief = ("engine.adapter.rank=4", "ppo.steps=2", "ppo.tasks_per_step=4", "evaluate.every=0")
    folder = run(tmp_path, *brief)
    engine = sorted((folder / "checkpoints").iterdir())[-1] / "engine"
    assert (engine / "adapter_model.safetensors").is_file() and (engine / "critic" / "model.safetensors").is_file()
    assert [row["critic/skipped"] for row in rows(folder)] == [0, 0]


def test_skipped_steps_of_the_critic_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.algos.value_losses import ClippedValue

    honest = ClippedValue.__call__
    monkeypatch.setattr(
        ClippedValue, "__call__", lambda self, *args: (honest(self, *args)[0] * math.inf, honest(self, *args)[1])
    )
    with pytest.raises(EngineError, match="in a row"):
        run(tmp_path)


def test_a_head_to_load_needs_a_folder_and_a_warm_up_an_end(tmp_path: Path) -> None:
    for override, says in (("ppo.critic.head=loaded", r"critic\.model"), ("ppo.critic.warmup_steps=5", "leaves none")):
        path, given = write(tmp_path, override)
        with pytest.raises(ConfigError, match=says):
            load_recipe(path, given)
