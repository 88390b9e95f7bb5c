"""Hidden states and the output matrix in; logprobs of the targets, and what else was asked for, out.

    z = softcap(hidden @ weight.T + bias) / temperature        logprob = z[target] - logsumexp(z)
    entropy = logsumexp(z) - sum(softmax(z) * z)

Two forms of the same numbers. `plain` keeps the logits [N, V] for the backward pass. `chunked` visits a few rows at a
time, keeps nothing but its inputs, and computes the logits of each chunk again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_LOGITS = 1 << 22  # logits in flight in one chunk: 16 MiB of float32, still a matrix large enough to multiply fast


class Entropy(StrEnum):
    NONE = "none"
    VALUE = "value"  # to be looked at: no gradient, and nothing kept for one
    GRADIENT = "gradient"


class HeadImpl(StrEnum):
    PLAIN = "plain"
    CHUNKED = "chunked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An output layer. `weight_VD` may be tied to the embedding; `softcap` is Gemma-2's cap * tanh(z / cap)."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Float32 (float64 for float64 inputs), one row for each target."""

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    top_k_ids_NK: Tensor | None = None
    top_k_logprobs_NK: Tensor | None = None


def score_targets(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature_N: Tensor | None = None,
    entropy: Entropy = Entropy.NONE,
    top_k: int = 0,
    impl: HeadImpl,
) -> Scored:
    """Logprobs of `targets_N` (int64, each in [0, V)), with gradients for hidden, weight and bias but not temperature.

    `top_k` logprobs carry no gradient.
    """
    if impl is HeadImpl.PLAIN:
        logprobs_NV = _logits(hidden_ND, head, temperature_N).log_softmax(-1)
        logprobs_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
        entropy_N = None if entropy is Entropy.NONE else _entropy(logprobs_NV, entropy)
    else:
        logprobs_N, entropies_N = _Chunked.apply(
            hidden_ND, head.weight_VD, head.bias_V, targets_N, temperature_N, head.softcap, entropy
        )
        entropy_N = None if entropy is Entropy.NONE else entropies_N
        if entropy is Entropy.VALUE:
            entropy_N = entropies_N.detach()
    ids_NK, likeliest_NK = _top_k(hidden_ND, head, temperature_N, top_k) if top_k else (None, None)
    return Scored(logprobs_N=logprobs_N, entropy_N=entropy_N, top_k_ids_NK=ids_NK, top_k_logprobs_NK=likeliest_NK)


def _logits(hidden_ND: Tensor, head: Head, temperature_N: Tensor | None) -> Tensor:
    logits_NV = F.linear(hidden_ND, head.weight_VD, head.bias_V)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    return logits_NV if temperature_N is None else logits_NV / temperature_N[:, None].to(logits_NV.dtype)


def _entropy(logprobs_NV: Tensor, entropy: Entropy) -> Tensor:
    with torch.set_grad_enabled(entropy is Entropy.GRADIENT and torch.is_grad_enabled()):
        return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


@torch.no_grad()
def _top_k(hidden_ND: Tensor, head: Head, temperature_N: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    ids, logprobs = [], []
    for rows in _chunks(len(hidden_ND), head.weight_VD.shape[0]):
        temperature = None if temperature_N is None else temperature_N[rows]
        best = _logits(hidden_ND[rows], head, temperature).log_softmax(-1).topk(k, dim=-1)
        ids.append(best.indices)
        logprobs.append(best.values)
    if not ids:
        return hidden_ND.new_zeros((0, k), dtype=torch.int64), hidden_ND.new_zeros((0, k))
    return torch.cat(ids), torch.cat(logprobs)


def _chunks(rows: int, vocab_size: int) -> list[slice]:
    step = max(16, CHUNK_LOGITS // vocab_size)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


class _Chunked(torch.autograd.Function):
    """Saves hidden, weight, bias, targets and [N] statistics; never more than one chunk of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor | None,
        softcap: float | None,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight_VD=weight_VD, bias_V=bias_V, softcap=softcap)
        kind = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        logprobs_N, lse_N, entropy_N = (hidden_ND.new_zeros(len(hidden_ND), dtype=kind) for _ in range(3))
        for rows in _chunks(len(hidden_ND), weight_VD.shape[0]):
            z_NV = _logits(hidden_ND[rows], head, None if temperature_N is None else temperature_N[rows])
            lse_N[rows] = z_NV.logsumexp(-1)
            logprobs_N[rows] = z_NV.gather(-1, targets_N[rows, None])[:, 0] - lse_N[rows]
            if entropy is not Entropy.NONE:
                entropy_N[rows] = lse_N[rows] - (z_NV.sub(lse_N[rows, None]).exp_() * z_NV).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, temperature_N, lse_N, entropy_N)
        ctx.softcap, ctx.entropy = softcap, entropy
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, temperature_N, lse_N, entropy_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        accumulate = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=accumulate) if need_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=accumulate) if need_bias else None
        for rows in _chunks(len(hidden_ND), weight_VD.shape[0]):
            raw_NV = F.linear(hidden_ND[rows], weight_VD, bias_V).to(accumulate)
            capped_NV = raw_NV if ctx.softcap is None else ctx.softcap * torch.tanh(raw_NV / ctx.softcap)
            scale_N = 1.0 if temperature_N is None else temperature_N[rows, None].to(accumulate)
            z_NV = capped_NV / scale_N
            p_NV = z_NV.sub(lse_N[rows, None]).exp_()
            grad_z_NV = p_NV * -grad_logprobs_N[rows, None]
            if ctx.entropy is Entropy.GRADIENT:  # d entropy / dz = -p (log p + entropy)
                grad_z_NV -= p_NV * (z_NV - lse_N[rows, None] + entropy_N[rows, None]) * grad_entropy_N[rows, None]
            grad_z_NV.scatter_add_(-1, targets_N[rows, None], grad_logprobs_N[rows, None].to(accumulate))
            grad_z_NV = grad_z_NV / scale_N if temperature_N is not None else grad_z_NV
            if ctx.softcap is not None:
                grad_z_NV *= 1 - (capped_NV / ctx.softcap) ** 2
            grad_raw_NV = grad_z_NV.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_raw_NV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(grad_raw_NV.t().to(accumulate), hidden_ND[rows].to(accumulate))
            if grad_bias_V is not None:
                grad_bias_V += grad_z_NV.sum(0)
        return (
            grad_hidden_ND,
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *(None,) * 4,
        )
