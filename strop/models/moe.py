"""Routers of mixture-of-experts models: which experts each token takes, recorded and replayed.

    a batch's `Routes`, or the wish for some -> a `Routing` of one forward pass -> what the routers did

A router scores the experts of each token and picks the K best. Two copies of a model that differ in rounding pick
differently for some tokens, and then they are two policies. Replay takes the picks from the batch and the weights from
the scores of the moment, by the family's own formula: the same experts run, and the router still learns.

Nothing is global: a `Routing` belongs to one forward pass and its recomputation, and while it is `bound` the routers of
that one model look at it. Outside of that the model is as transformers made it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from strop.errors import EngineError
from strop.types import Metric, Metrics, Reduction, Routes

Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]

TEXT_BRANCHES = ("thinker", "model", "language_model", "text_model", "decoder")
"""Names of the children that lead to the decoder of texts; vision and audio towers, talkers and heads that look further
ahead are their siblings."""
TEXT_CONFIGS = ("thinker_config", "text_config", "language_config", "model_config")


def _softmax(module: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Softmax over all experts; the K chosen ones share 1, unless the model says otherwise (Qwen3-MoE, -Next, -3.5)."""
    picked_TK = torch.softmax(logits_TE, -1, dtype=torch.float).gather(1, ids_TK)
    if vars(module).get("norm_topk_prob", True):
        picked_TK = picked_TK / picked_TK.sum(-1, keepdim=True)
    return picked_TK.to(logits_TE.dtype)


def _wide_softmax(module: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """The same, and float32 whatever the model's format is (Mixtral)."""
    picked_TK = torch.softmax(logits_TE.float(), -1).gather(1, ids_TK)
    return picked_TK / picked_TK.sum(-1, keepdim=True)


def _softmax_of_chosen(module: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Softmax over the K chosen experts alone (GPT-OSS)."""
    return torch.softmax(logits_TE.gather(1, ids_TK), 1, dtype=logits_TE.dtype)


def _scaled_sigmoid(module: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Sigmoids of the K chosen, scaled; groups and a bias decide who is chosen, not what they count (DeepSeek-V3,
    GLM-4.5)."""
    picked_TK = logits_TE.sigmoid().gather(1, ids_TK)
    if vars(module)["norm_topk_prob"]:
        picked_TK = picked_TK / (picked_TK.sum(-1, keepdim=True) + 1e-20)
    return picked_TK * vars(module)["routed_scaling_factor"]


def _sigmoid(module: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Sigmoids of the K chosen, which share 1 (MiniMax-M2)."""
    picked_TK = torch.sigmoid(logits_TE.float()).gather(1, ids_TK)
    return picked_TK / picked_TK.sum(-1, keepdim=True)


ROUTERS: dict[str, Weigh] = {
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen3NextTopKRouter": _softmax,
    "Qwen3_5MoeTopKRouter": _softmax,
    "Qwen3VLMoeTextTopKRouter": _softmax,
    "Qwen3OmniMoeThinkerTextTopKRouter": _softmax,
    "MixtralTopKRouter": _wide_softmax,
    "GptOssTopKRouter": _softmax_of_chosen,
    "DeepseekV3TopkRouter": _scaled_sigmoid,
    "Glm4MoeTopkRouter": _scaled_sigmoid,
    "MiniMaxM2TopKRouter": _sigmoid,
}
"""Routers by their class's name: they give (logits [T, E], weights [T, K], ids [T, K]). And how they weigh a choice."""
BLOCKS: dict[str, Weigh] = {"DeepseekV3MoE": _scaled_sigmoid, "Glm4MoeMoE": _scaled_sigmoid}
"""Before transformers 5.10 these blocks choose themselves, in a method: logits [T, E] -> (ids [T, K], weights)."""
CHOOSES = "route_tokens_to_experts"


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Where one decoder layer chooses its experts."""

    layer: int
    module: nn.Module
    method: str  # the method of `module` that chooses
    weigh: Weigh
    num_experts: int
    top_k: int

    @property
    def native(self) -> Callable[..., tuple[Tensor, ...]]:
        """The method as it stands."""
        module = self.module
        return module.forward if self.method == "forward" else module.route_tokens_to_experts  # pyright: ignore


def has_routers(module: nn.Module) -> bool:
    """Whether routers of a known kind are anywhere in it. Looks at names alone."""
    return any(type(part).__name__ in ROUTERS for part in module.modules())


def find_routers(module: PreTrainedModel) -> tuple[Router, ...]:
    """The routers that run when the model reads a text, by decoder layer.

    Each class's formula is compared with what the router itself gives, on random input. Raises EngineError, naming the
    layers, when there are none, two in one layer, or fewer than the configuration says.
    """
    name = type(module).__name__
    config = text_config(module.config)
    found: dict[int, Router] = {}
    kinds: dict[str, int] = {}
    for layer, block in enumerate(_decoder_layers(module.base_model)[: config.num_hidden_layers]):
        parts = [part for part in block.modules() if _method(part) is not None]
        if len(parts) > 1:
            raise EngineError(f"{name} has {len(parts)} routers in layer {layer}: which of them chooses is not clear")
        for part in parts:
            kind = type(part).__name__
            if kind not in kinds:
                kinds[kind] = _compare(part, layer)
            method, experts = _method(part) or "", _num_experts(part)
            found[layer] = Router(layer, part, method, (ROUTERS | BLOCKS)[kind], experts, kinds[kind])
    expected = _sparse_layers(config)
    if not found:
        raise EngineError(f"{name} has no router that strop knows in its layers; it knows {', '.join(sorted(ROUTERS))}")
    if sorted(found) != expected:
        raise EngineError(f"{name} has routers in layers {sorted(found)}, but its configuration says {expected}")
    return tuple(found[layer] for layer in sorted(found))


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that speaks of the decoder of texts: the first in breadth that counts layers."""
    queue, seen = [config], set[int]()
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        own = vars(current)
        if own.get("num_hidden_layers") is not None:
            return current
        queue += [own[branch] for branch in TEXT_CONFIGS if own.get(branch) is not None]
    raise EngineError(f"{type(config).__name__} does not say how many layers read texts")


def _decoder_layers(module: nn.Module) -> nn.ModuleList:
    """The layers that run: down the branches that read texts, to the first `layers`."""
    current = module
    while True:
        children = dict(current.named_children())
        layers = children.get("layers")
        if isinstance(layers, nn.ModuleList):
            return layers
        branch = next((name for name in TEXT_BRANCHES if name in children), None)
        if branch is None:
            raise EngineError(f"{type(module).__name__}: no decoder layers are found on the way to {sorted(children)}")
        current = children[branch]


def _sparse_layers(config: PretrainedConfig) -> list[int]:
    """Layers with experts, as the configuration says it; every family has words of its own for them."""
    own = vars(config)
    dense: list[int] = own.get("mlp_only_layers") or []
    step: int = own.get("decoder_sparse_step") or 1
    first = own.get("first_k_dense_replace") or 0
    return [i for i in range(first, own["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]


def _method(part: nn.Module) -> str | None:
    """The method that chooses, when this module does."""
    kind = type(part).__name__
    if kind in BLOCKS:
        return CHOOSES if CHOOSES in vars(type(part)) else None
    if kind not in ROUTERS or (ROUTERS[kind] is _scaled_sigmoid and "num_group" not in vars(part)):
        return None  # a grouped router that does not know the groups leaves the choice to its block
    return "forward"


def _num_experts(part: nn.Module) -> int:
    gate = part if type(part).__name__ in ROUTERS else part.get_submodule("gate")
    return len(gate.get_parameter("weight"))


@torch.no_grad()
def _compare(part: nn.Module, layer: int) -> int:
    """Check the formula on random scores, and find K. EngineError when it does not give the router's own weights."""
    kind = type(part).__name__
    gate = part if kind in ROUTERS else part.get_submodule("gate")
    weight_ED = gate.get_parameter("weight")
    x_TD = torch.randn(5, weight_ED.shape[1], generator=torch.Generator().manual_seed(0))
    x_TD = x_TD.to(weight_ED.device, weight_ED.dtype)
    if kind in BLOCKS:
        logits_TE = gate(x_TD)
        ids_TK, weights_TK = part.route_tokens_to_experts(logits_TE)  # pyright: ignore
    else:
        bias = (weight_ED.new_zeros(len(weight_ED)),) if ROUTERS[kind] is _sigmoid else ()
        logits_TE, weights_TK, ids_TK = part(x_TD, *bias)
    ours_TK = (ROUTERS | BLOCKS)[kind](part, logits_TE, ids_TK)
    if ours_TK.dtype != weights_TK.dtype or not torch.equal(ours_TK, weights_TK):
        raise EngineError(
            f"strop's formula for the weights of {kind} (layer {layer}) does not give the router's own; routes cannot "
            "be replayed with this version of transformers, report it"
        )
    return ids_TK.shape[1]


class Split(Protocol):
    """How the T tokens of a pass are dealt to ranks that each route some of them, in order. All ranks call alike."""

    def own(self, column_T: Tensor, fill: float) -> Tensor:
        """This rank's rows of a column; `fill` in those that only make all ranks' numbers equal."""
        ...

    def gather(self, rows: Tensor, total: int) -> Tensor:
        """Every rank's rows as the column [T] of `total` tokens, on every rank."""
        ...

    def add(self, numbers: Tensor) -> Tensor:
        """What each rank counted in its own rows, summed."""
        ...


class Whole:
    """All tokens are routed here."""

    def own(self, column_T: Tensor, fill: float) -> Tensor:
        return column_T

    def gather(self, rows: Tensor, total: int) -> Tensor:
        return rows

    def add(self, numbers: Tensor) -> Tensor:
        return numbers


class Routing:
    """What the routers are told and what they did, in one forward pass over T tokens and its recomputation.

    With `given`, rows that hold a route take it; rows of -1 have none, are routed by the model, and are counted. Raises
    EngineError for routes that do not fit: other tokens, layers left out, another K, ids that no expert has, an expert
    twice in a row (rows without a route hold -1, not zeros).

    `given`, and what the methods below return, are of all T tokens, whatever part of them `split` leaves to this rank.
    """

    def __init__(
        self,
        routers: tuple[Router, ...],
        num_tokens: int,
        *,
        given: Routes | None = None,
        keep_logits: bool = False,
        split: Split = Whole(),  # noqa: B008
    ) -> None:
        self._routers = routers
        self._num_tokens = num_tokens
        self._num_rows = len(split.own(torch.empty(num_tokens, dtype=torch.bool), False))
        self._keep_logits = keep_logits
        self._split = split
        self._given_LTK: dict[int, Tensor] = {}
        if given is not None:
            device = next(routers[0].module.parameters()).device
            experts_TLK = split.own(torch.from_numpy(_checked(given, routers, num_tokens)), -1).to(device)
            self._given_LTK = {router.layer: experts_TLK[:, n] for n, router in enumerate(routers)}
        self._ids: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self._replayed: Tensor | float = 0.0
        self._moved: Tensor | float = 0.0

    @contextmanager
    def bound(self) -> Generator[None]:
        """The model's routers look here. Bind around a forward pass and the backward pass that may run it again."""
        with ExitStack() as stack:
            for router in self._routers:
                own = vars(router.module)  # where a method of this instance alone stands
                was = own.get(router.method)
                if isinstance(was, _Bound):
                    raise EngineError(f"the router of layer {router.layer} takes part in another pass already")
                own[router.method] = _Bound(router, router.native, self)
                stack.callback(_restore, own, router.method, was)
            yield

    def choose(self, router: Router, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, ids) of one layer. When it runs again it does the same again, and nothing is counted twice."""
        layer = router.layer
        if len(ids_TK) != self._num_rows:
            raise EngineError(f"layer {layer} routes {len(ids_TK)} tokens in a pass over {self._num_rows}")
        first = layer not in self._ids
        if layer in self._given_LTK:
            given_TK = self._given_LTK[layer].long()
            known_T1 = given_TK[:, :1] >= 0
            if first:
                same_T1 = (given_TK.sort(-1)[0] == ids_TK.sort(-1)[0]).all(-1, keepdim=True)
                self._replayed = self._replayed + known_T1.sum()
                self._moved = self._moved + (known_T1 & ~same_T1).sum()
            ids_TK = torch.where(known_T1, given_TK, ids_TK)
            weights_TK = router.weigh(router.module, logits_TE, ids_TK)
        if first:
            self._ids[layer] = ids_TK.detach()
            if self._keep_logits:
                self._logits[layer] = logits_TE
        return weights_TK, ids_TK

    def check(self) -> None:
        """EngineError when the pass left a router out."""
        silent = [router.layer for router in self._routers if router.layer not in self._ids]
        if silent:
            raise EngineError(f"the routers of layers {silent} did not run in this pass: they are not the model's own")

    def taken_TLK(self) -> Tensor:
        """The experts that were taken: int16 [T, L, K], where the model is."""
        taken_TLK = torch.stack([self._ids[router.layer] for router in self._routers], 1)
        return self._split.gather(taken_TLK.int(), self._num_tokens).to(torch.int16)  # 16 bits do not travel

    def taken(self) -> Routes:
        """The experts that were taken, on the host."""
        return Routes(tuple(router.layer for router in self._routers), self.taken_TLK().cpu().numpy())

    @property
    def num_experts(self) -> int:
        """Of the layer that has most."""
        return max(router.num_experts for router in self._routers)

    def logits_TLE(self) -> Tensor:
        """What the routers scored, with the graph of the pass: before any softmax, [T, L, E], float32 or wider."""
        logits_TLE = torch.stack([_wide(self._logits[router.layer]) for router in self._routers], 1)
        return self._split.gather(logits_TLE, self._num_tokens)

    def shares_TLE(self, logits_TLE: Tensor) -> Tensor:
        """The same as parts of 1 over a token's experts: a softmax, or sigmoids over their sum, by the family."""
        sigmoids = self._routers[0].weigh in (_scaled_sigmoid, _sigmoid)
        return torch.softmax(F.logsigmoid(logits_TLE) if sigmoids else logits_TLE, -1)

    def metrics(self) -> Metrics:
        """How many of all choices were replayed; and of those, how many the model would have made otherwise."""
        if not self._given_LTK:
            return {}
        replayed, moved = self._split.add(torch.stack([torch.as_tensor(self._replayed), torch.as_tensor(self._moved)]))
        return {
            "router/replayed": Metric(Reduction.MEAN, replayed, self._num_tokens * len(self._routers)),
            "router/disagreement": Metric(Reduction.MEAN, moved, replayed),
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """Stands in the place of the method that chooses."""

    router: Router
    native: Callable[..., tuple[Tensor, ...]]
    routing: Routing

    def __call__(self, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        if self.router.method == CHOOSES:
            ids_TK, weights_TK = self.native(x)
            weights_TK, ids_TK = self.routing.choose(self.router, x, weights_TK, ids_TK)
            return ids_TK, weights_TK
        logits_TE, weights_TK, ids_TK = self.native(x, *more)
        return logits_TE, *self.routing.choose(self.router, logits_TE, weights_TK, ids_TK)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _restore(own: dict[str, Any], method: str, was: object) -> None:
    if was is None:
        del own[method]
    else:
        own[method] = was


def _checked(given: Routes, routers: tuple[Router, ...], num_tokens: int) -> NDArray[np.int16]:
    """The routes' columns of these routers. Columns of other layers (a sampler may report dense ones) are not used."""
    layers, (rows, _, top_k) = given.layers, given.experts_TLK.shape
    if rows != num_tokens:
        raise EngineError(f"routes of {rows} tokens were given with a batch of {num_tokens}")
    if missing := [router.layer for router in routers if router.layer not in layers]:
        raise EngineError(f"the routes speak of layers {list(layers)}; those of layers {missing} are missing")
    columns = given.experts_TLK
    if layers != tuple(router.layer for router in routers):
        columns = columns[:, [layers.index(router.layer) for router in routers]]
    low_TL, high_TL = columns.min(-1), columns.max(-1)
    for n, router in enumerate(routers):
        where = f"the routes of layer {router.layer}"
        if top_k != router.top_k:
            raise EngineError(f"{where} name {top_k} experts for each token, its router chooses {router.top_k}")
        if len(high_TL) and not -1 <= low_TL[:, n].min() <= high_TL[:, n].max() < router.num_experts:
            ids = sorted({int(low_TL[:, n].min()), int(high_TL[:, n].max())})
            raise EngineError(
                f"{where} name experts {ids}; there are {router.num_experts}, and -1 says that none is known"
            )
    ordered = np.sort(columns, -1)
    twice_TL = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & (high_TL >= 0)
    if (bad_TL := twice_TL | ((low_TL < 0) & (high_TL >= 0))).any():
        t, n = (int(axis[0]) for axis in np.nonzero(bad_TL))
        raise EngineError(
            f"the route of token {t} in layer {routers[n].layer} is {columns[t, n].tolist()}: no router chooses that. "
            "A token without a route holds -1 everywhere"
        )
    return np.ascontiguousarray(columns)
