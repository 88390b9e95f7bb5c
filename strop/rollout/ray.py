"""The built-in sampler as an actor of a Ray cluster: the same calls, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from strop.errors import ConfigError, RolloutError, StropError
from strop.rollout.base import Sampler
from strop.rollout.router import SamplerLost
from strop.rollout.transfer import Bucket, Inbox, Shipment
from strop.types import Completion, Float32s, Prompt, SamplingParams

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError as error:
    raise ConfigError("sampler.actors are Ray's, which is not installed: pip install 'strop[ray]'") from error

if TYPE_CHECKING:
    from torch import Tensor

MakeSampler = Callable[[], Sampler]


class _Host:
    """Inside the actor: a sampler, and the weights that are arriving."""

    def __init__(self, make: MakeSampler, keeps: bool) -> None:
        import torch

        torch.set_num_threads(1)
        self._sampler = make()
        self._inbox = Inbox(keeps=keeps)

    async def facts(self) -> tuple[int, bool]:
        return self._sampler.version, self._sampler.serves_adapter

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        return await self._sampler.sample(prompt, params)

    async def score(self, prompt: Prompt) -> Float32s:
        return await self._sampler.score(prompt)

    async def begin(self, version: int, base: int | None) -> bool:
        return self._inbox.begin(version, base)

    async def put(self, bucket: Bucket) -> None:
        """Take weights in; nothing is served from them before `end`."""
        self._inbox.put(bucket)

    async def end(self, count: int, serial: int) -> None:
        version, weights = self._inbox.end(count)
        await self._sampler.load_weights(iter(weights.items()), version)
        self._inbox.used(serial, weights)

    async def sleep(self) -> None:
        await self._sampler.sleep()

    async def wake(self) -> None:
        await self._sampler.wake()


class RaySampler:
    """A `Sampler` in an actor. What goes wrong with a request is raised as it was; an actor that is gone is
    SamplerLost."""

    def __init__(self, make: MakeSampler, *, cpus: float = 1.0, gpus: float = 0.0, deltas: bool = False) -> None:
        options = ray.remote(_Host).options(num_cpus=cpus, num_gpus=gpus or None, max_concurrency=100_000)
        self._actor: Any = options.remote(make, deltas)
        self._version, self.serves_adapter = ray.get(self._actor.facts.remote())

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        return await self._ask(self._actor.sample.remote(prompt, params))

    async def score(self, prompt: Prompt) -> Float32s:
        return await self._ask(self._actor.score.remote(prompt))

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What changed since the shipment before, where the actor has that one; else all of it."""
        shipment = weights if isinstance(weights, Shipment) else Shipment(weights)
        if (changes := shipment.changes) is not None and await self._announce(version, shipment.serial - 1):
            await self._send(changes, shipment)
        else:
            await self._announce(version, None)
            await self._send(shipment.whole(), shipment)
        self._version = version

    async def _announce(self, version: int, base: int | None) -> bool:
        return await self._ask(self._actor.begin.remote(version, base))

    async def _send(self, buckets: Iterable[Bucket], shipment: Shipment) -> None:
        for bucket in buckets:
            await self._ask(self._actor.put.remote(bucket))
        await self._ask(self._actor.end.remote(len(shipment), shipment.serial))

    async def sleep(self) -> None:
        await self._ask(self._actor.sleep.remote())

    async def wake(self) -> None:
        await self._ask(self._actor.wake.remote())

    def close(self) -> None:
        ray.kill(self._actor)

    async def _ask(self, asked: Any) -> Any:
        try:
            return await asked
        except RayActorError as error:
            raise SamplerLost(f"its actor died: {error}") from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, StropError):
                raise cause from error
            raise RolloutError(f"the sampler's actor raised {error}") from error
