"""Move a policy's weights from where they are trained to where samples are drawn."""

from __future__ import annotations

from strop.engines.base import Engine
from strop.rollout.base import Sampler


async def publish(engine: Engine, sampler: Sampler, version: int) -> None:
    """Give the sampler the engine's current weights as `version`. All of them or none: the sampler checks first."""
    weights = engine.adapter_weights() if sampler.serves_adapter else engine.weights()
    await sampler.load_weights(weights, version)
