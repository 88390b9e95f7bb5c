"""Logits in, one token a row out: temperature, then top-k, then top-p, then min-p, then one uniform number a row.

Each row has its own settings. A truncation is a floor under a row's scaled logits: tokens below it are never drawn.
Tokens that tie with the last one kept are kept too, so that a result never depends on how a sort breaks ties. The draw
inverts the cumulative distribution: one pass over the vocabulary, and the same token whoever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How each of N rows is drawn; see `SamplingParams` for the meaning of each."""

    temperature_N: Float64s
    top_k_N: Int64s
    top_p_N: Float64s
    min_p_N: Float64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token for each row [N]. A logprob is NaN where the row's logits were not numbers.

    `logprobs_N` are of the model's own distribution at the temperature, before truncation (at temperature 1 for greedy
    rows, where the limit says nothing); `sampling_logprobs_N` are of the distribution drawn from (0 for greedy rows).
    """

    tokens_N: Int64s
    logprobs_N: NDArray[np.floating]
    sampling_logprobs_N: NDArray[np.floating]


def uniforms(seed: int, count: int) -> Float64s:
    """The numbers in [0, 1) that draw the first, second, ... token of a request with this seed: [count].

    Philox is counter-based: number n is a function of (seed, n) alone, so a request that is interrupted, or runs among
    others, goes on with the numbers it would have had.
    """
    return np.random.Generator(np.random.Philox(key=seed % (1 << 128))).random(count)


def draw(logits_NV: Tensor, settings: Settings, uniforms_N: Float64s) -> Drawn:
    """Draw a token for each row of logits; float64 logits are handled in float64, all others in float32."""
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    greedy_N = settings.temperature_N == 0
    scaled_NV = _scaled(logits_NV, np.where(greedy_N, 1.0, settings.temperature_N))
    model_NV = torch.softmax(scaled_NV, -1)
    drawn_NV = _truncated(scaled_NV, model_NV, settings)
    cumulative_NV = drawn_NV.cumsum(-1)
    total_N1 = cumulative_NV[:, -1:]
    # Below the total even after rounding, so that the index found has a probability above 0.
    target_N1 = _column(uniforms_N, logits_NV) * total_N1
    target_N1 = torch.minimum(target_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    if greedy_N.any():
        chosen_N1 = torch.from_numpy(greedy_N)[:, None].to(logits_NV.device)
        tokens_N1 = torch.where(chosen_N1, scaled_NV.argmax(-1, keepdim=True), tokens_N1)
    logprobs_N1 = model_NV.gather(-1, tokens_N1).log_()
    sampling_N1 = logprobs_N1 if drawn_NV is model_NV else drawn_NV.gather(-1, tokens_N1).div_(total_N1).log_()
    tokens_N, logprobs_N, sampling_N = (x[:, 0].cpu().numpy() for x in (tokens_N1, logprobs_N1, sampling_N1))
    return Drawn(
        tokens_N=tokens_N,
        logprobs_N=logprobs_N,
        sampling_logprobs_N=np.where(greedy_N, 0.0, sampling_N) if greedy_N.any() else sampling_N,
    )


def _column(values_N: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values_N).to(device=like.device, dtype=like.dtype)[:, None]


def _scaled(logits_NV: Tensor, temperature_N: Float64s) -> Tensor:
    return logits_NV if (temperature_N == 1).all() else logits_NV / _column(temperature_N, logits_NV)


def _truncated(scaled_NV: Tensor, model_NV: Tensor, settings: Settings) -> Tensor:
    """Probabilities with what truncation forbids set to 0, not renormalised; `model_NV` itself when no row asks."""
    k_N, p_N, min_p_N = settings.top_k_N, settings.top_p_N, settings.min_p_N
    asked_N = ((k_N > 0) | (p_N < 1) | (min_p_N > 0)) & (settings.temperature_N > 0)
    if not asked_N.any():
        return model_NV
    rows = np.flatnonzero(asked_N)
    index = torch.from_numpy(rows).to(scaled_NV.device)
    some_NV = scaled_NV[index]
    floor_N1 = torch.full_like(some_NV[:, :1], -torch.inf)
    if (k_N[rows] > 0).any():
        floor_N1 = _top_k_floor(some_NV, k_N[rows])
    if (p_N[rows] < 1).any():
        floor_N1 = torch.maximum(floor_N1, _top_p_floor(some_NV, floor_N1, p_N[rows]))
    if (min_p_N[rows] > 0).any():
        with np.errstate(divide="ignore"):  # min_p 0 is a floor of minus infinity: everything stays
            floor_N1 = torch.maximum(floor_N1, some_NV.amax(-1, keepdim=True) + _column(np.log(min_p_N[rows]), some_NV))
    kept_NV = torch.where(some_NV >= floor_N1, model_NV[index], 0.0)
    return kept_NV if len(rows) == len(scaled_NV) else model_NV.index_copy(0, index, kept_NV)


def _top_k_floor(scaled_NV: Tensor, k_N: Int64s) -> Tensor:
    """Each row's k-th largest logit; minus infinity where k is 0 or more than there are."""
    vocab_size = scaled_NV.shape[-1]
    limits_N = (k_N > 0) & (k_N < vocab_size)
    best_NK = scaled_NV.topk(min(int(k_N.max()), vocab_size)).values
    at_N1 = torch.from_numpy(np.where(limits_N, k_N, 1) - 1)[:, None].to(scaled_NV.device)
    return torch.where(torch.from_numpy(limits_N)[:, None].to(scaled_NV.device), best_NK.gather(-1, at_N1), -torch.inf)


def _top_p_floor(scaled_NV: Tensor, floor_N1: Tensor, p_N: Float64s) -> Tensor:
    """The last logit of the smallest set that holds probability p of what is at or above `floor_N1`."""
    ordered_NV = _descending(scaled_NV)
    probs_NV = torch.softmax(torch.where(ordered_NV >= floor_N1, ordered_NV, -torch.inf), -1)
    p_N1 = _column(p_N, scaled_NV)
    # Rounding may leave the whole sum just under p: then everything stays.
    last_N1 = (probs_NV.cumsum(-1) < p_N1).sum(-1, keepdim=True).clamp_(max=scaled_NV.shape[-1] - 1)
    return torch.where(p_N1 < 1, ordered_NV.gather(-1, last_N1), -torch.inf)


def _descending(values_NV: Tensor) -> Tensor:
    """Each row, largest first. On CPUs NumPy's vectorised sort takes a tenth of torch's time."""
    if values_NV.device.type == "cpu":
        return torch.from_numpy(np.sort(values_NV.numpy(), axis=-1)).flip(-1)
    return values_NV.sort(descending=True).values
