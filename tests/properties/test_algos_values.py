"""The critic's loss against a plain reference, its gradient against finite differences, and what must not change it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.types import Layout, Metrics, Outputs, merge_metrics

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
every_clip = pytest.mark.parametrize("clip", [None, 0.0, 0.3])
lengths = st.lists(st.integers(0, 6), max_size=6)
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Step:
    """Random values, packed: everything [T] in float64."""

    layout: Layout
    mask_T: Tensor
    values_T: Tensor
    old_values_T: Tensor
    returns_T: Tensor
    weights_T: Tensor

    @staticmethod
    def draw(lengths: list[int], seed: int) -> Step:
        rng = np.random.default_rng(seed)
        mask, values, old, returns, weights = rng.normal(size=(5, sum(lengths)))
        return Step(
            Layout(tuple(lengths)),
            torch.from_numpy(mask < 0.6),
            *map(torch.from_numpy, (values, old, returns, weights)),
        )

    def run(self, loss: ClippedValue) -> tuple[Tensor, Tensor, Metrics]:
        """(loss_T, the gradient of the weighted sum by the values, metrics), as an engine would get them."""
        values_T = self.values_T.clone().requires_grad_()
        outputs = Outputs(logprobs_T=torch.zeros_like(self.values_T), values_T=values_T)
        inputs = ValueInputs(old_values_T=self.old_values_T, returns_T=self.returns_T)
        loss_T, metrics = loss(outputs, inputs, self.layout, self.mask_T)
        (torch.where(self.mask_T, loss_T, 0.0) * torch.where(self.mask_T, self.weights_T, 0.0)).sum().backward()
        assert values_T.grad is not None
        return loss_T.detach(), values_T.grad, metrics

    def take(self, sequences: list[int]) -> Step:
        """Some of the sequences, in this order, as another pack."""
        starts, lengths = self.layout.starts_S, self.layout.lengths_S
        rows = torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in sequences] or [torch.arange(0)])
        columns = (self.mask_T, self.values_T, self.old_values_T, self.returns_T, self.weights_T)
        return Step(Layout(tuple(int(lengths[s]) for s in sequences)), *(column[rows] for column in columns))


def reference(v: float, old: float, target: float, clip: float | None) -> float:
    far = (v - target) ** 2
    if clip is not None:
        held = old + clip if v > old + clip else old - clip if v < old - clip else v
        far = max(far, (held - target) ** 2)
    return far / 2


@every_clip
@EXAMPLES
@given(lengths=lengths, seed=seeds)
def test_value_and_gradient_are_the_definitions(clip: float | None, lengths: list[int], seed: int) -> None:
    step = Step.draw(lengths, seed)
    loss_T, gradient_T, metrics = step.run(ClippedValue(clip=clip))
    columns = (step.mask_T, step.values_T, step.old_values_T, step.returns_T, step.weights_T)
    expected: list[tuple[float, float]] = []
    held = 0
    for m, v, old, target, w in zip(*(column.tolist() for column in columns), strict=True):
        h = 1e-6
        slope = (reference(v + h, old, target, clip) - reference(v - h, old, target, clip)) / (2 * h)
        expected.append((reference(v, old, target, clip), w * slope) if m else (0.0, 0.0))
        held += m and reference(v, old, target, clip) > (v - target) ** 2 / 2
    expected_T2 = np.array(expected).reshape(-1, 2)
    np.testing.assert_allclose(loss_T, expected_T2[:, 0], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(gradient_T, expected_T2[:, 1], rtol=1e-6, atol=1e-8)
    if step.mask_T.any():
        assert metrics["value/mean"].result == pytest.approx(float(step.values_T[step.mask_T].mean()))
        error_T = (step.values_T - step.returns_T)[step.mask_T].square()
        assert metrics["value/error"].result == pytest.approx(float(error_T.mean()))
        if clip is not None:
            assert metrics["value/clip_fraction"].result == pytest.approx(held / int(step.mask_T.sum()))


@every_clip
@EXAMPLES
@given(lengths=lengths, seed=seeds, poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
def test_masked_places_may_hold_anything(clip: float | None, lengths: list[int], seed: int, poison: float) -> None:
    step = Step.draw(lengths, seed)
    off_T = ~step.mask_T
    spoiled = replace(
        step,
        values_T=step.values_T.masked_fill(off_T, poison),
        old_values_T=step.old_values_T.masked_fill(off_T, -poison),
        returns_T=step.returns_T.masked_fill(off_T, poison),
    )
    (loss_T, gradient_T, metrics), again = step.run(ClippedValue(clip=clip)), spoiled.run(ClippedValue(clip=clip))
    assert torch.equal(loss_T, again[0]) and not loss_T[off_T].any()
    assert torch.equal(gradient_T, again[1]) and not gradient_T[off_T].any()
    assert {k: (float(m.value), float(m.count)) for k, m in metrics.items()} == {
        k: (float(m.value), float(m.count)) for k, m in again[2].items()
    }


@every_clip
@EXAMPLES
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=seeds, data=st.data())
def test_order_and_cuts_of_the_pack_change_nothing(
    clip: float | None, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    """A01, A24: whatever the cut or the order, each token keeps its loss and its gradient, and metrics merge."""
    loss, step = ClippedValue(clip=clip), Step.draw(lengths, seed)
    loss_T, gradient_T, metrics = step.run(loss)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    measured: list[Metrics] = []
    for sequences in (order[:cut], order[cut:]):
        part_loss_T, part_gradient_T, part_metrics = step.take(sequences).run(loss)
        measured.append(part_metrics)
        rows = [
            t for s in sequences for t in range(int(step.layout.starts_S[s]), int(step.layout.starts_S[s]) + lengths[s])
        ]
        assert torch.equal(part_loss_T, loss_T[rows])
        assert torch.equal(part_gradient_T, gradient_T[rows])
    for key, merged in merge_metrics(measured).items():
        np.testing.assert_allclose(merged.result, metrics[key].result, rtol=1e-9, atol=1e-12, err_msg=key)
