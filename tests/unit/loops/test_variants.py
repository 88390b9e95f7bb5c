"""Every variant of the GRPO loop really runs: two steps of a tiny recipe, with what the variant alone must show."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from strop import parts as parts_module
from strop import recipe as runner
from strop.algos.choice import policy_loss
from strop.algos.losses import PolicyLoss
from strop.config.loader import load_recipe
from strop.config.policy import AdvantageConfig, GRPOConfig, PolicyLossConfig
from strop.config.recipe import SamplerConfig
from strop.models.attention import PackedAttention
from strop.models.loading import LanguageModel, load_model
from strop.models.lora import import_adapter
from strop.parts import build_parts
from strop.rollout.base import Sampler
from strop.rollout.build import build_sampler
from strop.stages import run_loops
from strop.track.run import Run
from strop.types import Layout
from tests.unit.loops.test_recipe import RECIPE


def play(folder: Path, grpo: dict[str, Any], steps: int = 2) -> list[dict[str, Any]]:
    """The metrics of a run with these settings of the loop."""
    path = folder / "tiny.yaml"
    path.write_text(RECIPE)
    grpo = {"steps": steps, "tasks_per_step": 4, "group_size": 4, "schedule": {"lr": 1e-2}} | grpo
    recipe = load_recipe(
        path, [f"grpo={json.dumps(grpo)}", f"run.folder={folder}/run", "tasks.holdout=0", "evaluate.every=0"]
    )
    torch.set_num_threads(1)
    parts = build_parts(recipe, folder)
    with parts.ends, Run.start(folder / "run", recipe, decode=parts.decode) as run:
        asyncio.run(run_loops(parts, run))
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


NEEDS: dict[str, dict[str, Any]] = {
    "gdpo": {"weights": {"even": 1.0, "short": 0.5}},
    "pass_at_k": {"k": 2, "solved_at": 0.5},
    "reinforce_plus_plus": {"discount": 0.9},
}
OTHERS: dict[str, dict[str, Any]] = {
    "remax": {"drop_uniform_groups": False},
    "reinforce_plus_plus": {"drop_uniform_groups": False},
}


@pytest.mark.parametrize("kind", [kind for kind in AdvantageConfig.KNOBS if kind != "gdpo"])
def test_every_advantage(tmp_path: Path, kind: str) -> None:
    metrics = play(tmp_path, {"advantage": {"kind": kind} | NEEDS.get(kind, {})} | OTHERS.get(kind, {}))
    assert len(metrics) == 2
    assert metrics[0]["optim/grad_norm"] > 0
    assert all(row["sampler/gap_max"] <= 1e-5 for row in metrics)


@pytest.mark.parametrize("kind", list(PolicyLossConfig.KNOBS))
def test_every_loss(tmp_path: Path, kind: str) -> None:
    wide = {"covariance_low": -9.0, "covariance_high": 9.0, "fraction": 0.1} if kind == "clip_cov" else {}
    metrics = play(tmp_path, {"loss": {"kind": kind} | wide, "updates_per_step": 2, "epochs": 2})
    assert len(metrics) == 2
    assert metrics[0]["optim/grad_norm"] > 0
    assert metrics[1]["policy/ratio_mean"] == pytest.approx(1.0, abs=0.2)
    assert metrics[1]["policy/gap_max"] > 1e-3, "the second epoch learns from attempts of an older policy"
    if kind in ("clip_cov", "kl_cov"):
        assert 0 < metrics[0]["policy/selected_fraction"] < 0.5


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"ratio_to": "trainer", "correction": {"level": "token"}}, "correction/weight_mean"),
        (
            {"ratio_to": "trainer", "correction": {"level": "sequence_mean", "outside": "zero"}},
            "correction/weight_mean",
        ),
        ({"reject": {"divergence": "k3", "high": 0.01}}, "correction/rejected_fraction"),
        (
            {"reject": {"divergence": "k2", "level": "sequence_max", "stay_counted": False}},
            "correction/rejected_fraction",
        ),
        ({"top_entropy": 0.5}, "policy/entropy"),
        ({"entropy_coefficient": 0.01}, "policy/entropy"),
        ({"refills": 2}, "data/dropped_groups"),
        ({"weighting": "token_sum", "schedule": {"lr": 1e-4}}, "optim/grad_norm"),
        ({"length": {"overlong_buffer": 3}}, "reward/mean"),
        ({"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}}, "kl/reference"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1_straight_through"}}, "kl/reference"),
    ],
)
def test_every_setting(tmp_path: Path, settings: dict[str, Any], shown: str) -> None:
    metrics = play(tmp_path, settings)
    assert len(metrics) == 2
    assert all(shown in row for row in metrics)


def test_a_divergence_is_led_to_its_target(tmp_path: Path) -> None:
    """The coefficient rises while the divergence is above its target: 1.2 times a step at the most, at this horizon."""
    kl = {"coefficient": 0.1, "target": 1e-9, "horizon": 16, "estimator": "k2"}
    metrics = play(tmp_path, {"kl": kl, "drop_uniform_groups": False}, steps=3)
    assert [row["kl/coefficient"] for row in metrics] == pytest.approx([0.1, 0.08, 0.096], rel=1e-6)


def test_a_loss_has_the_knobs_of_its_recipe() -> None:
    for kind, knobs in PolicyLossConfig.KNOBS.items():
        cfg = GRPOConfig.model_validate(
            {
                "loss": {"kind": kind},
                "kl": {"coefficient": 0.5},
                "entropy_coefficient": 0.25,
                "router": {"balance_coefficient": 0.125, "z_coefficient": 0.0625},
            }
        )
        loss = policy_loss(cfg, 0.5)
        assert isinstance(loss, PolicyLoss)
        assert (loss.kl_coefficient, loss.kl_estimator, loss.entropy_coefficient) == (0.5, "k3", 0.25)
        assert (loss.balance_coefficient, loss.z_coefficient) == (0.125, 0.0625)
        of_selection = {"fraction", "covariance_low", "covariance_high"}
        given = {name: value for name, value in knobs.items() if name not in of_selection}
        fields = set(type(loss).__dataclass_fields__) - {"kl_coefficient", "kl_estimator", "entropy_coefficient"}
        fields -= {"per_row", "balance_coefficient", "z_coefficient"}
        assert fields == set(given)
        assert {name: getattr(loss, name) for name in fields} == given
    in_reward = GRPOConfig.model_validate({"kl": {"coefficient": 0.5, "place": "reward"}})
    assert policy_loss(in_reward, 0.5).kl_coefficient == 0.0


def test_an_adapter_learns_and_is_exported_both_ways(tmp_path: Path) -> None:
    """Trainer, sampler and reference share one model; two stages, so that the second's reference is an adapter too."""
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    changed = [
        "engine.adapter={rank: 4, targets: [attention, mlp, unembedding]}",
        "sft={steps: 3, tasks_per_step: 8, schedule: {lr: 1e-2}}",
        "grpo={steps: 3, tasks_per_step: 4, group_size: 4, schedule: {lr: 1e-2}, kl: {coefficient: 0.01}}",
        f"run.folder={tmp_path}/run",
    ]
    runner.train(load_recipe(path, changed), path, resume=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    grpo = [row for row in rows if row["stage"] == "grpo"]
    assert all(row["sampler/gap_max"] <= 1e-5 for row in grpo)
    assert grpo[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6), "the stage begins where its reference stands"
    assert grpo[-1]["kl/reference"] > 1e-6
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    base = load_model(load_recipe(path).model, vocab_size=15, seed=3)
    adapted = import_adapter(base, "a", tmp_path / "run" / "export" / "adapter")
    ids = torch.tensor([3, 4, 5, 6])
    with torch.no_grad(), adapted.on():
        ours = base.logits(base.hidden(ids, torch.arange(4), PackedAttention(Layout((4,)), base.impl)))
        assert torch.allclose(merged(ids[None]).logits[0], ours, atol=1e-4)


def build_another_sampler(config: SamplerConfig, model: LanguageModel, decode: Any, adapter: Any = None) -> Sampler:
    """Of this process, where the recipe names a sampler that takes whole models."""
    assert adapter is None or config.kind == "builtin"
    return build_sampler(config.model_copy(update={"kind": "builtin"}), model, decode, adapter)


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (1, True), (2, True)])
def test_a_sampler_that_takes_whole_models_is_sent_the_adapter_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, tied: bool
) -> None:
    """And the run is that with a sampler over the trainer's own model, a tied output matrix that alone is adapted
    included."""
    monkeypatch.setattr(parts_module, "build_sampler", build_another_sampler)
    found: list[list[dict[str, Any]]] = []
    for kind in ("builtin", "vllm"):
        folder = tmp_path / kind
        folder.mkdir()
        path = folder / "tiny.yaml"
        path.write_text(RECIPE.replace("tie_word_embeddings: false", f"tie_word_embeddings: {str(tied).lower()}"))
        changed = [
            GRPO,
            "engine.adapter={rank: 4, targets: [attention, mlp, unembedding]}",
            f"engine.parallel.data={ranks}",
            f"sampler.kind={kind}",
            *(["sampler.vllm={python: p}"] if kind == "vllm" else []),
            f"run.folder={folder}/run",
        ]
        runner.train(load_recipe(path, changed), path, resume=False)
        found.append([json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()])
    for shared, merged in zip(*found, strict=True):
        assert merged["sampler/gap_max"] <= 1e-5
        for name in ("reward/mean", "optim/grad_norm", "kl/reference", "policy/entropy"):
            assert merged[name] == pytest.approx(shared[name], rel=1e-2, abs=1e-5)
    assert found[1][-1]["kl/reference"] > 1e-7, "the adapter has moved"


def test_an_adapter_may_be_drawn_from_in_a_coarser_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "build_sampler", build_another_sampler)
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    sampler = ["sampler.kind=vllm", "sampler.vllm={python: p}", "sampler.dtype=bfloat16", "sampler.max_gap=9"]
    changed = [GRPO, "engine.adapter.rank=4", *sampler, f"run.folder={tmp_path}/run"]
    runner.train(load_recipe(path, changed), path, resume=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(1e-5 < row["sampler/gap_max"] < 0.5 for row in rows)


GRPO = "grpo={steps: 3, tasks_per_step: 4, group_size: 4, schedule: {lr: 1e-3}, kl: {coefficient: 0.01}}"
PPO = "ppo={steps: 3, tasks_per_step: 8, schedule: {lr: 1e-3}, critic: {schedule: {lr: 1e-3}}}"


@pytest.mark.parametrize(
    "loop",
    [
        [GRPO],
        [GRPO, "engine.adapter={rank: 4, targets: [attention, mlp, unembedding]}"],
        ["grpo=null", PPO],
    ],
    ids=["whole", "adapter", "ppo"],
)
def test_ranks_learn_what_one_process_learns(tmp_path: Path, loop: list[str]) -> None:
    """Two ranks, a sampler here, a reference or a critic over ranks of its own; saved, exported, measured as ever."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, ranks in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "tiny.yaml"
        path.write_text(RECIPE)
        changed = [*loop, f"engine.parallel.data={ranks}", f"run.folder={folder}/run"]
        runner.train(load_recipe(path, changed), path, resume=False)
        found[name] = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for one, two in zip(found["one"], found["two"], strict=True):
        assert two["sampler/gap_max"] <= 1e-5
        names = {"reward/mean", "optim/grad_norm", "kl/reference", "policy/entropy", "critic/grad_norm", "value/loss"}
        shown = sorted(names & one.keys())
        assert len(shown) >= 4
        for name in shown:
            assert two[name] == pytest.approx(one[name], rel=1e-2, abs=1e-5)
    exported = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "run" / "export") for name in ("one", "two")]
    for a, b in zip(exported[0].parameters(), exported[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3)
