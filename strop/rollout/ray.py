"""The built-in sampler as an actor of a Ray cluster: the same calls, in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from strop.environment import keep_memory
from strop.errors import ConfigError, RolloutError, StropError
from strop.rollout.base import Sampler
from strop.rollout.mail import BEAT_S, Asked, Desk, Ended, Mail
from strop.rollout.router import SamplerLost
from strop.rollout.transfer import Bucket, Inbox, Shipment
from strop.types import Completion, Float32s, Prompt, SamplingParams

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
except ImportError as error:
    raise ConfigError("sampler.actors are Ray's, which is not installed: pip install 'strop[ray]'") from error

if TYPE_CHECKING:
    from torch import Tensor

MakeSampler = Callable[[], Sampler]


def address_here() -> str:
    """Of this process's machine, as others of the cluster reach it."""
    return str(ray.util.get_node_ip_address())


class Host:
    """Inside the actor: a sampler, and the weights that are arriving. Other ways for weights are classes over it."""

    def __init__(self, make: MakeSampler, keeps: bool) -> None:
        import torch

        torch.set_num_threads(1)
        keep_memory()
        self.sampler = make()
        self._desk = Desk(self.sampler)
        self._inbox = Inbox(keeps=keeps)

    async def facts(self) -> tuple[int, bool]:
        return self.sampler.version, self.sampler.serves_adapter

    async def take(self, asked: list[Asked]) -> None:
        self._desk.take(asked)

    async def drop(self, numbers: list[int]) -> None:
        self._desk.drop(numbers)

    async def ended(self, had: int) -> list[Ended]:
        return await self._desk.ended(had)

    async def score(self, prompt: Prompt) -> Float32s:
        return await self.sampler.score(prompt)

    async def begin(self, version: int, base: int | None) -> bool:
        return self._inbox.begin(version, base)

    async def put(self, bucket: Bucket) -> None:
        """Take weights in; nothing is served from them before `end`."""
        self._inbox.put(bucket)

    async def end(self, count: int, serial: int) -> None:
        version, weights = self._inbox.end(count)
        await self.sampler.load_weights(iter(weights.items()), version)
        self._inbox.used(serial, weights)

    async def sleep(self) -> None:
        await self.sampler.sleep()

    async def wake(self) -> None:
        await self.sampler.wake()


class RaySampler:
    """A `Sampler` in an actor. What goes wrong with a request is raised as it was; an actor that is gone, or is silent
    for `timeout_s` while it draws or takes weights, is SamplerLost.

    It begins to start when it is made, so that many start side by side; it serves when `started` returns.
    """

    HOST: type[Host] = Host

    def __init__(
        self,
        make: MakeSampler,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        deltas: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        options = ray.remote(self.HOST).options(num_cpus=cpus, num_gpus=gpus or None, max_concurrency=100_000)
        self.actor: Any = options.remote(make, deltas)
        self._mail = Mail(self)
        self._timeout_s = timeout_s
        self._cpus = cpus
        self._begun = time.monotonic()
        self._version, self.serves_adapter = -1, False

    def started(self) -> Self:
        """Wait until it serves, `timeout_s` after it was made at most. RolloutError when it does not."""
        left = None if self._timeout_s is None else max(0.0, self._begun + self._timeout_s - time.monotonic())
        try:
            self._version, self.serves_adapter = ray.get(self.actor.facts.remote(), timeout=left)
        except GetTimeoutError as error:
            self.close()
            raise RolloutError(
                f"a sampler's actor did not start within {self._timeout_s:g} s; the Ray cluster has "
                f"{ray.cluster_resources()}, of which the actor needs {self._cpus:g} CPU: lower sampler.actors or "
                "engine.runtime.cpus_per_rank"
            ) from error
        except RayActorError as error:
            raise RolloutError(f"a sampler's actor did not start: {error}") from error
        return self

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        return await self._mail.ask(prompt, params)

    async def take(self, asked: list[Asked]) -> None:
        """See `mail.Way`, as for the next two."""
        await self._ask(self.actor.take.remote(asked))

    async def drop(self, numbers: list[int]) -> None:
        await self._ask(self.actor.drop.remote(numbers))

    async def ended(self, had: int) -> list[Ended]:
        return await self.in_time(self.actor.ended.remote(had), BEAT_S)

    async def score(self, prompt: Prompt) -> Float32s:
        return await self._ask(self.actor.score.remote(prompt))

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
        return await self.in_time(self.actor.begin.remote(version, base))

    async def _send(self, buckets: Iterable[Bucket], shipment: Shipment) -> None:
        for bucket in buckets:
            await self.in_time(self.actor.put.remote(bucket))
        await self.in_time(self.actor.end.remote(len(shipment), shipment.serial))

    async def sleep(self) -> None:
        await self._ask(self.actor.sleep.remote())

    async def wake(self) -> None:
        await self._ask(self.actor.wake.remote())

    def close(self) -> None:
        ray.kill(self.actor)

    def serves(self, version: int) -> None:
        """Note that the actor has this version now, however it came."""
        self._version = version

    async def in_time(self, asked: Any, more_s: float = 0.0) -> Any:
        """What the actor answers within `timeout_s`, and `more_s`. SamplerLost when it does not, and it is killed."""
        limit = None if self._timeout_s is None else self._timeout_s + more_s
        try:
            return await asyncio.wait_for(self._ask(asked), limit)
        except TimeoutError as error:
            self.close()
            raise SamplerLost(f"its actor was silent for {limit:g} s, and was killed") from error

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
