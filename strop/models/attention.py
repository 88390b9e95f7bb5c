"""How attention reaches every transformers model: one function, registered under one name, and the context it hands on.

A forward pass gives each layer that mixes tokens an `AttentionContext` that knows where sequences begin and end, or
where their cached keys, values and states lie; `strop.models.linear_attention` asks it too. Boundaries are explicit: no
mask tensor exists, and nothing is inferred from position ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.ops.attention import packed_attention
from strop.ops.causal_conv import causal_conv
from strop.ops.gated_delta import gated_delta_rule
from strop.ops.select import Impl
from strop.types import Layout

NAME = "strop"


class AttentionContext(Protocol):
    """What one forward pass knows about its sequences."""

    def attend(
        self,
        layer: int,
        q_THC: Tensor,
        k_TJC: Tensor,
        v_TJC: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Causal attention of T tokens with H query heads over J key-value heads: [T, H, C]."""
        ...

    def convolve(self, layer: int, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        """The causal convolution of a linear attention layer, each of F channels by itself: [T, F]."""
        ...

    def delta_rule(
        self, layer: int, q_TJC: Tensor, k_TJC: Tensor, v_THC: Tensor, decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        """Linear attention of T tokens by the gated delta rule: [T, H, C_v]."""
        ...


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention inside each sequence of a packed batch: what training and scoring use."""

    layout: Layout
    impl: Impl

    def attend(
        self,
        layer: int,
        q_THC: Tensor,
        k_TJC: Tensor,
        v_TJC: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        return packed_attention(
            q_THC,
            k_TJC,
            v_TJC,
            self.layout,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
            impl=self.impl,
        )

    def convolve(self, layer: int, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        return causal_conv(x_TF, weight_FW, self.layout)

    def delta_rule(
        self, layer: int, q_TJC: Tensor, k_TJC: Tensor, v_THC: Tensor, decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        return gated_delta_rule(q_TJC, k_TJC, v_THC, decay_TH, beta_TH, self.layout, impl=self.impl)[0]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    attention: AttentionContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    output_router_logits: bool | None = None,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, C], key and value [1, J, T, C] -> [1, T, H, C].

    Its parameters are all that strop understands. A model that passes anything else needs something of attention that
    this function does not do: the TypeError that follows refuses the model instead of training it wrongly.
    """
    if dropout:
        raise ValueError(f"attention dropout {dropout}: the sampler has none, so the trainer must have none either")
    out_THC = attention.attend(
        module.layer_idx,  # pyright: ignore[reportArgumentType]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_THC[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
