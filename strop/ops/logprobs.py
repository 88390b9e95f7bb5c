"""The head: hidden states and the output matrix in; logprobs of the targets, and what else was asked for, out.

Five forms of the same numbers, one of which the caller names; `require` says before a run whether it can be had.

    plain    keeps the logits [N, V] for the backward pass: the reference
    chunked  streams over rows and vocabulary, keeps nothing but its inputs and what is [N], makes each tile twice
    fused    as chunked, but a loss that looks at one row at a time is differentiated in passing: each tile made once
    triton   as chunked, with one kernel for each of the two passes over the vocabulary
    liger    liger-kernel's fused linear scaled cross-entropy
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.errors import ConfigError
from strop.ops.head import IGNORED, ROWS, Ask, Entropy, Head, HeadImpl, LowRank, Scored, Shard
from strop.ops.head_stream import Inputs, Pass, TorchKernels, learn, score
from strop.ops.head_tiles import BANNED, Summary

__all__ = [
    "ROWS",
    "Entropy",
    "Head",
    "HeadImpl",
    "LowRank",
    "RowsLoss",
    "Scored",
    "Shard",
    "learn_targets",
    "require",
    "score_targets",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

RowsLoss = Callable[[Tensor, Scored], Tensor]
"""From some rows, their indices [n] and what was found there (live), to the sum of their losses."""


def require(
    impl: HeadImpl, *, device: torch.device, dtype: torch.dtype, softcap: float | None = None, bias: bool = False
) -> None:
    """Raises ConfigError, with the remedy, when a head of this form cannot run here, or not for such a model."""
    others = "plain, chunked or fused"
    if impl is HeadImpl.TRITON:
        if find_spec("triton") is None:
            raise ConfigError(f"engine.head=triton needs the package triton: pip install triton, or take {others}")
        interpreted = import_module("triton").knobs.runtime.interpret
        if device.type == "cpu" and not interpreted:
            raise ConfigError(
                "engine.head=triton needs a GPU (or TRITON_INTERPRET=1, which is for tests), and the model is on the "
                f"CPU: take {others}"
            )
        if dtype not in DTYPES and not interpreted:
            raise ConfigError(f"engine.head=triton multiplies no {dtype} on a GPU: take {others}")
    if impl is HeadImpl.LIGER:
        if find_spec("liger_kernel") is None:
            raise ConfigError(
                f"engine.head=liger needs the package liger-kernel: pip install liger-kernel, or take {others}"
            )
        lacks = [name for name, has in (("a soft cap", softcap is not None), ("a bias", bias)) if has]
        if lacks:
            raise ConfigError(f"engine.head=liger: this model's head has {' and '.join(lacks)}, take {others}")


def score_targets(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature_N: Tensor | float | None = None,
    entropy: Entropy = Entropy.NONE,
    top_k: int = 0,
    ids_NK: Tensor | None = None,
    square_sums: bool = False,
    impl: HeadImpl,
    rows: int = ROWS,
    weight_grad_VD: Tensor | None = None,
) -> Scored:
    """Logprobs of `targets_N` and of `ids_NK` (int64), with gradients for hidden, weight, bias and adapter.

    A target of -1 is ignored: its row holds zeros and carries no gradient, whatever its hidden state. `temperature_N`
    (one number, or one for each row) gets no gradient; nor do top-k logprobs and sums of squared probabilities. `rows`
    bounds the logits in flight in every form but `plain` and `liger`. The streaming forms add the weight's gradient to
    `weight_grad_VD` when it is given, and tell autograd of none: no second [V, D] is made.

    Raises ValueError for tokens outside the vocabulary, and for what `impl` cannot do.
    """
    ask = Ask(entropy=entropy, top_k=top_k, square_sums=square_sums)
    question = _Question.of(hidden_ND, head, targets_N, ids_NK, temperature_N, ask=ask)
    if impl is HeadImpl.PLAIN:
        seen = _plain(question)
    elif impl is HeadImpl.LIGER:
        from strop.ops.head_liger import liger

        seen = liger(question.hidden_ND, head, question.picks_NJ, question.temperature_N, ask)
    elif impl is HeadImpl.TRITON:
        from strop.ops.head_triton import TritonKernels

        seen = score(question.inputs(), question.run(rows, weight_grad_VD), TritonKernels())
    else:
        seen = score(question.inputs(), question.run(rows, weight_grad_VD), TorchKernels())
    return question.answer(seen)


def learn_targets(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    loss: RowsLoss,
    *,
    temperature_N: Tensor | float | None = None,
    entropy: Entropy = Entropy.NONE,
    top_k: int = 0,
    ids_NK: Tensor | None = None,
    square_sums: bool = False,
    rows: int = ROWS,
    weight_grad_VD: Tensor | None = None,
) -> tuple[Scored, Tensor]:
    """What `score_targets` gives, without gradients, and the sum of `loss` over all rows: the `fused` form.

    `loss` is called for `rows` rows at a time and must not mix them. It is differentiated at once, while their logits
    are held (4 bytes x rows x vocabulary), so the logits are made once. The sum's `backward()` hands on gradients that
    are known by then. A weight gradient in half precision is summed in float32 beside itself. With `weight_grad_VD` it
    is added before this returns: such a sum must not be scaled afterwards.

    Raises ValueError as `score_targets` does.
    """
    ask = Ask(entropy=entropy, top_k=top_k, square_sums=square_sums)
    question = _Question.of(hidden_ND, head, targets_N, ids_NK, temperature_N, ask=ask)

    def of_rows(few: slice, picked_NJ: Tensor, entropy_N: Tensor) -> Tensor:
        at = Scored(
            logprobs_N=picked_NJ[:, 0],
            entropy_N=None if entropy is Entropy.NONE else entropy_N,
            ids_logprobs_NK=None if ids_NK is None else picked_NJ[:, 1:],
        )
        return loss(question.index_N[few], at)

    seen, total = learn(question.inputs(), question.run(rows, weight_grad_VD), of_rows)
    return question.answer(seen), total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """The rows that are wanted, and what is wanted of them."""

    hidden_ND: Tensor
    head: Head
    picks_NJ: Tensor  # the target first
    temperature_N: Tensor | float | None
    index_N: Tensor  # of each row among those that the caller gave
    total: int  # rows that the caller gave
    has_ids: bool
    ask: Ask

    @staticmethod
    def of(
        hidden_ND: Tensor,
        head: Head,
        targets_N: Tensor,
        ids_NK: Tensor | None,
        temperature_N: Tensor | float | None,
        *,
        ask: Ask,
    ) -> _Question:
        """Checks tokens and leaves ignored rows out. Raises ValueError."""
        if ask.top_k > head.vocabulary:
            raise ValueError(f"the {ask.top_k} likeliest of {head.vocabulary} tokens were asked for")
        _check_tokens("a target", targets_N, IGNORED, head.vocabulary)
        total = len(targets_N)
        index_N = torch.arange(total, device=targets_N.device)
        if bool((targets_N == IGNORED).any()):
            index_N = (targets_N != IGNORED).nonzero()[:, 0]
            hidden_ND, targets_N = hidden_ND[index_N], targets_N[index_N]
            ids_NK = None if ids_NK is None else ids_NK[index_N]
            temperature_N = temperature_N[index_N] if isinstance(temperature_N, Tensor) else temperature_N
        if ids_NK is not None:
            _check_tokens("an id", ids_NK, 0, head.vocabulary)
        picks_NJ = targets_N[:, None] if ids_NK is None else torch.cat([targets_N[:, None], ids_NK], 1)
        return _Question(
            hidden_ND=hidden_ND,
            head=head,
            picks_NJ=picks_NJ,
            temperature_N=temperature_N,
            index_N=index_N,
            total=total,
            has_ids=ids_NK is not None,
            ask=ask,
        )

    def inputs(self) -> Inputs:
        low_rank, inner_NR = self.head.low_rank, None
        if low_rank is not None:  # autograd goes on from here to A
            inner_NR = low_rank.scale * F.linear(self.hidden_ND, low_rank.a_RD)
        return Inputs(
            hidden_ND=self.hidden_ND,
            weight_VD=self.head.weight_VD,
            bias_V=self.head.bias_V,
            inner_NR=inner_NR,
            b_VR=None if low_rank is None else low_rank.b_VR,
        )

    def run(self, rows: int, weight_grad_VD: Tensor | None) -> Pass:
        return Pass(
            picks_NJ=self.picks_NJ,
            temperature=self.temperature_N,
            softcap=self.head.softcap,
            shard=self.head.shard,
            ask=self.ask,
            rows=rows,
            weight_grad_VD=weight_grad_VD,
        )

    def answer(self, seen: Summary) -> Scored:
        """Rows back to their places; ignored ones hold 0."""
        ask = self.ask
        return Scored(
            logprobs_N=self._spread(seen.picked_NJ[:, 0]),
            entropy_N=None if ask.entropy is Entropy.NONE else self._spread(seen.entropy_N),
            ids_logprobs_NK=self._spread(seen.picked_NJ[:, 1:]) if self.has_ids else None,
            square_sums_N=self._spread(seen.square_sums_N) if ask.square_sums else None,
            top_k_ids_NK=self._spread(seen.top_ids_NK) if ask.top_k else None,
            top_k_logprobs_NK=self._spread(seen.top_logprobs_NK) if ask.top_k else None,
        )

    def _spread(self, values_N: Tensor) -> Tensor:
        if len(self.index_N) == self.total:
            return values_N
        return values_N.new_zeros((self.total, *values_N.shape[1:])).index_copy(0, self.index_N, values_N)


def _check_tokens(what: str, tokens: Tensor, lowest: int, vocabulary: int) -> None:
    if not tokens.numel():
        return
    low, high = torch.stack(tokens.aminmax()).tolist()
    if low < lowest or high >= vocabulary:
        raise ValueError(
            f"{what} is {low if low < lowest else high}, outside a vocabulary of {vocabulary}: targets are tokens or "
            "-1 (ignored), ids are tokens"
        )


def _plain(question: _Question) -> Summary:
    """From the whole logits [N, V], with autograd of torch's own."""
    head, ask, temperature = question.head, question.ask, question.temperature_N
    if head.shard is not None:
        raise ValueError("the plain head does not split the vocabulary over ranks: take chunked, fused or triton")
    logits_NV = F.linear(question.hidden_ND, head.weight_VD, head.bias_V)
    if head.low_rank is not None:
        inner_NR = head.low_rank.scale * F.linear(question.hidden_ND, head.low_rank.a_RD)
        logits_NV = logits_NV + F.linear(inner_NR, head.low_rank.b_VR)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if head.bias_V is not None:
        logits_NV = logits_NV.clamp(min=BANNED)
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    if temperature is not None:
        divisor = temperature[:, None].to(logits_NV.dtype) if isinstance(temperature, Tensor) else temperature
        logits_NV = logits_NV / divisor
    logprobs_NV = logits_NV.log_softmax(1)
    zeros_N = logprobs_NV.new_zeros(len(logprobs_NV))
    entropy_N = zeros_N
    if ask.entropy is not Entropy.NONE:
        with torch.set_grad_enabled(ask.entropy is Entropy.GRADIENT and torch.is_grad_enabled()):
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(1)
    seen_NV = logprobs_NV.detach()
    best = seen_NV.topk(ask.top_k)
    return Summary(
        picked_NJ=logprobs_NV.gather(1, question.picks_NJ),
        entropy_N=entropy_N,
        square_sums_N=seen_NV.mul(2.0).exp().sum(1) if ask.square_sums else zeros_N,
        top_ids_NK=best.indices,
        top_logprobs_NK=best.values,
    )
