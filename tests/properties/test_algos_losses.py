"""Every policy loss against a short reference, its gradient against finite differences, and what must not change it.

A reference sees one sequence's trained tokens as float64 arrays and writes down the paper's formula. It is given the
logprobs twice: `x` is what the gradient is taken by, `x0` the same numbers where the paper stops the gradient. So the
finite differences of the reference are the gradient that the loss must have, stop-gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algos.losses import (
    CISPO,
    DRO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    DPPOKullbackLeibler,
    DPPOTotalVariation,
    ImportanceSampling,
    KLCov,
    PolicyGradient,
    PolicyInputs,
    PolicyLoss,
)
from strop.algos.sequence_losses import GMPO, GSPO, GSPOToken
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Metrics, Outputs, merge_metrics

Array = np.ndarray
EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Old:
    """The constants of one sequence's trained tokens."""

    logprobs: Array
    advantages: Array
    selected: Array


Reference = Callable[[Array, Array, Old], Array]


def pessimistic(ratio: Array, old: Old, low: float, high: float, dual: float = np.inf) -> Array:
    """PPO as its paper writes it: minus the smaller of two gains; and no loss above `dual` for a bad token."""
    a = old.advantages
    loss = -np.minimum(ratio * a, np.clip(ratio, low, high) * a)
    return np.where(a < 0, np.minimum(loss, -a * dual), loss) if np.isfinite(dual) else loss


def geometric_mean(x: Array, old: Old, low: float, high: float) -> Array:
    a, ratio = old.advantages, np.exp(x - old.logprobs)
    kept = np.where(a > 0, np.minimum(ratio, np.exp(high)), np.maximum(ratio, np.exp(-low)))
    kept = np.where(a == 0, 1.0, kept)
    return np.full(len(x), -a.mean() * kept.prod() ** (1 / len(x)))


def trusted(x0: Array, old: Old, distance: Array, low: float, high: float, cap: float) -> Array:
    away = np.where(old.advantages > 0, x0 > old.logprobs, x0 < old.logprobs)
    outside = distance > np.where(old.advantages > 0, high, low)
    return np.where(away & outside, 0.0, np.minimum(np.exp(x0 - old.logprobs), cap))


def dppo_tv(x: Array, x0: Array, old: Old) -> Array:
    distance = np.abs(np.exp(x0) - np.exp(old.logprobs))
    return -old.advantages * trusted(x0, old, distance, 0.05, 0.1, 2.0) * x


def dppo_kl(x: Array, x0: Array, old: Old) -> Array:
    p, q = np.exp(old.logprobs), np.exp(x0)
    distance = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    return -old.advantages * trusted(x0, old, distance, 0.01, 0.02, 2.0) * x


def gspo(x: Array, x0: Array, old: Old) -> Array:
    ratio = np.exp(x - old.logprobs).prod() ** (1 / len(x))
    return pessimistic(np.full(len(x), ratio), old, 0.9, 1.2)


def gspo_token(x: Array, x0: Array, old: Old) -> Array:
    ratio = np.exp(x0 - old.logprobs).prod() ** (1 / len(x))
    return pessimistic(ratio * np.exp(x) / np.exp(x0), old, 0.9, 1.2)


def sapo(x: Array, x0: Array, old: Old) -> Array:
    tau = np.where(old.advantages > 0, 1.0, 1.05)
    return -old.advantages * 4 / tau / (1 + np.exp(-tau * (np.exp(x - old.logprobs) - 1)))


def ratio(x: Array, old: Old) -> Array:
    return np.exp(x - old.logprobs)


CASES: dict[str, tuple[PolicyLoss, Reference]] = {
    "ppo": (
        ClippedSurrogate(clip_low=0.2, clip_high=0.28),
        lambda x, x0, old: pessimistic(ratio(x, old), old, 0.8, 1.28),
    ),
    "ppo_dual": (
        ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=1.5),
        lambda x, x0, old: pessimistic(ratio(x, old), old, 0.8, 1.28, 1.5),
    ),
    "importance_sampling": (ImportanceSampling(), lambda x, x0, old: -old.advantages * ratio(x, old)),
    "policy_gradient": (PolicyGradient(), lambda x, x0, old: -old.advantages * x),
    "cispo": (
        CISPO(ratio_min=0.8, ratio_max=1.3),
        lambda x, x0, old: -np.clip(ratio(x0, old), 0.8, 1.3) * old.advantages * x,
    ),
    "sapo": (SAPO(), sapo),
    "dro": (DRO(beta=0.3), lambda x, x0, old: -(old.advantages * x - 0.15 * (x - old.logprobs) ** 2)),
    "dppo_tv": (DPPOTotalVariation(low=0.05, high=0.1, ratio_max=2.0), dppo_tv),
    "dppo_kl": (DPPOKullbackLeibler(low=0.01, high=0.02, ratio_max=2.0), dppo_kl),
    "clip_cov": (
        ClipCov(clip_low=0.2, clip_high=0.28),
        lambda x, x0, old: np.where(old.selected, 0.0, pessimistic(ratio(x, old), old, 0.8, 1.28)),
    ),
    "kl_cov": (
        KLCov(coefficient=0.7),
        lambda x, x0, old: -old.advantages * ratio(x, old) + 0.7 * old.selected * np.abs(x - old.logprobs),
    ),
    "gspo": (GSPO(clip_low=0.1, clip_high=0.2), gspo),
    "gspo_token": (GSPOToken(clip_low=0.1, clip_high=0.2), gspo_token),
    "gmpo": (GMPO(clip_low=0.3, clip_high=0.4), lambda x, x0, old: geometric_mean(x, old, 0.3, 0.4)),
}
every_loss = pytest.mark.parametrize("name", CASES)


@dataclass(frozen=True)
class Step:
    """Random sequences, packed: everything [T] in float64."""

    layout: Layout
    mask_T: Tensor
    logprobs_T: Tensor
    entropy_T: Tensor
    inputs: PolicyInputs
    weights_T: Tensor

    @staticmethod
    def draw(lengths: list[int], seed: int) -> Step:
        rng = np.random.default_rng(seed)
        total = sum(lengths)
        old = -rng.uniform(0.05, 3.0, total)
        logprobs = np.minimum(old + 0.4 * rng.normal(size=total), -0.01)
        advantages = np.repeat(rng.normal(size=len(lengths)), lengths) + 0.3 * rng.normal(size=total)
        advantages[rng.random(total) < 0.1] = 0.0

        def tensor(values: Array) -> Tensor:
            return torch.from_numpy(values)

        return Step(
            layout=Layout(tuple(lengths)),
            mask_T=tensor(rng.random(total) < 0.75),
            logprobs_T=tensor(logprobs),
            entropy_T=tensor(rng.uniform(0, 2, total)),
            inputs=PolicyInputs(
                behavior_logprobs_T=tensor(old),
                advantages_T=tensor(advantages),
                reference_logprobs_T=tensor(old + 0.2 * rng.normal(size=total)),
                proximal_logprobs_T=tensor(old + 0.1 * rng.normal(size=total)),
                correction_T=tensor(rng.uniform(0.5, 1.5, total)),
                selected_T=tensor(rng.random(total) < 0.3),
            ),
            weights_T=tensor(rng.normal(size=total)),
        )

    def bare(self) -> Step:
        """The same without the terms and constants that only some users have."""
        inputs = replace(self.inputs, reference_logprobs_T=None, proximal_logprobs_T=None, correction_T=None)
        return replace(self, inputs=inputs)

    def run(self, loss: PolicyLoss) -> tuple[Tensor, Tensor, Metrics]:
        """(loss_T, the gradient of the weighted sum by the logprobs, metrics), as an engine would get them."""
        logprobs_T = self.logprobs_T.clone().requires_grad_()
        outputs = Outputs(logprobs_T=logprobs_T, entropy_T=self.entropy_T)
        loss_T, metrics = loss(outputs, self.inputs, self.layout, self.mask_T)
        (torch.where(self.mask_T, loss_T, 0.0) * torch.where(self.mask_T, self.weights_T, 0.0)).sum().backward()
        assert logprobs_T.grad is not None
        return loss_T.detach(), logprobs_T.grad, metrics

    def take(self, sequences: list[int], parents: tuple[int, ...] = ()) -> Step:
        """Some of the sequences, in this order, as another pack."""
        starts, lengths = self.layout.starts_S, self.layout.lengths_S
        rows = torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in sequences] or [torch.arange(0)])
        i = self.inputs

        def of(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[rows]

        return Step(
            layout=Layout(tuple(int(lengths[s]) for s in sequences), parents),
            mask_T=self.mask_T[rows],
            logprobs_T=self.logprobs_T[rows],
            entropy_T=self.entropy_T[rows],
            inputs=PolicyInputs(
                behavior_logprobs_T=i.behavior_logprobs_T[rows],
                advantages_T=i.advantages_T[rows],
                reference_logprobs_T=of(i.reference_logprobs_T),
                proximal_logprobs_T=of(i.proximal_logprobs_T),
                correction_T=of(i.correction_T),
                selected_T=of(i.selected_T),
            ),
            weights_T=self.weights_T[rows],
        )

    def trained(self) -> Iterator[Array]:
        """The rows of each sequence's trained tokens; sequences without any are left out."""
        for s in range(len(self.layout.lengths)):
            rows = np.flatnonzero((self.layout.sequence_T == s) & self.mask_T.numpy())
            if len(rows):
                yield rows


lengths = st.lists(st.integers(0, 7), max_size=6)
seeds = st.integers(0, 2**32 - 1)


@every_loss
@EXAMPLES
@given(lengths=lengths, seed=seeds)
def test_value_and_gradient_are_the_papers(name: str, lengths: list[int], seed: int) -> None:
    loss, reference = CASES[name]
    step = Step.draw(lengths, seed).bare()
    loss_T, gradient_T, _ = step.run(loss)
    assert loss_T.isfinite().all()
    assert not gradient_T[~step.mask_T].any()
    for rows in step.trained():
        x = step.logprobs_T[rows].numpy()
        old = Old(
            step.inputs.behavior_logprobs_T[rows].numpy(),
            step.inputs.advantages_T[rows].numpy(),
            step.inputs.selected_T[rows].numpy() if step.inputs.selected_T is not None else np.zeros(len(rows), bool),
        )
        np.testing.assert_allclose(loss_T[rows], reference(x, x, old), rtol=1e-7, atol=1e-9)
        w, h = step.weights_T[rows].numpy(), 1e-6
        differences = [
            float(w @ (reference(x + h * e, x, old) - reference(x - h * e, x, old))) / (2 * h) for e in np.eye(len(x))
        ]
        np.testing.assert_allclose(gradient_T[rows], differences, rtol=1e-5, atol=1e-7)


@every_loss
@EXAMPLES
@given(lengths=lengths, seed=seeds, poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, None]))
def test_masked_places_may_hold_anything(name: str, lengths: list[int], seed: int, poison: float | None) -> None:
    """Nothing masked moves a value, a gradient or a metric by a bit: no poison, and (None) no noise."""
    generator = torch.Generator().manual_seed(seed)
    loss = replace(CASES[name][0], kl_coefficient=0.1, entropy_coefficient=0.2)
    step = Step.draw(lengths, seed)
    i = step.inputs

    def spoil(value: Tensor | None) -> Tensor:
        assert value is not None
        noise_T = torch.randn(len(value), generator=generator, dtype=value.dtype)
        return torch.where(step.mask_T, value, noise_T if poison is None else poison)

    assert i.selected_T is not None
    spoiled = replace(
        step,
        logprobs_T=spoil(step.logprobs_T),
        entropy_T=spoil(step.entropy_T),
        inputs=PolicyInputs(
            behavior_logprobs_T=spoil(i.behavior_logprobs_T),
            advantages_T=spoil(i.advantages_T),
            reference_logprobs_T=spoil(i.reference_logprobs_T),
            proximal_logprobs_T=spoil(i.proximal_logprobs_T),
            correction_T=spoil(i.correction_T),
            selected_T=i.selected_T ^ ~step.mask_T,
        ),
    )
    loss_T, gradient_T, metrics = step.run(loss)
    bad_loss_T, bad_gradient_T, bad_metrics = spoiled.run(loss)
    assert bad_loss_T.isfinite().all()
    assert torch.equal(loss_T, bad_loss_T)
    assert torch.equal(gradient_T, bad_gradient_T)
    assert {k: (float(m.value), float(m.count)) for k, m in metrics.items()} == {
        k: (float(m.value), float(m.count)) for k, m in bad_metrics.items()
    }


@every_loss
@EXAMPLES
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=seeds, data=st.data())
def test_order_and_cuts_of_the_pack_change_nothing(
    name: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    """A01, A08, A09, A10: the gradient of the weighted sum, and every metric, are those of the whole step."""
    loss = replace(CASES[name][0], kl_coefficient=0.1, entropy_coefficient=0.2)
    step = Step.draw(lengths, seed)
    _, gradient_T, metrics = step.run(loss)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [step.take(order[:cut]), step.take(order[cut:])]
    measured: list[Metrics] = []
    for sequences, part in zip((order[:cut], order[cut:]), parts, strict=True):
        _, part_gradient_T, part_metrics = part.run(loss)
        measured.append(part_metrics)
        at = 0
        for s in sequences:
            start, n = int(step.layout.starts_S[s]), lengths[s]
            torch.testing.assert_close(
                part_gradient_T[at : at + n], gradient_T[start : start + n], rtol=1e-12, atol=1e-14
            )
            at += n
    for key, merged in merge_metrics(measured).items():
        assert float(merged.count) == float(metrics[key].count) == int(step.mask_T.sum())
        np.testing.assert_allclose(merged.result, metrics[key].result, rtol=1e-9, atol=1e-12, err_msg=key)


@every_loss
@EXAMPLES
@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=5), seed=seeds)
def test_a_neighbour_cannot_be_seen(name: str, lengths: list[int], seed: int) -> None:
    loss = CASES[name][0]
    step, other = Step.draw(lengths, seed), Step.draw(lengths, seed + 1)
    mine_T = torch.from_numpy(step.layout.sequence_T == 0)

    def neighbours(a: Tensor | None, b: Tensor | None) -> Tensor:
        assert a is not None and b is not None
        return torch.where(mine_T, a, b)

    i, j = step.inputs, other.inputs
    beside = replace(
        step,
        mask_T=neighbours(step.mask_T, other.mask_T),
        logprobs_T=neighbours(step.logprobs_T, other.logprobs_T),
        inputs=PolicyInputs(
            behavior_logprobs_T=neighbours(i.behavior_logprobs_T, j.behavior_logprobs_T),
            advantages_T=neighbours(i.advantages_T, j.advantages_T),
            reference_logprobs_T=neighbours(i.reference_logprobs_T, j.reference_logprobs_T),
            proximal_logprobs_T=neighbours(i.proximal_logprobs_T, j.proximal_logprobs_T),
            correction_T=neighbours(i.correction_T, j.correction_T),
            selected_T=neighbours(i.selected_T, j.selected_T),
        ),
    )
    (loss_T, gradient_T, _), (other_T, other_gradient_T, _) = step.run(loss), beside.run(loss)
    assert torch.equal(loss_T[mine_T], other_T[mine_T])
    assert torch.equal(gradient_T[mine_T], other_gradient_T[mine_T])


@every_loss
def test_a_loss_of_single_rows_sees_no_other_row_and_says_so(name: str) -> None:
    """`Want.per_row` lets an engine take a loss's slope one row at a time; a sequence's ratio must not claim it."""
    loss = replace(CASES[name][0], kl_coefficient=0.1, entropy_coefficient=0.2)
    step = Step.draw([7, 5], 3)
    step.mask_T[:] = True
    others_T = torch.arange(len(step.mask_T)) != 2
    moved = replace(step, logprobs_T=torch.where(others_T, step.logprobs_T - 0.1, step.logprobs_T))
    alone = torch.equal(step.run(loss)[0][2], moved.run(loss)[0][2])
    assert alone == loss.want.per_row == (name not in ("gspo", "gspo_token", "gmpo"))


@every_loss
@EXAMPLES
@given(prefix=st.integers(1, 4), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=seeds)
def test_a_branch_counts_its_own_tokens(name: str, prefix: int, lengths: list[int], seed: int) -> None:
    """A prompt shared by its attempts, never trained, leaves every attempt's gradient as it is alone."""
    loss = CASES[name][0]
    step = Step.draw([prefix, *lengths], seed)
    step.mask_T[:prefix] = False
    shared = step.take(list(range(len(lengths) + 1)), parents=(-1, *[0] * len(lengths)))
    _, gradient_T, _ = shared.run(loss)
    for s in range(1, len(lengths) + 1):
        _, alone_T, _ = step.take([s]).run(loss)
        start = int(step.layout.starts_S[s])
        torch.testing.assert_close(gradient_T[start : start + lengths[s - 1]], alone_T, rtol=1e-12, atol=1e-14)


@every_loss
def test_nothing_trained_is_nothing_measured(name: str) -> None:
    loss = replace(CASES[name][0], kl_coefficient=0.1, entropy_coefficient=0.2)
    for lengths in ([], [0], [3, 2]):
        step = Step.draw(lengths, 0)
        step.mask_T[:] = False
        loss_T, gradient_T, metrics = step.run(loss)
        assert loss_T.shape == step.logprobs_T.shape
        assert not loss_T.any() and not gradient_T.any()
        assert all(float(m.count) == 0 and float(m.value) == 0 for m in metrics.values())


@every_loss
@EXAMPLES
@given(lengths=lengths, seed=seeds)
def test_terms_add_to_the_surrogate(name: str, lengths: list[int], seed: int) -> None:
    """correction * surrogate + kl_coefficient * k3 - entropy_coefficient * entropy, anchored at the proximal policy."""
    plain = CASES[name][0]
    loss = replace(plain, kl_coefficient=0.3, entropy_coefficient=0.2)
    step = Step.draw(lengths, seed)
    i = step.inputs
    assert i.proximal_logprobs_T is not None and i.correction_T is not None and i.reference_logprobs_T is not None
    anchored = replace(step.bare(), inputs=replace(step.bare().inputs, behavior_logprobs_T=i.proximal_logprobs_T))
    surrogate_T, _, _ = anchored.run(plain)
    d_T = i.reference_logprobs_T - step.logprobs_T
    expected_T = i.correction_T * surrogate_T + 0.3 * (d_T.exp() - 1 - d_T) - 0.2 * step.entropy_T
    loss_T, _, metrics = step.run(loss)
    torch.testing.assert_close(loss_T[step.mask_T], expected_T[step.mask_T], rtol=1e-9, atol=1e-12)
    if step.mask_T.any():
        gap_T = (step.logprobs_T - i.behavior_logprobs_T)[step.mask_T]
        ratio_T = (step.logprobs_T - i.proximal_logprobs_T)[step.mask_T].exp()
        assert metrics["policy/gap_max"].result == pytest.approx(float(gap_T.abs().max()))
        assert metrics["policy/ratio_mean"].result == pytest.approx(float(ratio_T.mean()))
        assert metrics["policy/kl_k3"].result == pytest.approx(float((gap_T.exp() - 1 - gap_T).mean()), abs=1e-12)
        assert metrics["policy/entropy"].result == pytest.approx(float(step.entropy_T[step.mask_T].mean()))
        assert metrics["kl/reference"].result == pytest.approx(float((d_T.exp() - 1 - d_T)[step.mask_T].mean()))


@EXAMPLES
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6), seed=seeds)
def test_gspo_is_a_loss_of_sequences(lengths: list[int], seed: int) -> None:
    """With one advantage a sequence and the mean over sequences of the mean over tokens, GSPO is its paper's eq. 5."""
    step = Step.draw(lengths, seed).bare()
    rng = np.random.default_rng(seed)
    advantages_S = rng.normal(size=len(lengths))
    advantages_T = torch.from_numpy(np.repeat(advantages_S, lengths))
    counts_S = np.array([int(step.mask_T[step.layout.sequence_T == s].sum()) for s in range(len(lengths))])
    weights_S = token_weights(Weighting.SEQUENCE_MEAN_TOKEN_MEAN, counts_S, horizon=None)
    step = replace(
        step,
        inputs=replace(step.inputs, advantages_T=advantages_T),
        weights_T=torch.from_numpy(np.repeat(weights_S, lengths)),
    )
    loss_T, gradient_T, _ = step.run(GSPO(clip_low=0.1, clip_high=0.2))
    live = [s for s in range(len(lengths)) if counts_S[s]]
    expected = 0.0
    for s in live:
        rows = (step.layout.sequence_T == s) & step.mask_T.numpy()
        likelihoods = float((step.logprobs_T - step.inputs.behavior_logprobs_T)[rows].sum().exp())
        ratio = likelihoods ** (1 / counts_S[s])
        expected -= float(min(ratio * advantages_S[s], np.clip(ratio, 0.9, 1.2) * advantages_S[s])) / len(live)
    total = float((loss_T * torch.where(step.mask_T, step.weights_T, 0.0)).sum())
    assert total == pytest.approx(expected, abs=1e-12)
    _, token_gradient_T, _ = step.run(GSPOToken(clip_low=0.1, clip_high=0.2))
    torch.testing.assert_close(gradient_T, token_gradient_T, rtol=1e-9, atol=1e-12)


SMOOTH = ["ppo", "ppo_dual", "importance_sampling", "policy_gradient", "sapo", "dro", "kl_cov", "gspo", "gmpo"]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradcheck_of_losses_without_stopped_gradients(name: str) -> None:
    loss = replace(CASES[name][0], kl_coefficient=0.1, entropy_coefficient=0.1)
    step = Step.draw([3, 0, 5, 1], 7)

    def total(logprobs_T: Tensor, entropy_T: Tensor) -> Tensor:
        outputs = Outputs(logprobs_T=logprobs_T, entropy_T=entropy_T)
        loss_T, _ = loss(outputs, step.inputs, step.layout, step.mask_T)
        return (loss_T * step.weights_T).sum()

    assert torch.autograd.gradcheck(
        total, (step.logprobs_T.clone().requires_grad_(), step.entropy_T.clone().requires_grad_())
    )


def test_a_ratio_too_large_to_mean_anything_is_bounded() -> None:
    step = Step.draw([2], 0).bare()
    step = replace(step, mask_T=torch.ones(2, dtype=torch.bool), logprobs_T=step.inputs.behavior_logprobs_T + 500.0)
    loss_T, gradient_T, metrics = step.run(ImportanceSampling())
    assert loss_T.isfinite().all() and gradient_T.isfinite().all()
    assert metrics["policy/gap_max"].result == pytest.approx(500.0)  # the gap itself is told as it is
    assert metrics["policy/ratio_mean"].result == pytest.approx(np.exp(20.0))
