"""Move a policy's weights from where they are trained to where samples are drawn.

How they travel is the sampler's business, since it knows where it is: one in this process copies them, actors behind a
router are sent buckets or what changed, and both check everything before they serve any of it. `collective` is one
broadcast to many processes that share a process group with the trainer.
"""

from __future__ import annotations

from strop.engines.base import Engine
from strop.rollout.base import Sampler


async def publish(engine: Engine, sampler: Sampler, version: int) -> None:
    """Give the sampler the engine's current weights as `version`. All of them or none: the sampler checks first.

    Nothing may train the engine meanwhile: the sampler is lent its weights, and keeps copies.
    """
    weights = engine.adapter_weights() if sampler.serves_adapter else engine.lend_weights()
    await sampler.load_weights(weights, version)
