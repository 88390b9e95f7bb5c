"""The first check of every step that learns from attempts: sampler and trainer run the same model."""

from __future__ import annotations

from strop.errors import RolloutError
from strop.types import Metrics


def check_gap(metrics: Metrics, max_gap: float) -> Metrics:
    """The largest difference between the sampler's logprobs and the trainer's, for the same tokens and weights.

    `metrics` are a policy loss's, of the first update after the tokens were drawn. Raises RolloutError above `max_gap`.
    """
    gap = metrics["policy/gap_max"]
    if not gap.result <= max_gap:  # NaN is a gap too
        raise RolloutError(
            f"the sampler's and the trainer's logprobs of the same tokens differ by up to {gap.result:.2e} "
            f"(sampler.max_gap={max_gap:g}): they no longer run the same model; see `strop doctor`, or raise "
            "sampler.max_gap if the sampler's number format is coarser than the trainer's"
        )
    return {"sampler/gap_max": gap}
