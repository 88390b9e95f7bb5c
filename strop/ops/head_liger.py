"""liger-kernel's fused linear scaled cross-entropy, asked strop's questions."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.ops.head import IGNORED, Ask, Entropy, Head
from strop.ops.head_tiles import Summary


def liger(hidden_ND: Tensor, head: Head, picks_NJ: Tensor, temperature_N: Tensor | float | None, ask: Ask) -> Summary:
    """Logprob and entropy of each row, both with gradients. Sums run in float32, whatever goes in.

    Raises ValueError for what liger-kernel's function does not do.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Fused  # pyright: ignore

    lacks = {
        "a bias": head.bias_V is not None,
        "a soft cap": head.softcap is not None,
        "an adapter of the head": head.low_rank is not None,
        "a vocabulary split over ranks": head.shard is not None,
        "logprobs of given ids": picks_NJ.shape[1] > 1,
        "the likeliest tokens": ask.top_k > 0,
        "sums of squared probabilities": ask.square_sums,
    }
    if missing := [name for name, asked in lacks.items() if asked]:
        raise ValueError(f"the liger head does not do {', '.join(missing)}: take chunked, fused or triton")
    if isinstance(temperature_N, Tensor):  # liger takes one for all rows; without bias and cap it may divide the rows
        hidden_ND, temperature_N = hidden_ND / temperature_N[:, None].to(hidden_ND.dtype), None
    if not len(hidden_ND):
        nll_N = entropy_N = (hidden_ND.sum() + head.weight_VD.sum()).float().expand(0)  # a graph, for gradients of 0
    else:
        nll_N, entropy_N = Fused.apply(
            hidden_ND.contiguous(),
            head.weight_VD.contiguous(),
            picks_NJ[:, 0].contiguous(),
            1.0 if temperature_N is None else float(temperature_N),
            IGNORED,
            1,
            True,
        )
    zeros_N, none_NK = torch.zeros_like(nll_N), picks_NJ.new_zeros((len(picks_NJ), 0))
    return Summary(
        picked_NJ=-nll_N[:, None],
        entropy_N=entropy_N if ask.entropy is Entropy.GRADIENT else entropy_N.detach(),
        square_sums_N=zeros_N,
        top_ids_NK=none_NK,
        top_logprobs_NK=none_NK.float(),
    )
