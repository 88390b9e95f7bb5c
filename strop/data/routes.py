"""Routes as columns: cut with their text, joined over layers and over pipeline stages, filled where there are none.

A route is what `strop.types.Routes` holds of one token in one layer. Everything is NumPy, except for the gather over
the ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from strop.errors import DataError, EngineError
from strop.types import Bools, Routes

UNKNOWN = -1


def unknown(num_tokens: int, layers: tuple[int, ...], top_k: int) -> Routes:
    """Routes of tokens that nobody has routed yet."""
    return Routes(layers, np.full((num_tokens, len(layers), top_k), UNKNOWN, np.int16))


def cut(routes: Routes, num_tokens: int) -> Routes:
    """The routes of a text's first tokens."""
    return Routes(routes.layers, routes.experts_TLK[:num_tokens])


def of_layers(routes: Routes, layers: Sequence[int]) -> Routes:
    """The routes in these layers alone: a pipeline stage's slice. EngineError for a layer that they do not speak of."""
    if missing := [layer for layer in layers if layer not in routes.layers]:
        raise EngineError(f"routes of layers {list(routes.layers)} say nothing of layers {missing}")
    columns = [routes.layers.index(layer) for layer in layers]
    return Routes(tuple(layers), routes.experts_TLK[:, columns])


def join_texts(routes_S: Sequence[Routes | None], length_S: NDArray[np.int64]) -> Routes | None:
    """The routes of texts that lie end to end; rows that a text has no route for are unknown. None: no text has any.

    DataError when two texts were routed in other layers, or a text has more routes than tokens.
    """
    given = [routes for routes in routes_S if routes is not None]
    if not given:
        return None
    kinds = sorted({(routes.layers, routes.experts_TLK.shape[2]) for routes in given})
    if len(kinds) > 1:
        raise DataError(f"attempts were routed by different models: (layers, experts a token) are {kinds}")
    layers, top_k = kinds[0]
    joined = unknown(int(length_S.sum()), layers, top_k)
    for routes, length, end in zip(routes_S, length_S.tolist(), np.cumsum(length_S).tolist(), strict=True):
        if routes is None:
            continue
        if len(routes) > length:
            raise DataError(f"a text of {length} tokens has routes of {len(routes)}")
        joined.experts_TLK[end - length : end - length + len(routes)] = routes.experts_TLK
    return joined


def expert_counts(routes: Routes, counted_T: Bools, num_experts: int) -> NDArray[np.int64]:
    """How often each expert was taken, [L, E], by the counted tokens that have a route."""
    chosen_NLK = routes.experts_TLK[counted_T].astype(np.int64)
    num_layers = len(routes.layers)
    at_NLK = chosen_NLK + np.arange(num_layers)[:, None] * num_experts
    known = chosen_NLK >= 0
    return np.bincount(at_NLK[known], minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def join_layers(pieces: Sequence[Routes]) -> Routes:
    """The pieces of one batch's routes as one, by layer. A piece may hold no layer.

    EngineError, naming the piece's place (the rank of its stage), when pieces speak of other tokens, of another K, or
    of a layer that an earlier one has.
    """
    full = [piece for piece in pieces if piece.layers]
    if not full:
        raise EngineError("no stage has a layer with experts: there are no routes")
    rows, top_k, owner = len(pieces[0]), full[0].experts_TLK.shape[2], dict[int, int]()
    for rank, piece in enumerate(pieces):
        if len(piece) != rows:
            raise EngineError(f"rank {rank} has routes of {len(piece)} tokens, rank 0 of {rows}")
        if piece.layers and piece.experts_TLK.shape[2] != top_k:
            raise EngineError(f"rank {rank} has routes of {piece.experts_TLK.shape[2]} experts a token, others {top_k}")
        for layer in piece.layers:
            if layer in owner:
                raise EngineError(f"rank {rank} has routes of layer {layer}, and so has rank {owner[layer]}")
            owner[layer] = rank
    layers = [layer for piece in full for layer in piece.layers]
    order = np.argsort(layers)
    joined = np.concatenate([piece.experts_TLK for piece in full], 1)[:, order]
    return Routes(tuple(layers[n] for n in order), joined)


def gather_stages(piece: Routes, group: dist.ProcessGroup | None = None) -> Routes:
    """Every rank's piece as one, on every rank: the stages of a pipeline, each with the layers it runs.

    All ranks of the group must call; one without a layer of experts brings a piece of 0 layers. What does not fit
    together is an EngineError on every rank, which names the rank that differs.
    """
    world = dist.get_world_size(group)
    rows, num_layers, top_k = piece.experts_TLK.shape
    shapes = _gathered(torch.tensor([rows, num_layers, top_k]), world, group).tolist()
    most_T, most_L, most_K = (max(sizes) for sizes in zip(*shapes, strict=True))
    layers = torch.full((most_L,), UNKNOWN)
    layers[:num_layers] = torch.tensor(piece.layers, dtype=torch.int64)
    experts = torch.full((most_T, most_L, most_K), UNKNOWN, dtype=torch.int16)
    experts[:rows, :num_layers, :top_k] = torch.from_numpy(piece.experts_TLK)
    layers_RL = _gathered(layers, world, group)
    # bytes: no collective library takes 16-bit integers
    experts_RTLK = _gathered(experts.view(torch.uint8), world, group).view(torch.int16)
    return join_layers(
        [
            Routes(tuple(layers_RL[rank, :n].tolist()), experts_RTLK[rank, :t, :n, :k].numpy())
            for rank, (t, n, k) in enumerate(shapes)
        ]
    )


def _gathered(mine: torch.Tensor, world: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Every rank's tensor of one shape, stacked by rank."""
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.stack(parts)
