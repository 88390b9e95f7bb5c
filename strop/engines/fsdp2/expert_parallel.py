"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to theirs and back.

    T K rows, one for each expert of each token, sorted by expert -> exchange -> rows of this rank's experts
    -> the family's own experts -> exchange -> T K rows, weighted and added up where their tokens are

Routers, shared experts and the weights of a choice stay with the tokens; only rows travel. Every rank makes the same
exchanges, three in a forward pass and two in a backward pass, whatever its tokens chose: also with one dummy token, and
when no token chose its experts.

N ranks share E experts, rank n holds experts n E / N to (n + 1) E / N. R rows arrive at a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from strop.config.parallel import ParallelConfig
from strop.errors import ConfigError

EXPERTS = frozenset(
    {
        "Qwen3MoeExperts",
        "Qwen3NextExperts",
        "Qwen3_5MoeExperts",
        "Qwen3VLMoeTextExperts",
        "Qwen3OmniMoeThinkerTextExperts",
        "GptOssExperts",
        "DeepseekV3Experts",
        "Glm4MoeExperts",
        "MiniMaxM2Experts",
        "MixtralExperts",
    }
)
"""Classes of transformers that hold a layer's experts stacked, [E, ...] each, and take (rows, ids, weights)."""


def has_experts(module: nn.Module) -> bool:
    """Whether experts of a known kind are anywhere in it. Looks at names alone."""
    return any(type(part).__name__ in EXPERTS for part in module.modules())


def check_experts(module: nn.Module, config: ParallelConfig) -> None:
    """ConfigError when the experts of this model cannot be dealt to the ranks. Looks at shapes alone."""
    size = config.experts
    if size == 1:
        return
    name, problems, asked = type(module).__name__, list[str](), f"engine.parallel.experts is {size}"
    if config.shards % size:
        problems.append(
            f"{asked}: it must divide the {config.shards} ranks of data {config.data} x "
            f"sequence {config.sequence}, which hold each expert once"
        )
    if config.tensor > 1:
        problems.append(
            f"{asked} and tensor {config.tensor}: experts are not dealt to ranks that share heads; set one of them to 1"
        )
    stacks = list(_stacks(module))
    unknown = sorted({type(part).__name__ for part in stacks} - EXPERTS)
    if unknown:
        problems.append(
            f"{asked}, but strop cannot deal {', '.join(unknown)} of {name} to ranks; it "
            f"deals {', '.join(sorted(EXPERTS))}: set it to 1"
        )
    elif not stacks:
        problems.append(f"{asked}, but {name} has no experts: set it to 1")
    for number in sorted({number_of_experts(part) for part in stacks if type(part).__name__ in EXPERTS}):
        if number % size:
            problems.append(f"{asked}: it must divide the {number} experts of {name}")
    if problems:
        raise ConfigError(*problems)


def _stacks(module: nn.Module) -> Iterator[nn.Module]:
    """What holds experts: modules of known classes, and whatever is called `experts`."""
    for path, part in module.named_modules():
        if type(part).__name__ in EXPERTS or path.rsplit(".", 1)[-1] == "experts":
            yield part


def number_of_experts(part: nn.Module) -> int:
    """E, of a stack of a known class: the first axis of each of its parameters."""
    return len(next(part.parameters(recurse=False)))


def share_experts(module: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of the one-dimensional `mesh` its own experts of every layer; returns the modules that hold them.

    Their parameters become DTensors that are cut along E, and their forward the exchange. `check_experts` was asked.
    """
    shared: list[nn.Module] = []
    for part in list(_stacks(module)):
        number = number_of_experts(part)
        for name, whole in list(part.named_parameters(recurse=False)):
            own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            part.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))
        part.forward = _Dealt(part, type(part), mesh.get_group(), number)
        shared.append(part)
    return shared


def even_axis(parameter: nn.Parameter, ranks: int) -> Shard:
    """Along which axis ranks with the same experts cut them: the first that gives each as much, else by experts."""
    sizes = _local(parameter).shape
    return Shard(next((axis for axis, n in enumerate(sizes) if n % ranks == 0), 0))


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """The forward of a stack of experts of which this rank has some."""

    module: nn.Module
    kind: type[nn.Module]  # its class before FSDP made another of it
    group: ProcessGroup
    num_experts: int  # E, of all ranks

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def __call__(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum [T, D] over each token's experts, in the dtype of `hidden_TD`."""
        top_k = ids_TK.shape[1]
        order = ids_TK.flatten().argsort(stable=True)  # [T K]
        counts_NE = torch.bincount(ids_TK.flatten(), minlength=self.num_experts).view(self.size, -1)
        arriving_NE = torch.empty_like(counts_NE)  # from each rank, to each expert of this one
        dist.all_to_all_single(arriving_NE, counts_NE, group=self.group)
        sent, got = counts_NE.sum(1).tolist(), arriving_NE.sum(1).tolist()
        rows_RD = _Exchange.apply(hidden_TD[order // top_k], got, sent, self.group)
        own_ids = torch.arange(counts_NE.shape[1], device=ids_TK.device).repeat(self.size)
        computed_RD = self._compute(rows_RD, own_ids.repeat_interleave(arriving_NE.flatten()))
        returned = _Exchange.apply(computed_RD, sent, got, self.group)  # [T K, D], as they were sent
        each_TKD = returned[order.argsort()].unflatten(0, (-1, top_k))
        return (each_TKD * weights_TK[..., None]).sum(1).to(hidden_TD.dtype)

    def _compute(self, rows_RD: Tensor, ids_R: Tensor) -> Tensor:
        """What each row's expert, counted from this rank's first, makes of it: [R, D], by the family's own code."""
        own = {name: _local(parameter) for name, parameter in self.module.named_parameters(recurse=False)}
        if not len(rows_RD):
            return _Untouched.apply(rows_RD, *own.values())
        stack = self.kind.__new__(self.kind)  # looks at this rank's experts as if there were no others
        vars(stack).update(vars(self.module) | {"_parameters": own, "num_experts": self.num_experts // self.size})
        return self.kind.forward(stack, rows_RD, ids_R[:, None], rows_RD.new_ones((len(rows_RD), 1)))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Exchange(torch.autograd.Function):
    """Rows to the ranks: `sent[n]` of them, in order, to rank n, and `got[n]` from it; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, got: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
        ctx.got, ctx.sent, ctx.group = got, sent, group
        received = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), got, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], ctx.sent, ctx.got, ctx.group), None, None, None


class _Untouched(torch.autograd.Function):
    """No rows through experts that nobody chose: the exchanges stay in the graph, and the gradients are zeros.

    Ranks that hold the same experts add up their gradients, so each must have some.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *experts: Tensor) -> Tensor:
        ctx.save_for_backward(*experts)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grads[0], *(torch.zeros_like(expert) if wanted else None for expert, wanted in needed)
