"""What TRL's own functions give: python -m benchmarks.peers.trl_algos BATCHES.json RESULTS.json

It runs in an environment of its own, with trl==1.16.0. TRL keeps its losses and advantages in methods of its trainers;
they are called here on a stand-in for the trainer, which has the settings they read and gives the batch's numbers where
they would run a model or draw completions. For each batch of `benchmarks.algos_parity` it notes, by name, a value, and
for losses the gradient by the logprobs.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.gmpo import GMPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOTrainer  # pyright: ignore[reportMissingImports]
from trl.rewards import get_soft_overlong_punishment  # pyright: ignore[reportMissingImports]
from trl.trainer import distillation_trainer  # pyright: ignore[reportMissingImports]

Result = dict[str, Any]
GROUP = 4


def differentiated(at: Tensor, loss: Callable[[Tensor], Tensor]) -> Result:
    """A loss and its gradient."""
    at = at.clone().requires_grad_()
    value = loss(at)
    value.backward()
    assert at.grad is not None
    return {"value": value.item(), "gradient": at.grad.tolist()}


def trainer(**changes: Any) -> SimpleNamespace:
    """What GRPOTrainer's and RLOOTrainer's methods read of themselves."""
    made = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=12,
        ),
        # What a trainer records; nobody reads it here.
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _pending_extra_logs={},
        _pending_metrics={},
        aux_loss_enabled=False,
        beta=0.0,
        chat_template_kwargs={},
        current_gradient_accumulation_steps=1,
        environment_factories=None,
        environments=None,
        epsilon_high=0.28,
        epsilon_low=0.2,
        eos_token_ids=[1],
        importance_sampling_level="token",
        log_multimodal=False,
        loss_type="dapo",
        mask_truncated_completions=False,
        max_completion_length=9,
        multi_objective_aggregation="sum_then_normalize",
        normalize_advantages=False,
        num_generations=GROUP,
        num_iterations=1,
        off_policy_mask_threshold=None,
        pad_to_multiple_of=None,
        reward_func_names=["r0", "r1"],
        reward_clip_range=None,
        reward_funcs=[None, None],
        reward_weights=torch.tensor([1.0, 1.0]),
        scale_rewards="group",
        tools=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _is_vlm=False,
    )
    for name, value in changes.items():
        holder = made.args if hasattr(made.args, name) else made
        setattr(holder, name, value)
    made.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    made.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(made, *given)
    return made


def grpo_loss(b: dict[str, Any], trainer_class: Any = GRPOTrainer, **changes: Any) -> Result:
    """The trainer's loss of the whole batch, as one micro-batch of one optimizer step."""
    made = trainer(**changes)
    rows, columns = b["mask"].shape
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(rows, columns, dtype=torch.long),
        "completion_mask": torch.ones(rows, columns),
        "tool_mask": b["mask"],
        "advantages": b["row_advantages"],
        "old_per_token_logps": b["old"],
        "ref_per_token_logps": b["reference"],
        "sampling_per_token_logps": b["rollout"],
        "num_items_in_batch": b["mask"].sum(),
    }

    def loss(logprobs: Tensor) -> Tensor:
        made._get_per_token_logps_and_entropies = lambda *given, **named: (logprobs, b["entropy"], None)
        return trainer_class._compute_loss(made, made.model, inputs)

    return differentiated(b["logprobs"], loss)


def losses(b: dict[str, Any]) -> dict[str, Result]:
    results = {
        f"loss_type {name}": grpo_loss(b, loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo")
    }
    results["loss_type cispo"] = grpo_loss(b, loss_type="cispo", epsilon_high=1.3)
    results["importance_sampling_level sequence"] = grpo_loss(b, loss_type="grpo", importance_sampling_level="sequence")
    results["loss_type luspo"] = grpo_loss(b, loss_type="luspo", importance_sampling_level="sequence")
    results["delta"] = grpo_loss(b, delta=1.5)
    results["beta"] = grpo_loss(b, beta=0.3)
    results["entropy_coef"] = grpo_loss(b, _entropy_bonus_enabled=True, entropy_coef=0.2)
    results["off_policy_mask_threshold"] = grpo_loss(b, off_policy_mask_threshold=0.05)
    results["top_entropy_quantile"] = grpo_loss(b, top_entropy_quantile=0.25)
    results["GMPO (experimental)"] = grpo_loss(b, GMPOTrainer)
    return results


def scored(b: dict[str, Any], rewards: Tensor, trainer_class: Any, **changes: Any) -> dict[str, Any]:
    """What a trainer makes of completions and their rewards [rows, functions] before it learns from them."""
    made = trainer(**changes)
    rows, columns = b["mask"].shape
    ids, texts = [[2] * columns for _ in range(rows)], [""] * rows
    tools = b["mask"].long().tolist()
    drawn = ([[2]] * rows, ids, tools, texts, b["rollout"].tolist(), {}, None, None)
    made._generate = lambda prompts: (drawn[0], ids, texts) if trainer_class is RLOOTrainer else drawn
    made._calculate_rewards = lambda *given: rewards
    made._get_per_token_logps_and_entropies = lambda *given, **named: (b["old"], None, None)
    return trainer_class._generate_and_score_completions(made, [{"prompt": ""}] * rows)


def advantages(b: dict[str, Any]) -> dict[str, Result]:
    one = torch.stack([b["group_rewards"], torch.full_like(b["group_rewards"], torch.nan)], dim=1)
    two = torch.stack(b["group_parts"], dim=1)
    weights = torch.tensor(b["reward_weights"], dtype=torch.float64)
    found = {
        "advantages": scored(b, one, GRPOTrainer),
        "scale_rewards none": scored(b, one, GRPOTrainer, scale_rewards="none"),
        "normalize_then_sum": scored(
            b, two, GRPOTrainer, multi_objective_aggregation="normalize_then_sum", reward_weights=weights
        ),
        "RLOO": scored(b, one, RLOOTrainer),
    }
    return {name: {"value": output["advantages"].tolist()} for name, output in found.items()}


def importance_ratios(b: dict[str, Any]) -> dict[str, Result]:
    one = torch.stack([b["group_rewards"]] * 2, dim=1)
    results: dict[str, Result] = {}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        output = scored(
            b,
            one,
            GRPOTrainer,
            use_vllm=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=0.8,
            vllm_importance_sampling_clip_max=1.2,
        )
        ratio = output["importance_sampling_ratio"] * torch.ones_like(b["mask"])
        results[mode] = {"value": ratio.tolist()}
    return results


def rloo_loss(b: dict[str, Any]) -> dict[str, Result]:
    """RLOOTrainer's loss at the policy that sampled, which is where its first step is."""
    made = trainer()
    rows, columns = b["mask"].shape
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(rows, columns, dtype=torch.long),
        "completion_mask": b["mask"],
        "advantages": b["row_advantages"],
        "old_logps": (b["logprobs"] * b["mask"]).sum(1),
    }

    def loss(logprobs: Tensor) -> Tensor:
        made._get_per_token_logps_and_entropies = lambda *given, **named: (logprobs, b["entropy"], None)
        return RLOOTrainer._compute_loss(made, made.model, inputs)

    return {"RLOO loss": differentiated(b["logprobs"], loss)}


class Given(torch.nn.Module):
    """A model whose logprobs are given; `others` are sums over replies to other prompts, which KTO asks for."""

    def __init__(self, logprobs: Tensor, mask: Tensor, others: Tensor) -> None:
        super().__init__()
        self.logprobs, self.mask, self.others = logprobs, mask, others

    def forward(self, **given: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(self.mask)
        return SimpleNamespace(
            log_probs=self.logprobs * self.mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )


def preference_losses(b: dict[str, Any]) -> dict[str, Result]:
    """Losses of six pairs: the first six rows are chosen, the others rejected."""
    mask = b["pair_mask"]
    rows, columns = mask.shape
    inputs = {
        "input_ids": torch.zeros(rows, columns + 1, dtype=torch.long),
        "attention_mask": torch.ones(rows, columns + 1),
        "completion_mask": torch.cat([torch.zeros(rows, 1), mask], dim=1),
    }

    def run(trainer_class: Any, **changes: Any) -> Result:
        made = trainer(
            f_divergence_type="reverse_kl",
            label_smoothing=0.1,
            ld_alpha=None,
            loss_weights=[1.0],
            precompute_ref_logps=False,
            ref_model=Given(b["reference"], mask, b["other_reference"]),
            use_weighting=False,
            _total_train_tokens=0,
            _tp_size=1,
            **changes,
        )
        made._compute_kl_logps = lambda model, batch: model.others
        labels = {"label": torch.arange(rows) < rows // 2} if trainer_class is KTOTrainer else {}

        def loss(logprobs: Tensor) -> Tensor:
            model = Given(logprobs, mask, b["other_logprobs"])
            return trainer_class._compute_loss(made, model, inputs | labels, False)

        return differentiated(b["logprobs"], loss)

    def of_means(method: Callable[..., Any], sign: float, **changes: Any) -> Result:
        """A method of the mean logprobs of chosen and rejected texts; `sign` makes what it returns a loss."""
        made = trainer(alpha=0.0, label_smoothing=0.0, **changes)

        def loss(logprobs: Tensor) -> Tensor:
            means = (logprobs * mask).sum(1) / mask.sum(1)
            return sign * method(made, *means.chunk(2))[0].mean()

        return differentiated(b["logprobs"], loss)

    results = {
        f"DPO {kind}": run(DPOTrainer, beta=0.3, loss_types=[kind])
        for kind in ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm")
    }
    results["KTO"] = run(
        KTOTrainer, beta=0.3, loss_type="kto", calculate_KL=True, desirable_weight=1.5, undesirable_weight=0.7
    )
    results["SimPO (experimental)"] = of_means(CPOTrainer.cpo_loss, 1.0, beta=2.0, loss_type="simpo", simpo_gamma=0.5)
    results["ORPO (experimental)"] = of_means(ORPOTrainer.odds_ratio_loss, -1.0, beta=0.3)
    results["reward model"] = reward_model(b)
    return results


def reward_model(b: dict[str, Any]) -> Result:
    made = trainer(center_rewards_coefficient=0.1, _total_train_tokens=0, _tp_size=1)
    made.args.center_rewards_coefficient = 0.1

    def loss(scores: Tensor) -> Tensor:
        inputs = {"margin": b["margins"], "attention_mask": torch.ones(1)}
        return RewardTrainer.compute_loss(made, lambda **given: SimpleNamespace(logits=scores[:, None]), inputs)

    return differentiated(b["scores"], loss)


def distillation(b: dict[str, Any]) -> dict[str, Result]:
    """Heads that change nothing, so that hidden states are logits."""
    words = torch.eye(b["student_logits"].shape[-1], dtype=torch.float64)
    results: dict[str, Result] = {}
    for beta in (0, 1, 0.3):

        def loss(logits: Tensor, beta: float = beta) -> Tensor:
            return distillation_trainer._chunked_divergence_loss(
                logits, b["teacher_logits"], words, words, b["mask"], float(beta)
            )[0]

        results[f"distillation beta {beta}"] = differentiated(b["student_logits"], loss)
    return results


def rest(b: dict[str, Any]) -> dict[str, Result]:
    penalty = get_soft_overlong_punishment(max_completion_len=9, soft_punish_cache=4)
    lengths = b["mask"].sum(1).int().tolist()
    return {
        "soft overlong punishment": {"value": penalty(completion_ids=[[0] * n for n in lengths])},
        **distillation(b),
    }


def main() -> None:
    torch.set_num_threads(1)
    source, target = map(Path, sys.argv[1:])
    results: list[dict[str, Result]] = []
    for raw in json.loads(source.read_text()):
        parts = raw.pop("group_parts")
        plain = {name: raw.pop(name) for name in ("uid", "discount", "trace", "reward_weights", "reward_parts")}
        b: dict[str, Any] = {name: torch.tensor(value, dtype=torch.float64) for name, value in raw.items()}
        b |= {**plain, "group_parts": [torch.tensor(part, dtype=torch.float64) for part in parts]}
        results.append(
            {
                **losses(b),
                **advantages(b),
                **importance_ratios(b),
                **rloo_loss(b),
                **preference_losses(b),
                **rest(b),
            }
        )
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
