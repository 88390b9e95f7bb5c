"""What goes into the head of a language model and what comes out: the vocabulary that its forms share.

    z = softcap(hidden @ weight.T + scale (hidden @ A.T) @ B.T + bias) / temperature
    logprob = z[target] - logsumexp(z)          entropy = logsumexp(z) - sum(softmax(z) z)

N counts targets, J the tokens whose logprob a row asks for (its target and K others), R a low rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor
from torch.distributed import ProcessGroup

IGNORED = -1  # a target that nobody wants scored
ROWS = 256  # rows in flight at once, unless the caller says otherwise
COLUMNS = 1024  # of the vocabulary at once: with 256 rows 1 MiB of float32, which a processor's cache holds


class Entropy(StrEnum):
    NONE = "none"
    VALUE = "value"  # to be looked at: no gradient, and nothing kept for one
    GRADIENT = "gradient"


class HeadImpl(StrEnum):
    """A form of the head. `logprobs` says what each does."""

    PLAIN = "plain"
    CHUNKED = "chunked"
    FUSED = "fused"
    TRITON = "triton"
    LIGER = "liger"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An adapter of the head, never merged: scale (hidden @ a.T) @ b.T is added to the logits (arXiv 2106.09685)."""

    a_RD: Tensor
    b_VR: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's rows of the vocabulary: `head.weight_VD` is [its share, D] and begins at token `start` of `size`.

    Hidden states, targets and losses are the same on every rank of `group`, and so is everything that comes out; the
    ranks' shares need not be equal.
    """

    group: ProcessGroup
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An output layer. `weight_VD` has any strides and may be tied to the embedding.

    `softcap` is Gemma-2's cap * tanh(z / cap). A bias of -inf bans its token. With a `shard`, weight, bias and the
    adapter's B hold this rank's tokens.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    low_rank: LowRank | None = None
    shard: Shard | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight_VD.shape[0] if self.shard is None else self.shard.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is wanted of each row besides the logprob of its target."""

    entropy: Entropy = Entropy.NONE
    top_k: int = 0  # the likeliest tokens and their logprobs; no gradient
    square_sums: bool = False  # sum of squared probabilities; no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Float32 (float64 for float64 inputs), one row for each target. An ignored target's row holds zeros."""

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    ids_logprobs_NK: Tensor | None = None  # of the tokens that were asked for by id
    square_sums_N: Tensor | None = None
    top_k_ids_NK: Tensor | None = None
    top_k_logprobs_NK: Tensor | None = None
