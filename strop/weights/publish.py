"""Move a policy's weights from where they are trained to where samples are drawn.

How they travel is the sampler's business, since it knows where it is: one in this process copies them, actors behind a
router are sent buckets or what changed, get a broadcast, or read a folder. All check everything before they serve it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from strop.engines.base import Engine
from strop.rollout.base import Sampler


async def publish(engine: Engine, sampler: Sampler, version: int) -> None:
    """Give the sampler the engine's current weights as `version`. All of them or none: the sampler checks first.

    Nothing may train the engine meanwhile: the sampler is lent its weights, and keeps copies.
    """
    await sampler.load_weights(_Lent(engine, sampler.serves_adapter), version)


class _Lent:
    """An engine's weights, or its adapter's, to be read as often as it takes: a transport may have to begin again."""

    def __init__(self, engine: Engine, adapter: bool) -> None:
        self._engine, self._adapter = engine, adapter

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._engine.adapter_weights() if self._adapter else self._engine.lend_weights())
