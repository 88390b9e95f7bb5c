"""Which tokens of a whole step a loss treats differently. The choice is made once, from a forward pass, by the loop.

Arrays are [N]: all trained tokens of one optimizer step. The result, bool [N], enters a loss as a constant
(`PolicyInputs.selected_T`) or a batch as its mask, before weights are written: so a step cut into micro-batches or
ranks still selects what the whole would.
"""

from __future__ import annotations

import numpy as np

from strop.algos.filters import Bools, Float64s


def covariances(logprobs_N: Float64s, advantages_N: Float64s) -> Float64s:
    """(A - mean A) (logprob - mean logprob) of each token: its part in the loss of entropy (arXiv 2505.22617)."""
    if not len(logprobs_N):
        return np.zeros(0)
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def clip_cov(
    covariances_N: Float64s,
    rng: np.random.Generator,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    eligible_N: Bools | None = None,
) -> Bools:
    """A random `fraction` of all tokens, at least one, out of those with low < covariance < high (arXiv 2505.22617).

    `eligible_N` can leave out tokens that the ratio's bounds silence already. Fewer candidates than that are all taken.
    """
    inside_N = (covariances_N > low) & (covariances_N < high)
    candidates = np.flatnonzero(inside_N if eligible_N is None else inside_N & eligible_N)
    wanted = min(max(int(fraction * len(covariances_N)), 1), len(candidates))
    return _chosen(rng.choice(candidates, wanted, replace=False) if wanted else candidates, len(covariances_N))


def kl_cov(covariances_N: Float64s, *, fraction: float = 2e-4) -> Bools:
    """The `fraction` of tokens, at least one, whose covariance is largest (arXiv 2505.22617)."""
    return _largest(covariances_N, fraction)


def top_entropy(entropy_N: Float64s, *, fraction: float = 0.2) -> Bools:
    """The `fraction` of tokens, at least one, where the policy was least certain: those to train (arXiv 2506.01939)."""
    return _largest(entropy_N, fraction)


def _largest(values_N: Float64s, fraction: float) -> Bools:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction is the part of all tokens to select, above 0 and up to 1; it is {fraction}")
    wanted = min(max(int(fraction * len(values_N)), 1), len(values_N))
    return _chosen(np.argsort(-values_N, kind="stable")[:wanted], len(values_N))


def _chosen(indices: np.ndarray, count: int) -> Bools:
    chosen_N = np.zeros(count, np.bool_)
    chosen_N[indices] = True
    return chosen_N
