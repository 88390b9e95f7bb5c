"""Samplers in Ray actors that get their weights by a broadcast or from a folder, and not by Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from strop.rollout.ray import Host, RaySampler, address_here
from strop.weights.broadcast import Place, meet, open_store
from strop.weights.collective import Broken, Receiver
from strop.weights.disk import read_version


class ListeningHost(Host):
    """Inside the actor: a sampler, and its end of the group."""

    receiver: Receiver | None = None
    store: TCPStore | None = None  # where the group has met

    async def open_store(self) -> Place:
        """Where the members of a new group can meet."""
        address = address_here()
        self.store = open_store(address)
        return address, self.store.port

    async def join(self, place: Place, rank: int, size: int, timeout_s: float) -> None:
        self.receiver = Receiver(await asyncio.to_thread(meet, place, rank, size, timeout_s))

    async def receive(self) -> None:
        if self.receiver is None:
            raise Broken("the sampler is in no group")
        try:
            await self.receiver.load(self.sampler)
        except Broken:
            await self.hang_up()
            raise

    async def hang_up(self) -> None:
        """Leave the group, if in one: the others learn of it at once, where they would wait else."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class ListeningSampler(RaySampler):
    """A sampler in an actor that weights can be broadcast to."""

    HOST = ListeningHost

    async def hang_up(self) -> None:
        await self.in_time(self.actor.hang_up.remote())

    async def open_store(self) -> Place:
        return await self.in_time(self.actor.open_store.remote())

    async def join(self, place: Place, rank: int, size: int, timeout_s: float) -> None:
        await self.in_time(self.actor.join.remote(place, rank, size, timeout_s))

    async def receive(self) -> None:
        """Take the version that is sent now, and serve it."""
        await self._ask(self.actor.receive.remote())


class ReadingHost(Host):
    """Inside the actor: a sampler that reads its weights from a folder."""

    async def read(self, folder: Path, version: int) -> None:
        weights = await asyncio.to_thread(read_version, folder, version)
        await self.sampler.load_weights(iter(weights.items()), version)


class ReadingSampler(RaySampler):
    """A sampler in an actor that can be sent to a folder for its weights."""

    HOST = ReadingHost

    async def read(self, folder: Path, version: int) -> None:
        await self.in_time(self.actor.read.remote(folder, version))
        self.serves(version)
