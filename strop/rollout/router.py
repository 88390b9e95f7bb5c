"""Many samplers as one: each request goes where there is least to do, its continuation where its text is known.

A sampler that fails for its own sake (its process died, its server is gone) is left out from then on, and what it was
drawing is drawn elsewhere: a request's result depends on its own seed, so nothing is lost or drawn twice.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from strop.errors import RolloutError
from strop.rollout.base import Sampler
from strop.rollout.transfer import Outbox
from strop.types import Completion, Float32s, Prompt, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
STICKY_TOKENS = 64  # texts that begin alike this far are of one conversation, or of one group
SLACK = 8  # requests that a sampler may have more than the idlest before its own conversations go elsewhere too

log = logging.getLogger(__name__)


class SamplerLost(RolloutError):
    """A sampler is gone: not the request's fault, and another sampler can draw it."""


class NoSampler(RolloutError):
    """All samplers are lost: nothing can be drawn any more."""


class Courier(Protocol):
    """Takes versions to all samplers of a router together, where each alone would be more work."""

    async def deliver(
        self, weights: Iterable[tuple[str, Tensor]], version: int, among: Sequence[int]
    ) -> dict[int, SamplerLost]:
        """Have these samplers, by index, serve a version, whole. Those that were lost meanwhile, and why.

        What else goes wrong is raised; then each sampler serves this version or what it did before.
        """
        ...


class Router:
    """A `Sampler` over others that serve the same policy. Weights go by `courier`, else to each as `outbox` ships."""

    def __init__(
        self, samplers: Sequence[Sampler], outbox: Outbox | None = None, courier: Courier | None = None
    ) -> None:
        if not samplers:
            raise RolloutError("a router needs at least one sampler")
        self._samplers = list(samplers)
        self._outbox = Outbox() if outbox is None else outbox
        self._courier = courier
        self._load = [0] * len(samplers)
        self._idlest = [(0, i) for i in range(len(samplers))]
        """A heap of (load, sampler) with every sampler's load as it is, and loads that it had before."""
        self._lost: dict[int, str] = {}
        self._homes: dict[int, int] = {}  # where texts that begin so were drawn last, of this version

    @property
    def version(self) -> int:
        return min(self._samplers[i].version for i in self._alive())

    @property
    def serves_adapter(self) -> bool:
        return self._samplers[0].serves_adapter

    @property
    def lost(self) -> dict[int, str]:
        """Samplers that are no longer asked, by index, and why."""
        return dict(self._lost)

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        return await self._somewhere(prompt, lambda sampler: sampler.sample(prompt, params))

    async def score(self, prompt: Prompt) -> Float32s:
        return await self._somewhere(prompt, lambda sampler: sampler.score(prompt))

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Every sampler takes them; one that is lost meanwhile is left out, and no other serves two versions."""
        self._homes.clear()  # caches do not outlive an update
        if self._courier is not None:
            for i, error in (await self._courier.deliver(weights, version, self._alive())).items():
                self._lose(i, error)
            self._alive()
            return
        shipment = self._outbox.ship(weights)
        await self._everywhere(lambda sampler: sampler.load_weights(shipment, version))

    async def sleep(self) -> None:
        await self._everywhere(lambda sampler: sampler.sleep())

    async def wake(self) -> None:
        await self._everywhere(lambda sampler: sampler.wake())

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.close()

    def _alive(self) -> list[int]:
        alive = [i for i in range(len(self._samplers)) if i not in self._lost]
        if not alive:
            raise NoSampler(f"no sampler is left: {'; '.join(f'{i}: {self._lost[i]}' for i in sorted(self._lost))}")
        return alive

    def _choose(self, home: int) -> int:
        """The sampler of this text if it is not too busy, else the idlest. The time does not grow with their number."""
        heap = self._idlest
        while heap and (heap[0][1] in self._lost or heap[0][0] != self._load[heap[0][1]]):
            heapq.heappop(heap)
        if not heap:
            self._alive()  # raises: nobody is
        known = self._homes.get(home)
        if known is not None and known not in self._lost and self._load[known] <= heap[0][0] + SLACK:
            return known
        return heap[0][1]

    def _add_load(self, i: int, change: int) -> None:
        self._load[i] += change
        if i in self._lost:
            return
        heapq.heappush(self._idlest, (self._load[i], i))
        if len(self._idlest) > 8 * len(self._load) + 64:  # most of it is loads of the past
            self._idlest = [(load, i) for i, load in enumerate(self._load) if i not in self._lost]
            heapq.heapify(self._idlest)

    async def _somewhere(self, prompt: Prompt, ask: Callable[[Sampler], Coroutine[object, object, T]]) -> T:
        home = hash(prompt.tokens[:STICKY_TOKENS].tobytes())
        while True:
            chosen = self._choose(home)
            self._homes[home] = chosen
            self._add_load(chosen, 1)
            try:
                return await ask(self._samplers[chosen])
            except SamplerLost as error:
                self._lose(chosen, error)
            finally:
                self._add_load(chosen, -1)

    async def _everywhere(self, ask: Callable[[Sampler], Coroutine[object, object, None]]) -> None:
        alive = self._alive()
        found = await asyncio.gather(*(ask(self._samplers[i]) for i in alive), return_exceptions=True)
        for i, error in zip(alive, found, strict=True):
            if isinstance(error, SamplerLost):
                self._lose(i, error)
            elif isinstance(error, BaseException):
                raise error
        self._alive()

    def _lose(self, i: int, error: SamplerLost) -> None:
        if i not in self._lost:
            log.warning("sampler %d is lost, its requests go elsewhere: %s", i, error)
            self._lost[i] = str(error)
