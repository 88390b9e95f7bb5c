"""Whole runs of a tiny mixture of experts with `off`, `recompute` and `rollout`, and what the scoring pass does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from strop import recipe as runner
from strop.algos.choice import policy_loss
from strop.config.loader import load_recipe
from strop.config.policy import GRPOConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch, pack_policy
from strop.engines.base import Engine
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import ConfigError, EngineError
from strop.loops.score import score
from strop.plan import plan
from strop.track.run import Run
from strop.types import Completion, Group, Outputs, Routes, Segment, Stop, Trajectory, Want
from tests.tiny_models import tiny_model

HERE = Path(__file__).parent
RECIPE = f"""
seed: 3
threads: 1
model:
  fresh: {{model_type: qwen3_moe, hidden_size: 32, intermediate_size: 32, moe_intermediate_size: 16, num_experts: 4,
           num_experts_per_tok: 2, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
           max_position_embeddings: 64, tie_word_embeddings: false}}
  tokenizer: {HERE}/tiny_task.py:tokenizer
  kernels: torch
renderer: {{kind: plain}}
tasks: {{source: python, path: {HERE}/tiny_task.py:sums, reward: {HERE}/tiny_task.py:even_digits}}
draw: {{max_tokens: 6}}
engine: {{pack_tokens: 256}}
evaluate: {{every: 0}}
"""
DENSE = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
LOOPS: dict[str, dict[str, Any]] = {
    "grpo": {"steps": 2, "tasks_per_step": 4, "group_size": 4, "updates_per_step": 2},
    "ppo": {"steps": 2, "tasks_per_step": 8, "group_size": 1, "epochs": 2},
}


def run(folder: Path, loop: str, *overrides: str, **fields: Any) -> list[dict[str, Any]]:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE)
    declared = json.dumps(LOOPS[loop] | {"schedule": {"lr": 1e-2}} | fields)
    runner.train(load_recipe(path, [f"{loop}={declared}", f"run.folder={folder}/run", *overrides]), path, resume=False)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("mode", ["off", "recompute", "rollout"])
def test_a_run_in_every_mode(tmp_path: Path, loop: str, mode: str) -> None:
    fields = {"ratio_to": "trainer"} if mode == "recompute" else {}
    rows = run(tmp_path, loop, router_replay=mode, kl={"coefficient": 0.01}, router={"measure_every": 2}, **fields)
    assert len(rows) == 2 and all(row["optim/grad_norm"] > 0 for row in rows)
    assert all(row["sampler/gap_max"] <= 1e-5 for row in rows)
    assert "router/load_max" not in rows[0] and {"router/load_max", "router/load_mean/layer_1"} <= set(rows[1])
    assert ("router/unreplayed_kl" in rows[1]) is (mode != "off")
    if mode == "off":
        assert "router/replayed" not in rows[0]
    elif mode == "recompute":
        assert all(row["router/replayed"] == 1.0 for row in rows)
    else:  # all but the last token of every attempt
        assert all(0.6 < row["router/replayed"] < 1.0 for row in rows)
    (load,) = [json.loads(line) for line in (tmp_path / "run" / "experts.jsonl").read_text().splitlines()]
    assert (load["stage"], load["step"], load["layers"]) == (loop, 2, [0, 1])
    counts = np.array(load["counts"])
    assert counts.shape == (2, 4) and counts[0].sum() == counts[1].sum() > 0


def test_turns_that_observe(tmp_path: Path) -> None:
    """Tokens that an environment appended are routed when the next turn reads them."""
    again = [f"tasks.env={HERE}/tiny_task.py:Again", "tasks.max_turns=2"]
    (row, _) = run(tmp_path, "grpo", *again, router_replay="rollout")
    assert 0.8 < row["router/replayed"] < 1.0 and row["sampler/gap_max"] <= 1e-5


def test_a_sampler_in_another_format_is_followed_where_it_chose_otherwise(tmp_path: Path) -> None:
    """A real mismatch: the sampler draws in bfloat16, the trainer learns in float32."""
    rows = run(
        tmp_path, "grpo", "sampler.dtype=bfloat16", "sampler.max_gap=9",
        router_replay="rollout", router={"measure_every": 1}, tasks_per_step=32,
    )  # fmt: skip
    assert all(row["sampler/gap_max"] > 1e-5 and row["router/replayed"] > 0.6 for row in rows)
    assert sum(row["router/disagreement"] for row in rows) > 0
    path = tmp_path / "tiny.yaml"
    with pytest.raises(ConfigError, match=r"sampler\.dtype is bfloat16, but under engine\.adapter"):
        plan(load_recipe(path, ["grpo={}", "sampler.dtype=bfloat16", "engine.adapter.rank=4"]), path)


def test_terms_for_even_load(tmp_path: Path) -> None:
    rows = run(tmp_path, "grpo", router={"balance_coefficient": 0.1, "z_coefficient": 0.01})
    assert all(0.9 < row["router/balance"] < 2.0 and row["router/z"] > 0 for row in rows)


def test_what_cannot_be_recorded_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_replay recompute keeps .* set ratio_to trainer"):
        run(tmp_path, "grpo", router_replay="recompute")
    path = tmp_path / "tiny.yaml"
    for fields in ({"router_replay": "rollout"}, {"router": {"measure_every": 5}}):
        recipe = load_recipe(
            path, [f"grpo={json.dumps(fields)}", f"model.fresh={json.dumps(DENSE)}", f"run.folder={tmp_path}/plan"]
        )
        with pytest.raises(ConfigError, match=r"finds no routers that it knows in Qwen3ForCausalLM"):
            plan(recipe, path)
    recipe = load_recipe(path, [f"grpo={json.dumps({'router_replay': 'rollout'})}", f"run.folder={tmp_path}/plan"])
    assert "qwen3_moe" in str(plan(recipe, path))
    spread = load_recipe(path, ["grpo.router_replay=rollout", "engine.parallel.sequence=2", "run.folder=plan"])
    assert "qwen3_moe" in str(plan(spread, path))


@dataclass
class Spy:
    """An engine that notes what it is given and wanted of."""

    inner: Fsdp2Engine
    given: list[Batch[Any]] = field(default_factory=list[Batch[Any]])
    wanted: list[Want] = field(default_factory=list[Want])

    async def forward(self, batches: list[Batch[Any]], want: Want = Want()) -> list[Outputs]:  # noqa: B008
        self.given += batches
        self.wanted.append(want)
        return await self.inner.forward(batches, want)


def attempt(seed: int, *, routes: bool) -> Trajectory:
    rng = np.random.default_rng(seed)
    segment, count = Segment(), 5
    segment.observe(np.arange(3, 7, dtype=np.int32))
    chosen = rng.permuted(np.tile(np.arange(4), (4 + count, 2, 1)), axis=-1)[..., :2].astype(np.int16)
    chosen[-1] = -1
    segment.act(
        Completion(
            tokens=rng.integers(3, 96, count).astype(np.int32),
            logprobs=np.full(count, -4.0, np.float32),
            sampling_logprobs=np.full(count, -4.0, np.float32),
            versions=np.zeros(count, np.int32),
            stop=Stop.LENGTH,
            routes=Routes((0, 1), chosen) if routes else None,
        )
    )
    return Trajectory(segments=[segment])


def update(*, routes: bool, max_tokens: int = 64):
    groups = [Group(str(p), [attempt(2 * p + g, routes=routes) for g in range(2)]) for p in range(3)]
    return pack_policy(
        groups,
        np.random.default_rng(0).normal(size=(3, 2)),
        max_tokens=max_tokens,
        weighting="token_mean",
        horizon=None,
        temperature=1.0,
        share_prefixes=True,
        data_parallel=1,
    )


def scored(cfg: dict[str, Any], *, routes: bool, max_tokens: int = 64):
    policy = Spy(Fsdp2Engine(tiny_model("qwen3_moe"), EngineConfig()))
    reference = Spy(Fsdp2Engine(tiny_model("qwen3_moe", seed=1), EngineConfig(), trainable=False))
    found = asyncio.run(
        score(
            GRPOConfig.model_validate(cfg),
            [update(routes=routes, max_tokens=max_tokens)],
            engine=cast(Engine, policy),
            reference=cast(Engine, reference),
            run=cast(Run, SimpleNamespace(step=0)),
        )
    )
    return policy, reference, found[0].packed.batches


def test_the_reference_chooses_for_itself_and_overwrites_nothing() -> None:
    """The policy's routes are those of its own pass, whatever pass comes before or after it."""
    policy, reference, batches = scored({"router_replay": "recompute", "ratio_to": "trainer"}, routes=False)
    assert all(batch.routes is None for batch in (*reference.given, *policy.given))
    assert [want.routes for want in (*reference.wanted, *policy.wanted)] == [False, True]
    own = asyncio.run(policy.inner.forward(policy.given, Want(routes=True)))
    for batch, output in zip(batches, own, strict=True):
        assert batch.routes is not None and output.routes is not None
        assert np.array_equal(batch.routes.experts_TLK, output.routes.experts_TLK)
        assert batch.inputs.reference_logprobs_T is not None and batch.inputs.proximal_logprobs_T is not None


def test_the_samplers_routes_are_replayed_by_the_policy_alone() -> None:
    policy, reference, batches = scored({"router_replay": "rollout", "ratio_to": "trainer"}, routes=True)
    assert all(batch.routes is None for batch in reference.given)
    assert all(batch.routes is not None for batch in (*policy.given, *batches))
    with pytest.raises(EngineError, match="the sampler returned no routes"):
        scored({"router_replay": "rollout"}, routes=False)


def test_terms_do_not_depend_on_how_an_update_is_cut() -> None:
    """H11: the fractions are of the whole update, and weights do the mean: two batches or five, one gradient."""
    cfg = {"router": {"balance_coefficient": 0.7, "z_coefficient": 0.1}}
    gradients: list[dict[str, torch.Tensor]] = []
    for max_tokens in (64, 10):
        policy, _, batches = scored(cfg, routes=False, max_tokens=max_tokens)
        fractions = batches[0].inputs.expert_fractions_LE
        assert fractions is not None and torch.allclose(fractions.sum(1), torch.ones(2))
        asyncio.run(policy.inner.forward_backward(batches, policy_loss(GRPOConfig.model_validate(cfg), 0.0)))
        named = policy.inner.model.module.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.grad is not None})
    one, many = gradients
    scale = max(float(gradient.abs().max()) for gradient in one.values())
    for name, gradient in one.items():
        assert float((gradient - many[name]).abs().max()) <= 2e-5 * scale, name
