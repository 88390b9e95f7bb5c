"""Models that do not move during a step say what they think of its tokens: the reference, and the trainer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.config.policy import PolicyLoopConfig
from strop.data.packing import with_inputs
from strop.data.scored import Scored, Update
from strop.engines.base import Engine
from strop.types import Want


async def score(
    cfg: PolicyLoopConfig, updates: Sequence[Update], *, engine: Engine, reference: Engine | None
) -> list[Scored]:
    """Let the frozen reference, and where something needs it the trainer, score the step's tokens."""
    scored: list[Scored] = []
    for packed in updates:
        batches, outputs = packed.batches, None
        if reference is not None:
            found = await reference.forward(batches)
            batches = with_inputs(batches, reference_logprobs=[output.logprobs_T for output in found])
        if cfg.needs_scores:
            want = Want(entropy=cfg.top_entropy < 1, square_sums=cfg.needs_square_sums)
            outputs = await engine.forward(batches, want)
            if cfg.ratio_to == "trainer":
                batches = with_inputs(batches, proximal_logprobs=[output.logprobs_T for output in outputs])
        scored.append(Scored(packed=replace(packed, batches=batches), outputs=outputs))
    return scored
