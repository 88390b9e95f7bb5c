"""Replace a model's elementwise pieces by strop's fused ones, where their numbers agree.

A transformers decoder spends a third of a CPU step in norms, rotary embeddings and gates, each several passes over
memory. `fuse` finds modules of the common shapes, checks once per class that strop's form gives the same numbers on random
input, and rebinds `forward` on each instance. Classes are never touched, so other models in the process stay as they were.
It also lifts the float32 casts inside those modules, so that a float64 model is float64 throughout.
"""

from __future__ import annotations

from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, nn

from strop.models.attention import AttentionContext
from strop.ops import fused
from strop.ops.select import Impl


class _Norm(Protocol):
    weight: Tensor
    variance_epsilon: float
    impl: Impl


class _Gated(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    impl: Impl


class _Attention(Protocol):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: _Norm
    k_norm: _Norm
    head_dim: int
    layer_idx: int
    scaling: float
    sliding_window: int | None
    impl: Impl
    normed: bool


def fuse(module: nn.Module, impl: Impl) -> dict[str, int]:
    """Rebind the forward of every module whose shape and numbers are known. Returns how many of each class."""
    agreed: dict[type, bool] = {}
    replaced: dict[str, int] = {}
    for child in module.modules():
        forward = _candidate(child)
        if forward is None:
            continue
        kind = type(child)
        if kind not in agreed:
            agreed[kind] = _agrees(child, forward)
        if agreed[kind]:
            _rebind(child, forward, impl)
            replaced[kind.__name__] = replaced.get(kind.__name__, 0) + 1
    return replaced


def _candidate(child: nn.Module):  # noqa: ANN202
    parts = dict(child.named_children())
    if {"q_proj", "k_proj", "v_proj", "o_proj"} <= parts.keys() and type(child).__name__ in _ATTENTIONS:
        return _attention_forward
    if set(parts) == {"gate_proj", "up_proj", "down_proj", "act_fn"} and isinstance(parts["gate_proj"], nn.Linear):
        return _gated_forward
    if not parts and type(child).__name__.endswith("RMSNorm") and "variance_epsilon" in vars(child):
        return _norm_forward
    return None


# Attention classes whose forward is: project, (norm per head,) rotate halves, attend, project.
_ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"})


def _rebind(child: nn.Module, forward, impl: Impl) -> None:  # noqa: ANN001
    child.impl = impl  # pyright: ignore[reportAttributeAccessIssue]
    if forward is _attention_forward:
        child.normed = "q_norm" in dict(child.named_children())  # pyright: ignore[reportAttributeAccessIssue]
        if "sliding_window" not in vars(child):
            window = child.config.sliding_window if "Mistral" in type(child).__name__ else None  # pyright: ignore
            child.sliding_window = window  # pyright: ignore[reportAttributeAccessIssue]
    child.forward = MethodType(forward, child)


@torch.no_grad()
def _agrees(child: nn.Module, forward) -> bool:  # noqa: ANN001
    """Whether strop's form of this class gives transformers' numbers on random float32 input."""
    if forward is _attention_forward:
        return True  # named classes; the whole model is compared before and after by the loader
    generator = torch.Generator().manual_seed(0)
    width = child.weight.shape[-1] if forward is _norm_forward else child.gate_proj.in_features  # pyright: ignore
    dtype = next(child.parameters()).dtype
    x = torch.randn(3, width, generator=generator).to(dtype)
    expected = child(x)
    _rebind(child, forward, Impl.TORCH)
    got = child(x)
    del child.forward
    return bool(torch.allclose(got.float(), expected.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6))


def _norm_forward(self: _Norm, hidden_states: Tensor) -> Tensor:
    return fused.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.impl)


def _gated_forward(self: _Gated, x: Tensor) -> Tensor:
    return self.down_proj(fused.swiglu(self.gate_proj(x), self.up_proj(x), self.impl))


def _attention_forward(
    self: _Attention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: None = None,
    past_key_values: None = None,
    *,
    attention: AttentionContext,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
) -> tuple[Tensor, None]:
    x_TD = hidden_states[0]
    q_THC = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
    k_TJC = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
    v_TJC = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
    cos_TC, sin_TC = position_embeddings[0][0], position_embeddings[1][0]
    if self.normed:
        q_THC, k_TJC = fused.norm_rope(
            q_THC, k_TJC, self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon, cos_TC, sin_TC, self.impl
        )
    else:
        q_THC, k_TJC = fused.rope(q_THC, k_TJC, cos_TC, sin_TC, self.impl)
    out_THC = attention.attend(
        self.layer_idx, q_THC, k_TJC, v_TJC, scale=self.scaling, window=self.sliding_window, softcap=None, sinks_H=None
    )
    return self.o_proj(out_THC.flatten(1))[None], None
