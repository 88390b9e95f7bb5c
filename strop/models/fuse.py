"""Replace a model's elementwise pieces by strop's fused ones, where their numbers agree.

A transformers decoder spends a third of a CPU step in norms, rotary embeddings and gates, each several passes over
memory. `fuse` finds modules of the common shapes, checks once per class that strop's form gives the same numbers on
random input, and puts strop's form in the place of `forward` on each instance. Classes are never touched, so other
models in the process stay as they were. It also lifts the float32 casts inside those modules, so that a float64 model
is float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.models.attention import AttentionContext
from strop.ops import fused
from strop.ops.select import Impl

# Attention classes whose forward is: project, (norm per head,) rotate halves, attend, project. They cannot be tried
# alone; the loader compares the whole model before and after.
ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"})


def fuse(module: nn.Module, impl: Impl, agreed: frozenset[str] | None = None) -> dict[str, int]:
    """Give every module whose shape and numbers are known strop's forward. Returns how many of each class.

    `agreed` names the classes that were found to agree before, in a model that has its weights.
    """
    found: dict[type, bool] = {}
    replaced: dict[str, int] = {}
    for child in module.modules():
        forward = _fused_form(child, impl)
        if forward is None:
            continue
        kind = type(child)
        if kind not in found:
            tried = agreed is None
            found[kind] = (
                isinstance(forward, _Attention) or _agrees(child, forward) if tried else kind.__name__ in agreed
            )
        if found[kind]:
            child.forward = forward
            replaced[kind.__name__] = replaced.get(kind.__name__, 0) + 1
    return replaced


def _fused_form(child: nn.Module, impl: Impl) -> _Norm | _Gated | _Attention | None:
    parts = {name for name, _ in child.named_children()}
    own = vars(child)
    if type(child).__name__ in ATTENTIONS:
        return _Attention.of(child, impl)
    if parts == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        gate, up, down = (child.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj"))
        return _Gated(gate, up, down, impl)
    if not parts and type(child).__name__.endswith("RMSNorm") and "variance_epsilon" in own:
        return _Norm(child, own["variance_epsilon"], impl)
    # Gemma's kind scales by 1 + weight, in float32: the sum would lose most of a bfloat16 weight
    if not parts and type(child).__name__.endswith("RMSNorm") and "eps" in own and _precise(child):
        return _Norm(child, own["eps"], impl, shift=1.0)
    return None


def _precise(child: nn.Module) -> bool:
    return {weight.dtype for weight in child.parameters()} <= {torch.float32, torch.float64}


@torch.no_grad()
def _agrees(child: nn.Module, forward: _Norm | _Gated) -> bool:
    """Whether strop's form of this class gives transformers' numbers on random input."""
    example = next(child.parameters())
    x = torch.randn(3, example.shape[-1], generator=torch.Generator().manual_seed(0)).to(example.device, example.dtype)
    expected, got = child(x), forward(x)
    tolerance = 1e-2 if example.dtype == torch.bfloat16 else 1e-5
    return bool(torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance / 10))


# These are objects, not closures, so that a deep copy of a model gets forms that speak of the copy's own modules.


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    module: nn.Module
    eps: float
    impl: Impl
    shift: float = 0.0  # what is added to the weight

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.get_parameter("weight")
        return fused.rms_norm(hidden_states, weight + self.shift if self.shift else weight, self.eps, self.impl)


@dataclass(frozen=True, slots=True, eq=False)
class _Gated:
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    impl: Impl

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(fused.swiglu(self.gate(x), self.up(x), self.impl))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Attention:
    q: nn.Module
    k: nn.Module
    v: nn.Module
    out: nn.Module
    norms: tuple[_Norm, _Norm] | None  # of each query head and each key head
    layer: int
    channels: int
    scale: float
    window: int | None
    impl: Impl

    @classmethod
    def of(cls, child: nn.Module, impl: Impl) -> _Attention:
        q, k, v, out = (child.get_submodule(f"{name}_proj") for name in "qkvo")
        own = vars(child)
        window: int | None = own.get("sliding_window")
        if type(child).__name__ == "MistralAttention":
            window = own["config"].sliding_window
        norms = None
        if {"q_norm", "k_norm"} <= {name for name, _ in child.named_children()}:
            q_norm, k_norm = child.get_submodule("q_norm"), child.get_submodule("k_norm")
            eps = vars(q_norm)["variance_epsilon"]
            norms = _Norm(q_norm, eps, impl), _Norm(k_norm, eps, impl)
        return cls(
            q=q,
            k=k,
            v=v,
            out=out,
            norms=norms,
            layer=own["layer_idx"],
            channels=own["head_dim"],
            scale=own["scaling"],
            window=window,
            impl=impl,
        )

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: None = None,
        past_key_values: None = None,
        *,
        attention: AttentionContext,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
    ) -> tuple[Tensor, None]:
        x_TD = hidden_states[0]
        q_THC, k_TJC, v_TJC = (proj(x_TD).unflatten(-1, (-1, self.channels)) for proj in (self.q, self.k, self.v))
        cos_TC, sin_TC = position_embeddings[0][0], position_embeddings[1][0]
        if self.norms is not None:
            q_norm, k_norm = self.norms
            q_THC, k_TJC = fused.norm_rope(
                q_THC,
                k_TJC,
                q_norm.module.get_parameter("weight"),
                k_norm.module.get_parameter("weight"),
                eps=q_norm.eps,
                cos_TC=cos_TC,
                sin_TC=sin_TC,
                impl=self.impl,
            )
        else:
            q_THC, k_TJC = fused.rope(q_THC, k_TJC, cos_TC, sin_TC, self.impl)
        out_THC = attention.attend(
            self.layer, q_THC, k_TJC, v_TJC, scale=self.scale, window=self.window, softcap=None, sinks_H=None
        )
        return self.out(out_THC.flatten(1))[None], None
