"""How evenly a mixture of experts uses its experts: terms of a loss, and what to report.

    L layers with routers    E experts    K of them a token

The losses are per token, like all others. Fractions of choices belong to a whole update: the loop counts them before it
and they enter as constants, so that a step may be cut into batches in any way.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.types import Bools, Metric, Metrics, Outputs, Reduction


def fractions_of(counts_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each expert's part of its layer's choices; 1 / E where a layer chose nothing."""
    total_L1 = counts_LE.sum(1, keepdims=True)
    return np.where(total_L1 > 0, counts_LE / np.maximum(total_L1, 1), 1.0 / counts_LE.shape[1])


def load_balancing(shares_TLE: Tensor, fractions_LE: Tensor) -> Tensor:
    """E * sum over experts of (part of the update's choices) * (share of this token's scores), mean over layers: [T].

    Its mean over the tokens that the fractions count is 1 when either is even. Switch Transformer, arXiv 2101.03961,
    eq. 4 to 6; with shares of sigmoids, DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20.
    """
    if shares_TLE.shape[1:] != fractions_LE.shape:
        raise ValueError(f"shares [T, L, E] {tuple(shares_TLE.shape)}, fractions [L, E] {tuple(fractions_LE.shape)}")
    return shares_TLE.shape[2] * (shares_TLE * fractions_LE.to(shares_TLE.dtype)).sum(-1).mean(-1)


def router_z(logits_TLE: Tensor) -> Tensor:
    """logsumexp(logits)^2, mean over layers: [T]. ST-MoE, arXiv 2202.08906, eq. 5."""
    return (torch.logsumexp(logits_TLE, -1) ** 2).mean(-1)


def router_terms(
    outputs: Outputs, fractions_LE: Tensor | None, mask_T: Tensor, *, balance: float, z: float
) -> tuple[Tensor, Metrics]:
    """What to add to each token's loss, [T], and the mean of each term that has a coefficient.

    Raises ValueError when the numbers of a term are not there.
    """
    logits_TLE, shares_TLE = outputs.router_logits_TLE, outputs.router_shares_TLE
    if logits_TLE is None or shares_TLE is None:
        raise ValueError("a router's terms have coefficients, but the engine gave no router_logits_TLE")
    terms_T, metrics = logits_TLE.new_zeros(len(logits_TLE)), Metrics()
    keep_T11 = mask_T[:, None, None]
    if balance:
        if fractions_LE is None:
            raise ValueError(f"balance_coefficient is {balance}, but the batch has no expert_fractions_LE")
        balance_T = load_balancing(torch.where(keep_T11, shares_TLE, 0.0), fractions_LE.to(shares_TLE.device))
        terms_T = terms_T + balance * balance_T
        metrics["router/balance"] = Metric(Reduction.MEAN, balance_T.detach().sum(), mask_T.sum())
    if z:
        z_T = torch.where(mask_T, router_z(torch.where(keep_T11, logits_TLE, 0.0)), 0.0)
        terms_T = terms_T + z * z_T
        metrics["router/z"] = Metric(Reduction.MEAN, z_T.detach().sum(), mask_T.sum())
    return terms_T, metrics


def violations(counts_LE: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """How far each layer's load is from even, [L]: an expert's share times E, less 1.

    `max` is the fullest expert's, 0 when all are alike; `min` the emptiest's, -1 for one that nobody took; `mean` is
    of the absolute values. Auxiliary-loss-free balancing, arXiv 2408.15664, eq. 4.
    """
    off_LE = fractions_of(counts_LE) * counts_LE.shape[1] - 1.0
    return {"max": off_LE.max(1), "min": off_LE.min(1), "mean": np.abs(off_LE).mean(1)}


def sampled_rows(mask_T: Bools, targets_T: NDArray[np.int64]) -> Bools:
    """Rows whose own token was trained as a target, [T]: load is counted there. A text's last token is left out: no
    sampler routes it."""
    sampled_T = np.zeros_like(mask_T)
    sampled_T[1:] = mask_T[:-1]
    return sampled_T & (targets_T >= 0)
