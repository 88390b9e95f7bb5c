"""An Engine over many ranks, in plain sight: split the batches, call every rank, put the answers together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from strop.config.adapter import AdapterConfig
from strop.config.parallel import ParallelConfig
from strop.data.dummy import dummy_of
from strop.data.packing import Batch
from strop.engines.base import Capabilities, ForwardBackward, Loss, OptimOutcome, OptimParams
from strop.models.experts import Form
from strop.runtime.ranks import WHOLE, Ranks
from strop.types import Outputs, Want, merge_metrics

InputsT = TypeVar("InputsT")


class RemoteEngine:
    """Ranks that work on different batches are lanes; the ranks of a lane get the same ones and answer alike.

    Lane d of D takes `batches[d::D]`, filled up with batches that train nothing where the number does not divide.
    """

    def __init__(self, ranks: Ranks, parallel: ParallelConfig, name: str = WHOLE) -> None:
        self._ranks = ranks
        self._parallel = parallel
        self._name = name  # of the adapter that this engine trains
        self.capabilities: Capabilities = self._at_once("capabilities")
        self.data_parallel = parallel.lanes

    async def forward(self, batches: list[Batch[InputsT]], want: Want = Want()) -> list[Outputs]:  # noqa: B008
        if not batches:
            return []
        lanes = self._deal(batches)
        found = await self._call("forward", [(lane, want) for lane in self._of_each_rank(lanes)])
        return self._collect([found[rank] for rank in self._firsts()], len(batches))

    async def forward_backward(
        self,
        batches: list[Batch[InputsT]],
        loss: Loss[InputsT],
        want: Want = Want(),  # noqa: B008
    ) -> ForwardBackward:
        if not batches:
            return ForwardBackward(outputs=[], metrics={})
        lanes = self._deal(batches)
        found = await self._call("forward_backward", [(lane, loss, want) for lane in self._of_each_rank(lanes)])
        learned: list[ForwardBackward] = [found[rank] for rank in self._firsts()]
        return ForwardBackward(
            outputs=self._collect([one.outputs for one in learned], len(batches)),
            metrics=merge_metrics([one.metrics for one in learned]),
        )

    async def zero_grad(self) -> None:
        await self._all("zero_grad")

    async def optim_step(self, params: OptimParams) -> OptimOutcome:
        return (await self._all("optim_step", params))[0]

    def weights(self, form: Form = Form.SAVED) -> Iterator[tuple[str, Tensor]]:
        self._at_once("start_weights", form)
        while bucket := self._at_once("next_weights"):
            yield from bucket

    def lend_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights(Form.PACKED)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._at_once("start_adapter_weights")
        while bucket := self._at_once("next_adapter_weights"):
            yield from bucket

    def adapter(self, name: str, config: AdapterConfig, *, trainable: bool = True) -> RemoteEngine:
        self._at_once("adapter", name, config, trainable)
        return RemoteEngine(self._ranks, self._parallel, name)

    async def save(self, folder: Path) -> None:
        await self._all("save", folder)

    async def load(self, folder: Path) -> None:
        await self._all("load", folder)

    async def resident(self, on_device: bool) -> None:
        await self._all("resident", on_device)

    def close(self) -> None:
        self._ranks.close()

    def _at_once(self, method: str, *arguments: Any) -> Any:
        """Call all ranks and wait; what the first one says."""
        return self._ranks.call(method, [arguments] * self._ranks.size, self._name)[0]

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call(method, [arguments] * self._ranks.size)

    async def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await asyncio.to_thread(self._ranks.call, method, arguments, self._name)

    def _deal(self, batches: list[Batch[InputsT]]) -> list[list[Batch[InputsT]]]:
        lanes = self._parallel.lanes
        short = -len(batches) % lanes
        filled = [*batches, *([dummy_of(batches[-1])] * short)]
        return [filled[lane::lanes] for lane in range(lanes)]

    def _of_each_rank(self, lanes: list[list[Batch[InputsT]]]) -> list[list[Batch[InputsT]]]:
        """Ranks are counted replica by replica, shard by shard, the ranks of one lane together."""
        return [lane for lane in lanes for _ in range(self._parallel.lane)]

    def _firsts(self) -> range:
        """One rank of each lane."""
        return range(0, self._ranks.size, self._parallel.lane)

    def _collect(self, of_lanes: list[list[Outputs]], count: int) -> list[Outputs]:
        lanes = len(of_lanes)
        return [of_lanes[i % lanes][i // lanes] for i in range(count)]
