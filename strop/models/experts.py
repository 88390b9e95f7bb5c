"""Weights of experts between a model's own form and that of checkpoints: named tensors in, named tensors out.

transformers keeps a layer's experts stacked: `experts.gate_up_proj` [E, 2I, D], `experts.down_proj` [E, D, I]. Most
checkpoints hold a matrix for each expert and projection instead; GPT-OSS holds the stacks, [E, D, 2I] and [E, I, D],
with biases, gate and up columns taking turns. Everything else passes under its checkpoint name.

    E experts    I intermediate size    D hidden size
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from strop.errors import EngineError

Named = tuple[str, Tensor]


class Form(StrEnum):
    """How a receiver takes weights."""

    SAVED = "saved"  # the names and tensors of a folder that `save_pretrained` writes: what other libraries read
    STREAMED = "streamed"  # one tensor for each expert and projection, whatever folders of the family have
    PACKED = "packed"  # the model's own names and tensors, a layer's experts in one: for the same model elsewhere


class Order(StrEnum):
    """How the rows of gate and up lie in one matrix."""

    CONCATENATED = "concatenated"  # gate gate up up
    INTERLEAVED = "interleaved"  # gate up gate up


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family's checkpoints call the parts of one expert, and its block of experts."""

    gate: str
    up: str
    down: str
    block: str = "mlp"


_PROJ = _Names("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_NUMBERED = _Names("w1.weight", "w3.weight", "w2.weight", block="block_sparse_moe")
FAMILIES: dict[str, _Names | None] = {
    "qwen3_moe": _PROJ,
    "qwen3_next": _PROJ,
    "qwen3_5_moe_text": _PROJ,
    "deepseek_v3": _PROJ,
    "glm4_moe": _PROJ,
    "mixtral": _NUMBERED,
    "minimax_m2": _NUMBERED,
    "gpt_oss": None,  # the stacks themselves
}
STACKED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?")


def join_gate_up(gate: Tensor, up: Tensor, order: Order, dim: int) -> Tensor:
    """Both in one matrix, along `dim`, which counts from 0."""
    if order is Order.CONCATENATED:
        return torch.cat([gate, up], dim)
    return torch.stack([gate, up], dim + 1).flatten(dim, dim + 1)


def split_gate_up(both: Tensor, order: Order, dim: int) -> tuple[Tensor, Tensor]:
    """(gate, up), as views."""
    if order is Order.CONCATENATED:
        gate, up = both.chunk(2, dim)
    else:
        gate, up = both.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return gate, up


def export_experts(model_type: str, weights: Iterable[Named], form: Form) -> Iterator[Named]:
    """A model's weights as its checkpoints have them, experts in the form that the receiver asks for.

    Tensors are views of the given ones. EngineError for a family whose checkpoints strop does not know.
    """
    names = _names(model_type)
    if form is Form.PACKED:
        yield from weights
        return
    for name, tensor in weights:
        stacked = STACKED.fullmatch(name)
        if stacked is None:
            yield _outward(name, names), tensor
        elif form is Form.SAVED and names is None:
            yield name, tensor
        else:
            yield from _streamed(stacked, names, tensor)


def _streamed(stacked: re.Match[str], names: _Names | None, tensor: Tensor) -> Iterator[Named]:
    layer, projection, bias = stacked.groups()
    for e, one in enumerate(tensor):
        if names is None:
            yield f"{layer}.mlp.experts.{e}.{projection}{bias or ''}", one
        elif projection == "down_proj":
            yield f"{layer}.{names.block}.experts.{e}.{names.down}", one
        else:
            gate, up = split_gate_up(one, Order.CONCATENATED, 0)
            yield f"{layer}.{names.block}.experts.{e}.{names.gate}", gate
            yield f"{layer}.{names.block}.experts.{e}.{names.up}", up


def import_experts(model_type: str, weights: Iterable[Named], num_experts: int) -> Iterator[Named]:
    """A checkpoint's weights under the model's own names, whichever form its experts are in and in any order.

    A stack is joined as soon as its last expert has come. EngineError for an expert that the model does not have, one
    that comes twice, and, at the end, for those that never came.
    """
    names = _names(model_type)
    waiting: dict[str, dict[tuple[int, str], Tensor]] = {}
    block = names.block if names else "mlp"
    single = re.compile(rf"(.*)\.{block}\.experts\.(\d+)\.(.+)")
    for name, tensor in weights:
        one = single.fullmatch(name)
        if one is None:
            yield _inward(name, names), tensor
            continue
        layer, expert, part = one[1], int(one[2]), one[3]
        stack, parts = _stack_of(name, part, names)
        if expert >= num_experts:
            raise EngineError(f"{name}: the model has experts 0 to {num_experts - 1}")
        held = waiting.setdefault(f"{layer}.mlp.experts.{stack}", {})
        if (expert, part) in held:
            raise EngineError(f"{name} comes twice")
        held[expert, part] = tensor
        if len(held) == num_experts * len(parts):
            whole = waiting.pop(f"{layer}.mlp.experts.{stack}")
            yield f"{layer}.mlp.experts.{stack}", _joined(whole, parts, num_experts)
    if waiting:
        stack, held = next(iter(waiting.items()))
        have = sorted({expert for expert, _ in held})
        raise EngineError(f"{stack}: {num_experts} experts are needed, and only parts of {have} came")


def _joined(held: dict[tuple[int, str], Tensor], parts: tuple[str, ...], num_experts: int) -> Tensor:
    each = [[held[expert, part] for expert in range(num_experts)] for part in parts]
    if len(parts) == 1:
        return torch.stack(each[0])
    return torch.stack([join_gate_up(gate, up, Order.CONCATENATED, 0) for gate, up in zip(*each, strict=True)])


def _stack_of(name: str, part: str, names: _Names | None) -> tuple[str, tuple[str, ...]]:
    """The stack that a part of an expert belongs to, and all the parts that one expert has in it."""
    if names is None:
        if part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            return part, (part,)
    elif part == names.down:
        return "down_proj", (part,)
    elif part in (names.gate, names.up):
        return "gate_up_proj", (names.gate, names.up)
    raise EngineError(f"{name} is not a weight that an expert of this family has")


def _names(model_type: str) -> _Names | None:
    if model_type not in FAMILIES:
        raise EngineError(
            f"strop does not know how checkpoints of model_type={model_type} name their experts; it knows "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def _outward(name: str, names: _Names | None) -> str:
    """What is beside the experts in their block, a router or its bias, is named like the block."""
    block = "mlp" if names is None else names.block
    return re.sub(r"(\.layers\.\d+)\.mlp\.", rf"\1.{block}.", name)


def _inward(name: str, names: _Names | None) -> str:
    block = "mlp" if names is None else names.block
    return re.sub(rf"(\.layers\.\d+)\.{block}\.", r"\1.mlp.", name)
