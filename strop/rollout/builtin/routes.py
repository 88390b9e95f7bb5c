"""Which experts each token in the cache took: a row beside each token's keys and values, filled as passes run.

    L layers with routers    K experts a token    N slots of the cache

So whoever shares pages shares their routes, and a request takes its own along when it leaves its row.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from strop.models.loading import LanguageModel
from strop.models.moe import Routing, find_routers
from strop.ops.paged import PAGE
from strop.types import Routes


class RouteCache:
    """Raises EngineError when the model's routers are not known."""

    def __init__(self, model: LanguageModel, num_pages: int) -> None:
        self._routers = find_routers(model.module)
        self._layers = tuple(router.layer for router in self._routers)
        shape = (num_pages * PAGE, len(self._routers), self._routers[0].top_k)
        self._experts_NLK = torch.full(shape, -1, dtype=torch.int16, device=model.device)

    @property
    def num_bytes(self) -> int:
        return self._experts_NLK.nbytes

    @contextmanager
    def recording(self, slot_T: Tensor) -> Generator[None]:
        """Keep what the routers choose in the pass over the tokens that these slots are for."""
        routing = Routing(self._routers, len(slot_T))
        with routing.bound():
            yield
        routing.check()
        self._experts_NLK[slot_T] = routing.taken_TLK()

    def copy_page(self, src: int, dst: int) -> None:
        rows = self._experts_NLK.unflatten(0, (-1, PAGE))
        rows[dst] = rows[src]

    def of(self, pages: Sequence[int], count: int) -> Routes:
        """The routes of the first `count` tokens of a text with these pages."""
        at = (np.asarray(pages, np.int64)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:count]
        rows = self._experts_NLK[torch.from_numpy(at).to(self._experts_NLK.device)]
        return Routes(self._layers, rows.cpu().numpy())
