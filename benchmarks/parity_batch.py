"""Random batches that strop's algorithms and other libraries' functions are compared on, and how a comparison reads.

A case holds strop's number as its users get it. Where the other library's definition differs on purpose, `difference`
says in what, and `explained_value` is strop's number with that difference put in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algos.distill_losses import Distillation, DistillInputs
from strop.algos.losses import PolicyInputs, PolicyLoss
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Outputs

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Number = Floats | float
ROWS, COLUMNS, GROUP = 12, 9, 4
PAIRS = ROWS // 2  # the first half of the replies is chosen, the other rejected
WORDS, CANDIDATES = 7, 3  # of distillation: the vocabulary, and the teacher's likeliest
SIZES = (4, 4, 3, 1)  # of verl's groups; TRL's are of four
SINGLE = ROWS - 1  # the reply that is alone in its group
EMPTY = 5  # the reply of which nothing is trained
ALONE = "a group of one: verl gives its raw reward, strop 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """strop's side of one function on one batch."""

    value: Number
    gradient: Floats | None = None
    counted: NDArray[np.bool_] | bool = True  # which of the values are compared
    difference: str = ""
    explained_value: Number = np.nan
    explained_gradient: Floats | None = None
    note: str = ""  # what to know about equal numbers: the knobs that give them

    def explained(self, difference: str, value: Number, gradient: Floats | None = None) -> Case:
        """The same case with a difference on purpose, and the numbers once that is put in."""
        return Case(
            value=self.value,
            gradient=self.gradient,
            counted=self.counted,
            difference=difference,
            explained_value=value,
            explained_gradient=self.gradient if gradient is None else gradient,
        )

    def scaled(self, difference: str, factor: float) -> Case:
        assert self.gradient is not None
        return self.explained(difference, factor * np.asarray(self.value), factor * self.gradient)

    def noted(self, note: str) -> Case:
        return Case(value=self.value, gradient=self.gradient, counted=self.counted, note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One random batch; matrices are [replies, tokens]."""

    mask: NDArray[np.bool_]
    plain_mask: NDArray[np.bool_]  # the same lengths without tool tokens
    rewards: Floats  # [replies], for verl's groups
    reward_parts: Floats  # [2, replies]
    group_rewards: Floats  # [replies], for groups of four; NaN is missing
    group_parts: Floats  # [2, replies]
    columns: dict[str, Floats]

    discount: float = 0.9
    trace: float = 0.8
    reward_weights: tuple[float, float] = (1.0, 0.5)

    @property
    def uid(self) -> list[str]:
        return [f"g{group}" for group, size in enumerate(SIZES) for _ in range(size)]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self.mask.sum(axis=1)

    @property
    def pair_mask(self) -> NDArray[np.bool_]:
        """The mask with a first token in every reply: every text of a pair has some."""
        return self.mask | (np.arange(COLUMNS) == 0)

    def at_end(self, mask: NDArray[np.bool_]) -> Floats:
        """The rewards at each reply's last trained token (its first, when it has none)."""
        placed = np.zeros((ROWS, COLUMNS))
        last = np.where(mask.any(axis=1), COLUMNS - 1 - np.argmax(mask[:, ::-1], axis=1), 0)
        placed[np.arange(ROWS), last] = self.rewards
        return placed

    def as_json(self) -> dict[str, Any]:
        arrays = {
            **self.columns,
            "mask": self.mask.astype(float),
            "plain_mask": self.plain_mask.astype(float),
            "pair_mask": self.pair_mask.astype(float),
            "token_rewards": self.at_end(self.mask),
            "plain_rewards": self.at_end(self.plain_mask),
            "reward_parts": self.reward_parts,
            "group_rewards": self.group_rewards,
            "group_parts": self.group_parts,
        }
        plain = {"uid": self.uid, "discount": self.discount, "trace": self.trace, "reward_weights": self.reward_weights}
        return plain | {name: array.tolist() for name, array in arrays.items()}


def draw(seed: int) -> Drawn:
    rng = np.random.default_rng(seed)

    def normal(scale: float, *shape: int) -> Floats:
        return scale * rng.normal(size=shape or (ROWS, COLUMNS))

    lengths = rng.integers(2, COLUMNS + 1, ROWS)
    lengths[0], lengths[EMPTY] = COLUMNS, 0
    place = np.arange(COLUMNS)
    plain = place < lengths[:, None]
    tools = (rng.random((ROWS, COLUMNS)) < 0.25) & (place > 0) & (place < lengths[:, None] - 1)
    old = -rng.uniform(0.05, 3.0, (ROWS, COLUMNS))
    values = normal(1.0)
    probability = np.exp(old)
    group_rewards = normal(1.0, ROWS)
    group_rewards[6] = np.nan
    columns = {
        "old": old,
        "logprobs": np.minimum(old + normal(0.4), -0.01),
        "reference": old + normal(0.2),
        "rollout": old + normal(0.1),
        "advantages": normal(1.0, ROWS, 1) + normal(0.3),
        "row_advantages": normal(1.0, ROWS),
        "baselines": normal(1.0, ROWS),
        "entropy": rng.uniform(0.1, 2.0, (ROWS, COLUMNS)),
        "values": values,
        "new_values": values + normal(0.4),
        "returns": normal(1.0),
        "square_sums": probability**2 + rng.random((ROWS, COLUMNS)) * (1 - probability) ** 2,
        "student_logits": normal(1.0, ROWS, COLUMNS, WORDS),
        "teacher_logits": normal(1.0, ROWS, COLUMNS, WORDS),
        "other_logprobs": -10.0 + normal(1.0, ROWS),  # of replies to other prompts, and under the reference
        "other_reference": -10.5 + normal(1.0, ROWS),
        "scores": normal(1.0, ROWS),
        "margins": rng.uniform(0.1, 1.0, PAIRS),
    }
    return Drawn(
        mask=plain & ~tools,
        plain_mask=plain,
        rewards=normal(1.0, ROWS),
        reward_parts=normal(1.0, 2, ROWS),
        group_rewards=group_rewards,
        group_parts=normal(1.0, 2, ROWS),
        columns=columns,
    )


def grouped(values: NDArray[Any], fill: float = np.nan) -> NDArray[Any]:
    """[replies] -> [groups, attempts], verl's groups, filled up to four."""
    parts = np.split(values, np.cumsum(SIZES)[:-1])
    return np.stack([np.concatenate([part, np.full(GROUP - len(part), fill)]) for part in parts])


def ungrouped(values_PG: Floats) -> Floats:
    return np.concatenate([row[:size] for row, size in zip(values_PG, SIZES, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A batch as an engine would hand it to a loss."""

    drawn: Drawn
    mask_T: Tensor
    layout: Layout
    inputs: PolicyInputs

    @staticmethod
    def of(b: Drawn, advantages_BT: Floats, **constants: Tensor) -> Step:
        return Step(
            drawn=b,
            mask_T=torch.from_numpy(b.mask.reshape(-1)),
            layout=Layout((COLUMNS,) * ROWS),
            inputs=PolicyInputs(
                behavior_logprobs_T=torch.from_numpy(b.columns["old"].reshape(-1)),
                advantages_T=torch.from_numpy(advantages_BT.reshape(-1)),
                reference_logprobs_T=constants.get("reference"),
                correction_T=constants.get("correction"),
                selected_T=constants.get("selected"),
            ),
        )

    def run(self, loss: PolicyLoss, weighting: Weighting = Weighting.TOKEN_MEAN, horizon: int | None = None) -> Case:
        weights_N = token_weights(weighting, self.drawn.counts, horizon=horizon)
        entropy_T = torch.from_numpy(self.drawn.columns["entropy"].reshape(-1))

        def of(logprobs_T: Tensor) -> Tensor:
            outputs = Outputs(logprobs_T=logprobs_T, entropy_T=entropy_T)
            return loss(outputs, self.inputs, self.layout, self.mask_T)[0]

        return differentiated(self.drawn.columns["logprobs"], of, self.mask_T, weights_N)


def differentiated(at: Floats, loss: Callable[[Tensor], Tensor], mask_T: Tensor, weights_N: Floats) -> Case:
    """The weighted sum of a loss over the trained tokens, and its gradient."""
    at_T = torch.from_numpy(at.reshape(ROWS * COLUMNS, *at.shape[2:])).clone().requires_grad_()
    weights_T = torch.from_numpy(np.repeat(weights_N, COLUMNS))
    total = (torch.where(mask_T, loss(at_T), 0.0) * torch.where(mask_T, weights_T, 0.0)).sum()
    total.backward()
    assert at_T.grad is not None
    return Case(value=float(total.detach()), gradient=at_T.grad.numpy().reshape(at.shape))


def pair(b: Drawn, first: str, second: str) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(b.columns[first].reshape(-1)), torch.from_numpy(b.columns[second].reshape(-1))


def distillation(b: Drawn, loss: Distillation, candidates: int) -> Case:
    """One teacher's `candidates` likeliest tokens, the token mean, and the gradient by the student's logits."""
    teacher = torch.from_numpy(b.columns["teacher_logits"]).log_softmax(-1).view(ROWS * COLUMNS, WORDS)
    teacher_TK, ids_TK = teacher.topk(candidates, dim=-1)
    mask_T = torch.from_numpy(b.mask.reshape(-1))
    inputs = DistillInputs(
        behavior_logprobs_T=torch.zeros(len(mask_T), dtype=torch.float64),
        teacher_logprobs_TK=teacher_TK,
        teacher_weights_TM=torch.ones(len(mask_T), 1, dtype=torch.float64),
    )

    def of(logits_TV: Tensor) -> Tensor:
        return loss.of(logits_TV.log_softmax(-1).gather(-1, ids_TK), inputs, mask_T)[0]

    weights_N = token_weights(Weighting.TOKEN_MEAN, b.counts, horizon=None)
    return differentiated(b.columns["student_logits"], of, mask_T, weights_N)
