"""What verl's own functions give: python -m benchmarks.peers.verl_algos BATCHES.json RESULTS.json

It runs in an environment of its own, with verl==0.9.1. For each batch that `benchmarks.algos_parity` wrote it notes, by
name, a value, and for losses the gradient by the logprobs (or values). Everything is float64 where verl allows it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import (  # pyright: ignore[reportMissingImports]
    compute_forward_kl_topk,
)
from verl.trainer.ppo import core_algos, rollout_corr_helper  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

Result = dict[str, Any]


def advantages(b: dict[str, Any]) -> dict[str, Result]:
    config = OmegaConf.create(
        {
            "gamma": b["discount"],
            "norm_adv_by_std_in_grpo": True,
            "gdpo_reward_keys": ["r0", "r1"],
            "gdpo_reward_weights": b["reward_weights"],
        }
    )
    pairs = {"token_level_rewards": b["token_rewards"], "response_mask": b["mask"], "index": b["uid"], "config": config}
    token = {"old_log_probs": b["old"], "sum_pi_squared": b["square_sums"]}
    # A prompt of one token, and attention up to verl's place for an outcome's reward: the last token of the row.
    rows, columns = b["mask"].shape
    whole = {"prompts": torch.zeros(rows, 1), "attention_mask": torch.ones(rows, columns + 1, dtype=torch.long)}
    parts = {f"r{k}": np.asarray(b["reward_parts"][k]) for k in range(2)}
    grouped = np.isin(b["uid"], [u for u in set(b["uid"].tolist()) if (b["uid"] == u).sum() > 1])
    several = {**pairs, "token_level_rewards": b["token_rewards"][grouped], "response_mask": b["mask"][grouped]}
    found: dict[str, tuple[Tensor, Tensor]] = {
        "grpo": core_algos.compute_grpo_outcome_advantage(**pairs),
        "grpo without std": core_algos.compute_grpo_outcome_advantage(**pairs, norm_adv_by_std_in_grpo=False),
        "grpo_vectorized": core_algos.compute_grpo_vectorized_outcome_advantage(**pairs),
        "gdpo": core_algos.compute_gdpo_outcome_advantage(**pairs, non_tensor_batch=parts, batch=whole),
        "grpo_passk": core_algos.compute_grpo_passk_outcome_advantage(**{**several, "index": b["uid"][grouped]}),
        "rloo": core_algos.compute_rloo_outcome_advantage(**pairs),
        "rloo_vectorized": core_algos.compute_rloo_vectorized_outcome_advantage(**pairs),
        "opo": core_algos.compute_opo_outcome_advantage(**pairs),
        "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**pairs),
        "reinforce_plus_plus": core_algos.compute_reinforce_plus_plus_outcome_advantage(
            b["token_rewards"].clone(), b["mask"], config
        ),
        "remax": core_algos.compute_remax_outcome_advantage(b["token_rewards"], b["baselines"], b["mask"]),
        "gpg": core_algos.compute_gpg_outcome_advantage(**pairs),
        "gae": core_algos.compute_gae_advantage_return(
            b["token_rewards"], b["values"], b["mask"], b["discount"], b["trace"]
        ),
        "optimal_token_baseline": core_algos.compute_optimal_token_baseline_advantage(
            b["plain_rewards"], b["plain_mask"], b["uid"], **token
        ),
        "tir_optimal_token_baseline": core_algos.compute_multi_turn_optimal_token_baseline_advantage(
            b["token_rewards"], b["mask"], b["uid"], **token
        ),
    }
    results: dict[str, Result] = {f"advantages {name}": {"value": value.tolist()} for name, (value, _) in found.items()}
    results["advantages gae returns"] = {"value": found["gae"][1].tolist()}
    return results


def differentiated(at: Tensor, loss: Callable[[Tensor], Tensor]) -> Result:
    """A loss and its gradient."""
    at = at.clone().requires_grad_()
    value = loss(at)
    value.backward()
    assert at.grad is not None
    return {"value": value.item(), "gradient": at.grad.tolist()}


def policy_losses(b: dict[str, Any]) -> dict[str, Result]:
    actor: Any = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )

    def knobs(**values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(actor.policy_loss, name, value)

    def run(name: str, mode: str = "token-mean", weights: Tensor | None = None) -> Result:
        def loss(logprobs: Tensor) -> Tensor:
            return core_algos.get_policy_loss_fn(name)(
                old_log_prob=b["old"],
                log_prob=logprobs,
                advantages=b["advantages"],
                response_mask=b["mask"],
                loss_agg_mode=mode,
                config=actor,
                rollout_is_weights=weights,
            )[0]

        return differentiated(b["logprobs"], loss)

    # Every candidate is taken, so that nothing depends on the generator; KL-Cov takes the fifth with the largest.
    knobs(dro_beta=0.1, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    weights = torch.exp(b["old"] - b["rollout"]).clamp(max=1.2)
    results: dict[str, Result] = {name: run(name) for name in core_algos.POLICY_LOSS_REGISTRY if name != "bypass_mode"}
    results["vanilla seq-mean-token-mean"] = run("vanilla", "seq-mean-token-mean")
    results["gspo seq-mean-token-mean"] = run("gspo", "seq-mean-token-mean")
    results["vanilla decoupled"] = run("vanilla", weights=weights)
    correction = {"loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None}
    knobs(rollout_correction=OmegaConf.create(correction))
    results["bypass_mode ppo_clip"] = run("bypass_mode")
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_rs": None}
    knobs(rollout_correction=OmegaConf.create(correction))
    results["bypass_mode reinforce"] = run("bypass_mode")
    return {f"policy loss {name}": result for name, result in results.items()}


def rest(b: dict[str, Any]) -> dict[str, Result]:
    mask = b["mask"]
    results: dict[str, Result] = {}
    for name in ("k1", "abs", "k2", "k3", "k1+", "k3+", "abs+"):
        for suffix, reference in (("", b["reference"]), (" far", b["logprobs"] + 5.0)):

            def loss(logprobs: Tensor, name: str = name, reference: Tensor = reference) -> Tensor:
                return (core_algos.kl_penalty(logprobs, reference, name) * mask).sum()

            results[f"kl_penalty {name}{suffix}"] = differentiated(b["logprobs"], loss)
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):

        def mean(logprobs: Tensor, mode: str = mode) -> Tensor:
            return core_algos.agg_loss(logprobs, mask, mode)

        results[f"agg_loss {mode}"] = differentiated(b["logprobs"], mean)
    results["compute_value_loss"] = differentiated(
        b["new_values"],
        lambda values: core_algos.compute_value_loss(values, b["returns"], b["values"], mask, 0.2)[0],
    )
    costly = core_algos.compute_rewards(b["token_rewards"], b["logprobs"], b["reference"], 0.3)
    results["compute_rewards"] = {"value": costly.tolist()}
    led = core_algos.AdaptiveKLController(0.1, 6.0, 10_000)
    values: list[float] = []
    for kl in (3.0, 6.5, 40.0):
        led.update(kl, 128)
        values.append(led.value)
    results["AdaptiveKLController"] = {"value": values}
    results["distillation forward_kl_topk"] = distillation(b)
    return results


def distillation(b: dict[str, Any]) -> Result:
    """The teacher's three likeliest tokens; the mean over trained tokens."""
    logprobs, ids = b["teacher_logits"].log_softmax(-1).flatten(0, 1).topk(3, dim=-1)
    settings = SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False)

    def loss(logits: Tensor) -> Tensor:
        divergence = compute_forward_kl_topk(
            logits.flatten(0, 1).unsqueeze(0),
            torch.nested.nested_tensor([logprobs], layout=torch.jagged),
            torch.nested.nested_tensor([ids], layout=torch.jagged),
            SimpleNamespace(distillation_loss=settings),
            "thd",
        )
        divergence = divergence[0] if isinstance(divergence, tuple) else divergence["distillation_losses"]
        return core_algos.agg_loss(divergence.view(b["mask"].shape), b["mask"], "token-mean")

    return differentiated(b["student_logits"], loss)


def corrections(b: dict[str, Any]) -> dict[str, Result]:
    log_ratio, mask = b["old"] - b["rollout"], b["mask"]
    results: dict[str, Result] = {}
    for level, bounds in (("token", 1.1), ("sequence", 1.5), ("token", "0.9_1.1"), ("sequence", "0.6_1.5")):
        found, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, level, bounds)
        results[f"importance weights {level} {bounds}"] = {"value": found.tolist()}
    for option, bounds in (
        ("token_k1", "0.9_1.1"),
        ("token_k2", 0.01),
        ("token_k3", 0.01),
        ("seq_sum_k1", "0.8_1.25"),
        ("seq_sum_k2", 0.05),
        ("seq_sum_k3", 0.05),
        ("seq_mean_k1", "0.95_1.05"),
        ("seq_mean_k2", 0.005),
        ("seq_mean_k3", 0.005),
        ("seq_max_k2", 0.02),
        ("seq_max_k3", 0.02),
    ):
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, option, bounds)
        results[f"rejection {option} {bounds}"] = {"value": kept.tolist()}
    gaps = rollout_corr_helper.compute_offpolicy_metrics(b["old"], b["rollout"], mask)
    results["compute_offpolicy_metrics k3_kl"] = {"value": float(gaps["k3_kl"])}
    return results


def main() -> None:
    torch.set_num_threads(1)
    source, target = map(Path, sys.argv[1:])
    results: list[dict[str, Result]] = []
    for raw in json.loads(source.read_text()):
        strings = np.array(raw.pop("uid"), dtype=object)
        plain = {name: raw.pop(name) for name in ("discount", "trace", "reward_weights", "reward_parts")}
        b: dict[str, Any] = {name: torch.tensor(value, dtype=torch.float64) for name, value in raw.items()}
        b |= {"uid": strings, **plain}
        results.append({**advantages(b), **policy_losses(b), **rest(b), **corrections(b)})
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
