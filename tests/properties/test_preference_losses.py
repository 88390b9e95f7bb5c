"""Preference losses against a second, plain version of each in float64, however the pairs are packed.

Every column holds NaN where its mask is off, so each test here is a poison test too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
import pytest
import torch
from hypothesis import example as known
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strop.algos.preference_losses import (
    DPO,
    IPO,
    KTO,
    ORPO,
    BradleyTerry,
    Hinge,
    PairInputs,
    RobustDPO,
    SimPO,
    kto_baseline,
)
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import Batch, Example, Packed
from strop.data.pairs import Fit, Preference, pack_alone, pack_pairs, pack_scored, with_reference_logprobs
from strop.engines.base import Loss
from strop.engines.build import build_engine
from strop.ops.select import Impl
from strop.types import Layout, Metric, Outputs, merge_metrics, results
from tests.tiny_models import tiny_model

Floats = NDArray[np.float64]
PairLoss = Callable[[Floats, Floats, Floats, Floats], float]  # chosen, its reference, rejected, its reference


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + exp(-x))


def nls(x: float) -> float:
    """-log sigmoid, as it is written on paper."""
    return log(1.0 + exp(-x))


def odds(logprob: float) -> float:
    p = exp(logprob)
    return p / (1.0 - p)


def dpo(beta: float, e: float = 0.0, per_token: bool = False) -> PairLoss:
    def loss(c: Floats, c_ref: Floats, r: Floats, r_ref: Floats) -> float:
        h = beta * difference(c, c_ref, r, r_ref, per_token)
        return (1 - e) * nls(h) + e * nls(-h)

    return loss


def difference(c: Floats, c_ref: Floats, r: Floats, r_ref: Floats, per_token: bool) -> float:
    if per_token:
        return float(np.mean(c - c_ref) - np.mean(r - r_ref))
    return float(np.sum(c) - np.sum(c_ref) - np.sum(r) + np.sum(r_ref))


def robust(beta: float, e: float) -> PairLoss:
    def loss(c: Floats, c_ref: Floats, r: Floats, r_ref: Floats) -> float:
        h = beta * difference(c, c_ref, r, r_ref, False)
        return ((1 - e) * nls(h) - e * nls(-h)) / (1 - 2 * e)

    return loss


def hinge(beta: float) -> PairLoss:
    return lambda c, c_ref, r, r_ref: max(0.0, 1.0 - beta * difference(c, c_ref, r, r_ref, False))


def ipo(beta: float, per_token: bool) -> PairLoss:
    return lambda c, c_ref, r, r_ref: (difference(c, c_ref, r, r_ref, per_token) - 1.0 / (2.0 * beta)) ** 2


def simpo(beta: float, gamma: float) -> PairLoss:
    return lambda c, c_ref, r, r_ref: nls(beta * float(np.mean(c)) - beta * float(np.mean(r)) - gamma)


def orpo(beta: float) -> PairLoss:
    def loss(c: Floats, c_ref: Floats, r: Floats, r_ref: Floats) -> float:
        ratio = odds(float(np.mean(c))) / odds(float(np.mean(r)))
        return -float(np.mean(c)) + beta * nls(log(ratio))

    return loss


def bradley_terry(center: float) -> Callable[[float, float, float], float]:
    return lambda v_c, v_r, margin: nls(v_c - v_r - margin) + center * (v_c + v_r) ** 2


PAIRWISE = {
    "dpo": (DPO(beta=0.7), dpo(0.7)),
    "cdpo": (DPO(beta=0.7, label_smoothing=0.2), dpo(0.7, 0.2)),
    "dpo per token": (DPO(beta=3.0, per_token=True), dpo(3.0, 0.0, True)),
    "robust": (RobustDPO(beta=0.7, label_smoothing=0.2), robust(0.7, 0.2)),
    "hinge": (Hinge(beta=0.3), hinge(0.3)),
    "ipo": (IPO(beta=0.4), ipo(0.4, False)),
    "ipo per token": (IPO(beta=0.4, per_token=True), ipo(0.4, True)),
    "simpo": (SimPO(beta=2.0, target_margin=0.5), simpo(2.0, 0.5)),
    "orpo": (ORPO(beta=0.3), orpo(0.3)),
}


@dataclass
class Drawn:
    """Pairs with numbers at their trained tokens: [M], chosen before rejected, pair by pair."""

    preferences: list[Preference]
    lengths: list[int]  # trained tokens of each text
    logprobs_M: Floats
    reference_M: Floats

    def texts(self, value_M: Floats) -> list[Floats]:
        return np.split(value_M, np.cumsum(self.lengths)[:-1])


def example(prompt: list[int], reply: list[int], task_id: str) -> Example:
    trained = np.array([False] * len(prompt) + [True] * len(reply))
    return Example(np.array(prompt + reply, np.int32), trained, task_id)


def drawn(lengths: list[tuple[int, int]], seed: int) -> Drawn:
    """One pair for each two lengths; prompts of 1 to 5 tokens, replies that begin alike."""
    rng = np.random.default_rng(seed)
    preferences: list[Preference] = []
    for p, (n_c, n_r) in enumerate(lengths):
        prompt = rng.integers(3, 96, rng.integers(1, 6)).tolist()
        texts = [example(prompt, [7, *rng.integers(3, 96, n - 1).tolist()], f"t{p}") for n in (n_c, n_r)]
        margin = float(rng.normal())
        preferences.append(Preference(task_id=f"t{p}", chosen=texts[0], rejected=texts[1], margin=margin))
    flat = [n for pair in lengths for n in pair]
    return Drawn(preferences, flat, -3.0 * rng.random(sum(flat)) - 0.05, -3.0 * rng.random(sum(flat)))


def fit(max_tokens: int = 64, *, share_prefixes: bool = True, data_parallel: int = 1) -> Fit:
    return Fit(
        max_tokens=max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel, too_long=TooLong.ERROR
    )


def place(packed: Packed[PairInputs], value_M: Floats) -> list[torch.Tensor]:
    """Numbers of the trained tokens at their rows, NaN everywhere else: float64 [T] for each batch."""
    value_T = np.full(sum(packed.trained.length_B), np.nan)
    value_T[packed.trained.row_M] = value_M
    return list(torch.from_numpy(value_T).split(packed.trained.length_B))


def measured(
    packed: Packed[PairInputs], loss: Loss[PairInputs], columns: list[torch.Tensor], *, values: bool = False
) -> tuple[float, Floats, dict[str, float]]:
    """(sum of weights * loss, its gradient [M] by the columns, metrics); the columns are logprobs, or values."""
    live = [column.clone().requires_grad_() for column in columns]
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for batch, column_T in zip(packed.batches, live, strict=True):
        outputs = Outputs(logprobs_T=column_T, values_T=column_T if values else None)
        loss_T, found = loss(outputs, batch.inputs, batch.layout, batch.mask_T)
        assert loss_T[batch.mask_T].isfinite().all()
        total = total + (torch.where(batch.mask_T, loss_T, 0.0) * batch.weights_T.double()).sum()
        metrics.append(found)
    total.backward()
    grads = [torch.zeros_like(column) if column.grad is None else column.grad for column in live]
    found = torch.cat(grads).numpy()
    assert not np.delete(found, packed.trained.row_M).any(), "a masked place has a gradient, or NaN"
    return total.item(), found[packed.trained.row_M], results(merge_metrics(metrics))


def finite_differences(f: Callable[[Floats], float], at_M: Floats) -> Floats:
    steps = np.eye(len(at_M)) * 1e-6
    return np.array([(f(at_M + step) - f(at_M - step)) / 2e-6 for step in steps])


LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
PACKINGS = st.tuples(st.sampled_from([18, 24, 64]), st.booleans(), st.integers(1, 5))


@pytest.mark.parametrize("name", PAIRWISE)
@given(lengths=LENGTHS, packing=PACKINGS, seed=st.integers(0, 999))
@known(lengths=[(1, 1), (3, 1), (1, 1), (2, 3)], packing=(18, False, 3), seed=128)
@settings(max_examples=15)
def test_a_pairwise_loss_is_its_formula_and_so_is_its_gradient(
    name: str, lengths: list[tuple[int, int]], packing: tuple[int, bool, int], seed: int
) -> None:
    """A01, G04: a mean over pairs, whatever shares a batch, a prefix or a rank."""
    loss, plain = PAIRWISE[name]
    pairs = drawn(lengths, seed)
    max_tokens, share_prefixes, data_parallel = packing
    packed = pack_pairs(pairs.preferences, fit(max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel))
    packed = replace(packed, batches=with_reference_logprobs(packed.batches, place(packed, pairs.reference_M)))
    reference = pairs.texts(pairs.reference_M)

    def mean_over_pairs(value_M: Floats) -> float:
        texts = pairs.texts(value_M)
        each = [plain(texts[n], reference[n], texts[n + 1], reference[n + 1]) for n in range(0, len(texts), 2)]
        return sum(each) / len(each)

    value, gradient_M, metrics = measured(packed, loss, place(packed, pairs.logprobs_M))
    assert value == pytest.approx(mean_over_pairs(pairs.logprobs_M), rel=1e-6)
    assert metrics["loss/preference"] == pytest.approx(value, rel=1e-6)
    expected_M = finite_differences(mean_over_pairs, pairs.logprobs_M)
    assert np.allclose(gradient_M, expected_M, rtol=1e-5, atol=1e-7)


@given(lengths=LENGTHS, packing=PACKINGS, seed=st.integers(0, 999), alone=st.integers(0, 3))
@settings(max_examples=25)
def test_kto_is_its_formula_on_pairs_and_on_single_texts(
    lengths: list[tuple[int, int]], packing: tuple[int, bool, int], seed: int, alone: int
) -> None:
    pairs = drawn(lengths, seed)
    good = [n % 2 == 0 for n in range(len(pairs.lengths))]
    kept = list(range(len(good)))
    if alone:  # the first pair loses one of its texts
        first, lost = pairs.preferences[0], alone % 2
        single = replace(first, chosen=None) if lost == 0 else replace(first, rejected=None)
        pairs.preferences[0] = single
        kept.remove(lost)
    texts, reference = pairs.texts(pairs.logprobs_M), pairs.texts(pairs.reference_M)
    at_M, reference_M = (np.concatenate([column[n] for n in kept]) for column in (texts, reference))
    max_tokens, share_prefixes, data_parallel = packing
    packed = pack_alone(pairs.preferences, fit(max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel))
    packed = replace(packed, batches=with_reference_logprobs(packed.batches, place(packed, reference_M)))

    def mean_over_texts(value_M: Floats) -> float:
        found = np.split(value_M - reference_M, np.cumsum([pairs.lengths[n] for n in kept])[:-1])
        each = [
            1.5 * (1 - sigmoid(0.6 * (x.sum() - 0.25))) if good[n] else 0.8 * (1 - sigmoid(0.6 * (0.25 - x.sum())))
            for n, x in zip(kept, found, strict=True)
        ]
        return sum(each) / len(each)

    loss = KTO(beta=0.6, baseline=0.25, desirable=1.5, undesirable=0.8)
    value, gradient_M, metrics = measured(packed, loss, place(packed, at_M))
    assert value == pytest.approx(mean_over_texts(at_M), rel=1e-6)
    assert metrics["loss/preference"] == pytest.approx(value, rel=1e-6)
    assert np.allclose(gradient_M, finite_differences(mean_over_texts, at_M), rtol=1e-5, atol=1e-7)


@given(lengths=LENGTHS, packing=PACKINGS, seed=st.integers(0, 999), center=st.sampled_from([0.0, 0.1]))
@settings(max_examples=25)
def test_a_reward_models_loss_is_bradley_terrys_of_the_last_tokens_values(
    lengths: list[tuple[int, int]], packing: tuple[int, bool, int], seed: int, center: float
) -> None:
    pairs = drawn(lengths, seed)
    max_tokens, share_prefixes, data_parallel = packing
    packed = pack_scored(pairs.preferences, fit(max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel))
    at_N = np.random.default_rng(seed).normal(size=2 * len(lengths))
    plain = bradley_terry(center)

    def mean_over_pairs(value_N: Floats) -> float:
        each = [
            plain(float(value_N[2 * p]), float(value_N[2 * p + 1]), pair.margin)
            for p, pair in enumerate(pairs.preferences)
        ]
        return sum(each) / len(each)

    value, gradient_N, metrics = measured(packed, BradleyTerry(center=center), place(packed, at_N), values=True)
    assert value == pytest.approx(mean_over_pairs(at_N), rel=1e-5)
    assert np.allclose(gradient_N, finite_differences(mean_over_pairs, at_N), rtol=1e-5, atol=1e-7)
    assert metrics["preference/accuracy"] == pytest.approx(np.mean(at_N[::2] > at_N[1::2]))
    ends = [int(batch.layout.starts_S[s] + batch.layout.lengths[s] - 1) for batch in packed.batches[:1]
            for s in range(len(batch.layout.lengths)) if s not in batch.layout.parents]  # fmt: skip
    assert packed.batches[0].mask_T.nonzero()[:, 0].tolist() == ends, "the rows that are scored are the texts' last"


def test_numbers_that_can_be_checked_by_hand() -> None:
    """One pair: chosen gains 2 nats on the reference, rejected loses 1; h = 3."""
    inputs = PairInputs(
        pair_T=torch.zeros(3, dtype=torch.int64),
        chosen_T=torch.tensor([True, True, False]),
        reference_logprobs_T=torch.tensor([-2.0, -3.0, -1.0], dtype=torch.float64),
    )
    outputs = Outputs(logprobs_T=torch.tensor([-1.0, -2.0, -2.0], dtype=torch.float64))
    mask_T, layout = torch.ones(3, dtype=torch.bool), Layout((2, 1))

    def of(loss: Loss[PairInputs]) -> float:
        loss_T = loss(outputs, inputs, layout, mask_T)[0]
        assert loss_T.tolist() == [loss_T[0].item()] * 3, "every token of a pair is told the pair's loss"
        return loss_T[0].item()

    assert of(DPO(beta=1.0)) == pytest.approx(0.0485873516)  # log(1 + e^-3)
    assert of(DPO(beta=1.0, per_token=True)) == pytest.approx(0.1269280110)  # h = 1 - (-1) = 2
    assert of(DPO(beta=1.0, label_smoothing=0.25)) == pytest.approx(0.0485873516 + 0.25 * 3)
    assert of(RobustDPO(beta=1.0, label_smoothing=0.25)) == pytest.approx(0.0485873516 - 0.25 * 3 / 0.5)
    assert of(RobustDPO(beta=1.0, label_smoothing=0.0)) == pytest.approx(of(DPO(beta=1.0)))
    assert of(Hinge(beta=0.25)) == pytest.approx(0.25) and of(Hinge(beta=1.0)) == 0.0
    assert of(IPO(beta=0.25)) == pytest.approx((3.0 - 2.0) ** 2)
    assert of(IPO(beta=0.25, per_token=True)) == pytest.approx((2.0 - 2.0) ** 2)
    assert of(SimPO(beta=2.0, target_margin=1.0)) == pytest.approx(0.6931471806)  # 2 (-1.5 + 2) - 1 = 0
    p, q = exp(-1.5), exp(-2.0)
    assert of(ORPO(beta=0.5)) == pytest.approx(1.5 + 0.5 * log(1.0 + (q / (1 - q)) / (p / (1 - p))))
    alone = replace(inputs, pair_T=torch.tensor([0, 0, 1]))
    loss_T = KTO(beta=1.0, baseline=1.0, undesirable=2.0)(outputs, alone, layout, mask_T)[0]
    assert loss_T.tolist() == pytest.approx([0.2689414214, 0.2689414214, 2 * 0.1192029220])  # s(1 - 2), 2 s(-1 - 1)


def test_ktos_baseline_is_a_mean_that_never_falls_below_zero() -> None:
    assert kto_baseline(6.0, 4) == 1.5 and kto_baseline(-6.0, 4) == 0.0
    with pytest.raises(ValueError, match="none"):
        kto_baseline(0.0, 0)


EVERY: dict[str, Loss[PairInputs]] = {
    **{name: loss for name, (loss, _) in PAIRWISE.items()},
    "kto": KTO(beta=0.6, baseline=0.25),
    "bradley-terry": BradleyTerry(center=0.1),
}


@pytest.mark.parametrize("name", EVERY)
def test_masked_places_may_hold_anything(name: str) -> None:
    """A12-A16 and the like: NaN, infinities and wild indices where the mask is off change no bit of anything."""
    loss, pairs = EVERY[name], drawn([(3, 2), (1, 4)], 5)
    pack = pack_scored if name == "bradley-terry" else pack_alone if name == "kto" else pack_pairs
    packed = pack(pairs.preferences, fit())
    (batch,) = packed.batches
    off_T, rng = ~batch.mask_T, torch.Generator().manual_seed(0)

    def found(poison: float) -> tuple[list[float], list[float], dict[str, Metric]]:
        def spoiled(column_T: torch.Tensor) -> torch.Tensor:
            return torch.where(off_T, poison, column_T)

        inputs = PairInputs(
            pair_T=batch.inputs.pair_T + off_T * (0 if poison == 0.0 else 10**9),
            chosen_T=batch.inputs.chosen_T ^ (off_T if poison != 0.0 else torch.zeros_like(off_T)),
            reference_logprobs_T=spoiled(reference_T),
            margin_T=spoiled(reference_T),
        )
        live_T = spoiled(logprobs_T).requires_grad_()
        loss_T, metrics = loss(Outputs(logprobs_T=live_T, values_T=live_T), inputs, batch.layout, batch.mask_T)
        torch.where(batch.mask_T, loss_T, 0.0).sum().backward()
        assert live_T.grad is not None
        return loss_T[batch.mask_T].tolist(), live_T.grad.tolist(), metrics

    logprobs_T, reference_T = (-3.0 * torch.rand(len(batch), generator=rng) for _ in range(2))
    clean = found(0.0)
    for poison in (float("nan"), float("inf"), float("-inf"), 1e30):
        other = found(poison)
        assert other[:2] == clean[:2]
        assert results(other[2]) == results(clean[2])


def test_nothing_overflows_where_texts_are_far_apart_or_certain() -> None:
    inputs = PairInputs(
        pair_T=torch.tensor([0, 0]),
        chosen_T=torch.tensor([True, False]),
        reference_logprobs_T=torch.zeros(2),
        margin_T=torch.zeros(2),
    )
    for name, loss in EVERY.items():
        for logprobs in ([0.0, -1e4], [-1e4, 0.0], [0.0, 0.0]):
            live_T = torch.tensor(logprobs, requires_grad=True)
            layout, mask_T = Layout((1, 1)), torch.tensor([True, True])
            loss_T, _ = loss(Outputs(logprobs_T=live_T, values_T=live_T), inputs, layout, mask_T)
            loss_T.sum().backward()
            assert loss_T.isfinite().all() and live_T.grad is not None and live_T.grad.isfinite().all(), name


def test_metrics_count_pairs_and_merge_over_batches() -> None:
    pairs = drawn([(2, 1), (1, 3), (2, 2)], 1)
    loss = DPO(beta=0.5)
    for max_tokens, data_parallel in ((64, 1), (12, 1), (64, 7)):
        packed = pack_pairs(pairs.preferences, fit(max_tokens, data_parallel=data_parallel))
        batches = with_reference_logprobs(packed.batches, place(packed, pairs.reference_M))
        _, _, metrics = measured(replace(packed, batches=batches), loss, place(packed, pairs.logprobs_M))
        x = [float(text.sum()) for text in pairs.texts(pairs.logprobs_M - pairs.reference_M)]
        assert metrics["preference/margin"] == pytest.approx(0.5 * np.mean(np.array(x[::2]) - np.array(x[1::2])))
        assert metrics["preference/chosen_reward"] == pytest.approx(0.5 * np.mean(x[::2]))
        assert metrics["preference/rejected_reward"] == pytest.approx(0.5 * np.mean(x[1::2]))
        assert metrics["preference/accuracy"] == pytest.approx(np.mean(np.array(x[::2]) > np.array(x[1::2])))
        chosen_M = np.concatenate(pairs.texts(pairs.logprobs_M)[::2])
        assert metrics["preference/chosen_nll"] == pytest.approx(-chosen_M.mean())


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto"])
def test_a_models_gradient_does_not_depend_on_packing_nor_on_halves(name: str) -> None:
    """A01, A05, G04: prompts shared or repeated, one batch or many, one call or two, through a whole model, float64."""
    loss, pairs = EVERY[name], drawn([(3, 2), (1, 4), (2, 2), (4, 1)], 3)
    pack = pack_alone if name == "kto" else pack_pairs
    found: list[dict[str, torch.Tensor]] = []
    for share_prefixes, max_tokens, data_parallel, calls in (
        (False, 200, 1, 1),
        (True, 200, 1, 1),
        (True, 18, 1, 2),
        (False, 18, 4, 2),
        (True, 200, 8, 3),
    ):
        packed = pack(pairs.preferences, fit(max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel))
        batches = with_reference_logprobs(packed.batches, place(packed, pairs.reference_M))
        model = tiny_model("qwen3", torch.float64, Impl.TORCH)
        engine = build_engine(EngineConfig(), model)
        for call in range(calls):
            asyncio.run(engine.forward_backward(batches[call::calls], loss))
        found.append({n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None})
    scale = max(float(g.abs().max()) for g in found[0].values())
    assert scale > 1e-4
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for parameter, grad in found[0].items():
            assert torch.allclose(grad, other[parameter], rtol=0, atol=1e-6 * scale), parameter


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DPO(beta=0.0), "beta"),
        (lambda: DPO(beta=1.0, label_smoothing=0.5), "label_smoothing"),
        (lambda: RobustDPO(beta=1.0, label_smoothing=0.7), "label_smoothing"),
        (lambda: SimPO(beta=1.0, target_margin=-1.0), "target_margin"),
        (lambda: KTO(beta=1.0, baseline=-0.1), "baseline"),
        (lambda: BradleyTerry(center=-1.0), "center"),
    ],
)
def test_knobs_out_of_bounds_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_missing_reference_or_value_head_is_named() -> None:
    batch: Batch[PairInputs] = pack_pairs(drawn([(1, 1)], 0).preferences, fit()).batches[0]
    outputs = Outputs(logprobs_T=torch.zeros(len(batch)))
    for loss, says in ((DPO(beta=1.0), "reference"), (KTO(beta=1.0, baseline=0.0), "reference"),
                       (BradleyTerry(), "value head")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            loss(outputs, batch.inputs, batch.layout, batch.mask_T)
