"""The routers of an engine's model around one batch: the batch's routes in, what the routers did out."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from strop.data.packing import Batch
from strop.data.routes import expert_counts
from strop.errors import EngineError
from strop.models.loading import LanguageModel
from strop.models.moe import Router, Routing, Split, find_routers, has_routers
from strop.types import Metrics, Outputs, Want


class Routers:
    """Of one model. They are looked at while a batch runs that needs it, and never otherwise.

    What is wrong with them is an EngineError of the first such batch, not of a model that is trained without.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.known = has_routers(model.module)
        self._found: tuple[Router, ...] = ()
        self._problem = (
            f"{type(model.module).__name__} has no routers that strop knows: it neither gives routes nor replays them "
            "(capabilities.router_replay is false)"
        )
        if self.known and model.device.type != "meta":  # a plan looks at a model without weights
            try:
                self._found = find_routers(model.module)
            except EngineError as error:
                self._problem = str(error)

    @contextmanager
    def around(self, batch: Batch[Any], want: Want, split: Split) -> Generator[Routed]:
        """Bind what the batch gives and what is wanted of it, for its forward and its backward pass.

        `split` says which of the batch's tokens run here. Routes that do not fit are an EngineError on every rank.
        """
        if batch.routes is None and not want.routes and not want.router_logits:
            yield Routed(None, batch, want)
            return
        if not self._found:
            raise EngineError(self._problem)
        routing = Routing(self._found, len(batch), given=batch.routes, keep_logits=want.router_logits, split=split)
        with routing.bound():
            yield Routed(routing, batch, want)


class Routed:
    """What the routers did with one batch."""

    def __init__(self, routing: Routing | None, batch: Batch[Any], want: Want) -> None:
        self._routing = routing
        self._mask_T = batch.mask_T
        self._want = want

    def into(self, outputs: Outputs) -> Outputs:
        """The outputs with what was wanted of the routers."""
        if self._routing is None:
            return outputs
        self._routing.check()
        if self._want.routes:
            taken = self._routing.taken()
            counts_LE = expert_counts(taken, self._mask_T.cpu().numpy(), self._routing.num_experts)
            outputs = replace(outputs, routes=taken, expert_counts_LE=torch.from_numpy(counts_LE))
        if self._want.router_logits:
            logits_TLE = self._routing.logits_TLE()
            shares_TLE = self._routing.shares_TLE(logits_TLE)
            outputs = replace(outputs, router_logits_TLE=logits_TLE, router_shares_TLE=shares_TLE)
        return outputs

    def metrics(self) -> Metrics:
        return {} if self._routing is None else self._routing.metrics()
