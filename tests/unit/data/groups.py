"""Small groups of attempts, and what comes out of packed batches, for tests of packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strop.algos.losses import PolicyInputs
from strop.config.recipe import TooLong
from strop.data.packing import Batch, Packed, pack_policy
from strop.types import Completion, Group, Segment, Stop, Trajectory


def completion(tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Completion:
    values = np.asarray([-1.0] * len(tokens) if logprobs is None else logprobs, np.float32)
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=values,
        sampling_logprobs=values,
        versions=np.zeros(len(tokens), np.int32),
        stop=Stop.TOKEN,
    )


def segment(prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float] | None = None) -> Segment:
    made = Segment()
    made.observe(np.asarray(prompt, np.int32))
    made.act(completion(reply, logprobs))
    return made


def attempt(prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float] | None = None) -> Trajectory:
    return Trajectory(segments=[segment(prompt, reply, logprobs)])


def losses_as_logprobs(*losses: Sequence[float]) -> list[Group]:
    """One group with an attempt for each list, whose tokens' logprobs are those numbers: `weighted_sum` sums them."""
    return [Group("t", [attempt([7], range(10, 10 + len(row)), row) for row in losses])]


def pack(
    groups: list[Group],
    advantages_PG: Sequence[Sequence[float]] | None = None,
    *,
    max_tokens: int = 64,
    weighting: str = "token_mean",
    horizon: int | None = None,
    temperature: float = 1.0,
    share_prefixes: bool = False,
    data_parallel: int = 1,
    too_long: TooLong = TooLong.ERROR,
) -> Packed[PolicyInputs]:
    if advantages_PG is None:
        advantages_PG = [[1.0] * len(group) for group in groups]
    return pack_policy(
        groups,
        np.asarray(advantages_PG, np.float64).reshape(len(groups), len(groups[0]) if groups else 0),
        max_tokens=max_tokens,
        weighting=weighting,
        horizon=horizon,
        temperature=temperature,
        share_prefixes=share_prefixes,
        data_parallel=data_parallel,
        too_long=too_long,
    )


def weighted_sum(packed: Packed[PolicyInputs]) -> float:
    return sum(float((b.weights_T.double() * b.inputs.behavior_logprobs_T).sum()) for b in packed.batches)


class Target(NamedTuple):
    """A trained row: what is predicted, from what, and what it counts for."""

    text: tuple[int, ...]  # everything up to and with the row's own token
    target: int
    weight: float
    advantage: float
    logprob: float


def texts(batch: Batch[PolicyInputs] | Batch[None]) -> list[tuple[int, ...]]:
    """Every sequence's tokens with its prefix's in front."""
    tokens, layout = batch.tokens_T.tolist(), batch.layout
    own = [tuple(tokens[a : a + n]) for a, n in zip(layout.starts_S.tolist(), layout.lengths, strict=True)]
    return [own[parent] + text if parent >= 0 else text for text, parent in zip(own, layout.parents, strict=True)]


def trained(batches: Sequence[Batch[PolicyInputs]]) -> list[Target]:
    """Every row whose mask is on, sorted."""
    rows: list[Target] = []
    for batch in batches:
        whole, positions = texts(batch), batch.layout.positions_T.tolist()
        for t in batch.mask_T.nonzero().flatten().tolist():
            text = whole[int(batch.layout.sequence_T[t])][: positions[t] + 1]
            rows.append(
                Target(
                    text,
                    int(batch.targets_T[t]),
                    float(batch.weights_T[t]),
                    float(batch.inputs.advantages_T[t]),
                    float(batch.inputs.behavior_logprobs_T[t]),
                )
            )
    return sorted(rows)


def spare(batch: Batch[PolicyInputs] | Batch[None]) -> bool:
    """Whether the batch is there only to make the ranks' numbers equal."""
    return batch.layout.lengths == (1,)
