"""Linear attention layers of transformers: hidden states of packed tokens in, mixed ones out.

transformers keeps packed sequences apart in them with GPU kernels of other packages alone, and finds those in a way
that changes from version to version. `hook` puts one forward of our own on each such layer instead. It projects, hands
the convolution and the gated delta rule to the pass's `AttentionContext`, and gates what comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.errors import EngineError
from strop.models.attention import AttentionContext, PackedAttention
from strop.ops import fused
from strop.ops.select import Impl
from strop.types import Layout

MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
UNIT_EPS = 1e-6  # of the unit queries and keys, as in transformers


@dataclass(frozen=True, slots=True)
class _Projected:
    """What one layer's projections make of T tokens."""

    qkv_TF: Tensor  # queries and keys of J heads, values of H, before the convolution
    gate_THC: Tensor
    strength_TH: Tensor
    rate_TH: Tensor


def _joint(module: nn.Module, x_TD: Tensor) -> _Projected:
    """Qwen3-Next: two matrices, whose rows go key head by key head."""
    J, H, C, CV = _heads(module)
    G = H // J
    qkvz_TJX = module.get_submodule("in_proj_qkvz")(x_TD).unflatten(-1, (J, -1))
    q, k, v, gate = qkvz_TJX.split((C, C, G * CV, G * CV), -1)
    strength, rate = module.get_submodule("in_proj_ba")(x_TD).unflatten(-1, (J, -1)).split((G, G), -1)
    return _Projected(
        qkv_TF=torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), -1),
        gate_THC=gate.reshape(len(x_TD), H, CV),
        strength_TH=strength.reshape(len(x_TD), H),
        rate_TH=rate.reshape(len(x_TD), H),
    )


def _separate(module: nn.Module, x_TD: Tensor) -> _Projected:
    """Qwen3.5: a matrix for each."""
    _, H, _, CV = _heads(module)
    return _Projected(
        qkv_TF=module.get_submodule("in_proj_qkv")(x_TD),
        gate_THC=module.get_submodule("in_proj_z")(x_TD).unflatten(-1, (H, CV)),
        strength_TH=module.get_submodule("in_proj_b")(x_TD),
        rate_TH=module.get_submodule("in_proj_a")(x_TD),
    )


PROJECTIONS: dict[str, Callable[[nn.Module, Tensor], _Projected]] = {
    "Qwen3NextGatedDeltaNet": _joint,
    "Qwen3_5GatedDeltaNet": _separate,
    "Qwen3_5MoeGatedDeltaNet": _separate,
}


def hook(module: nn.Module, impl: Impl, *, compare: bool = True) -> dict[str, int]:
    """Give every gated delta layer of a model our forward. Returns how many of each class.

    With `compare` the first layer of each class is compared with transformers' own forward on one short text;
    EngineError when they differ. Classes are never touched, so other models in the process stay as they were.
    """
    hooked: dict[str, int] = {}
    for child in module.modules():
        name = type(child).__name__
        if name not in PROJECTIONS:
            continue
        forward = _GatedDeltaNet(child, PROJECTIONS[name], impl)
        if name not in hooked and compare:
            _compare(child, forward)
        child.forward = forward
        hooked[name] = hooked.get(name, 0) + 1
    return hooked


@torch.no_grad()
def _compare(child: nn.Module, forward: _GatedDeltaNet) -> None:
    own = vars(child)
    if own["activation"] != "silu":
        raise EngineError(f"{type(child).__name__} with hidden_act={own['activation']}: strop knows silu there")
    example = child.get_submodule("out_proj").get_parameter("weight")
    x = torch.randn(1, 7, len(example), generator=torch.Generator().manual_seed(0)).to(example.device, example.dtype)
    expected = child(x)
    got = forward(x, attention=PackedAttention(Layout((7,)), forward.impl))
    tolerance = 5e-2 if example.dtype == torch.bfloat16 else 1e-4
    worst = float((got - expected).abs().max())
    if not worst <= tolerance * float(expected.abs().max()):
        raise EngineError(
            f"strop's form of {type(child).__name__} does not give transformers' numbers (largest difference "
            f"{worst:.1e} at scale {float(expected.abs().max()):.1e}); report it with the version of transformers"
        )


def _heads(module: nn.Module) -> tuple[int, int, int, int]:
    """J key heads, H value heads, C channels of a key, C_v of a value."""
    own = vars(module)
    return own["num_k_heads"], own["num_v_heads"], own["head_k_dim"], own["head_v_dim"]


@dataclass(frozen=True, slots=True, eq=False)
class _GatedDeltaNet:
    """Gated DeltaNet, Yang, Kautz and Hatamizadeh 2024, as Qwen3-Next and Qwen3.5 have it."""

    module: nn.Module
    project: Callable[[nn.Module, Tensor], _Projected]
    impl: Impl

    def __call__(
        self,
        hidden_states: Tensor,
        cache_params: None = None,
        attention_mask: None = None,
        *,
        attention: AttentionContext,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
    ) -> Tensor:
        """[1, T, D] -> [1, T, D]."""
        module, impl = self.module, self.impl
        layer: int = vars(module)["layer_idx"]
        J, H, C, CV = _heads(module)
        x_TD = hidden_states[0]
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        projected = self.project(module, x_TD)
        taps_FW = module.get_submodule("conv1d").get_parameter("weight")[:, 0]
        mixed_TF = F.silu(attention.convolve(layer, projected.qkv_TF.to(wide), taps_FW.to(wide)))
        q, k, v = mixed_TF.split((J * C, J * C, H * CV), -1)
        q_TJC, k_TJC, v_THC = q.unflatten(-1, (J, C)), k.unflatten(-1, (J, C)), v.unflatten(-1, (H, CV))
        # a unit vector is C^-1/2 times one of unit mean square; queries are divided by C^1/2 once more
        unit_C = mixed_TF.new_full((C,), C**-0.5)
        rate_TH = F.softplus(projected.rate_TH.to(wide) + module.get_parameter("dt_bias").to(wide))
        out_THC = attention.delta_rule(
            layer,
            fused.rms_norm(q_TJC, unit_C * C**-0.5, UNIT_EPS / C, impl),
            fused.rms_norm(k_TJC, unit_C, UNIT_EPS / C, impl),
            v_THC,
            -module.get_parameter("A_log").to(wide).exp() * rate_TH,
            projected.strength_TH.to(wide).sigmoid(),
        )
        norm = module.get_submodule("norm")
        normed = fused.rms_norm(out_THC.to(x_TD.dtype), norm.get_parameter("weight"), self._eps, impl)
        gated = fused.swiglu(projected.gate_THC, normed, impl)
        return module.get_submodule("out_proj")(gated.flatten(1))[None]

    @property
    def _eps(self) -> float:
        return vars(self.module)["layer_norm_epsilon"]
