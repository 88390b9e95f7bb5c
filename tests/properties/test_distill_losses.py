"""Every divergence of student and teachers against a short reference, its gradient against finite differences.

The reference sees one token at a time as probabilities, in float64, and writes the formula down with its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algos.distill_losses import Distillation, DistillInputs, Divergence, Tail, reverse_kl_rewards
from strop.types import merge_metrics

Array = np.ndarray
EXAMPLES = settings(max_examples=10, deadline=None, derandomize=True)
KINDS = [(divergence, tail) for divergence in Divergence for tail in Tail]
V = 9


def kl(p: Array, q: Array) -> float:
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def apart(divergence: Divergence, tail: Tail, beta: float, p: Array, q: Array) -> float:
    """The divergence of teacher p and student q, given on the teacher's K tokens alone."""
    if tail is Tail.RENORMALISED:
        p, q = p / p.sum(), q / q.sum()
    if tail is Tail.BUCKET:
        p, q = (np.append(x, max(1.0 - x.sum(), 1e-5)) for x in (p, q))
    match divergence:
        case Divergence.FORWARD_KL:
            return kl(p, q)
        case Divergence.REVERSE_KL:
            return kl(q, p)
        case Divergence.JENSEN_SHANNON:
            m = beta * p + (1 - beta) * q
            return beta * kl(p, m) + (1 - beta) * kl(q, m)


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Step:
    """Logits of the student [T, V], and what M teachers say at their K likeliest ids [T, M K]."""

    logits_TV: Tensor
    ids_TK: Tensor
    inputs: DistillInputs
    mask_T: Tensor

    def student(self, logits_TV: Tensor) -> Tensor:
        return logits_TV.log_softmax(-1).gather(-1, self.ids_TK)

    def gradient(self, loss: Distillation) -> tuple[Tensor, Tensor]:
        """(loss [T], the gradient of its sum by the logits [T, V])."""
        logits_TV = self.logits_TV.clone().requires_grad_()
        loss_T, _ = loss.of(self.student(logits_TV), self.inputs, self.mask_T)
        loss_T.sum().backward()
        assert logits_TV.grad is not None
        return loss_T.detach(), logits_TV.grad


def a_step(rows: int, k: int, teachers: int, seed: int) -> Step:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(rows, V)) * 1.5)
    ids, logprobs = [], []
    for _ in range(teachers):
        best = torch.from_numpy(rng.normal(size=(rows, V)) * 1.5).log_softmax(-1).topk(k, -1)
        ids.append(best.indices)
        logprobs.append(best.values)
    weights = rng.random((rows, teachers)) * (rng.random((rows, teachers)) > 0.2)
    return Step(
        logits,
        torch.cat(ids, -1),
        DistillInputs(
            behavior_logprobs_T=torch.zeros(rows),
            teacher_logprobs_TK=torch.cat(logprobs, -1),
            teacher_weights_TM=torch.from_numpy(weights),
        ),
        torch.from_numpy(rng.random(rows) > 0.25),
    )


def reference(step: Step, loss: Distillation, logits_TV: Array) -> Array:
    """[T], token by token and teacher by teacher."""
    rows, teachers = step.inputs.teacher_weights_TM.shape
    ids = step.ids_TK.numpy().reshape(rows, teachers, -1)
    said = step.inputs.teacher_logprobs_TK.numpy().reshape(rows, teachers, -1)
    weights = step.inputs.teacher_weights_TM.numpy()
    out = np.zeros(rows)
    for t in np.flatnonzero(step.mask_T.numpy()):
        q = softmax(logits_TV[t])
        for m in np.flatnonzero(weights[t]):
            out[t] += weights[t, m] * apart(loss.divergence, loss.tail, loss.beta, np.exp(said[t, m]), q[ids[t, m]])
    return out


shapes = {
    "rows": st.integers(1, 4),
    "k": st.integers(1, 5),
    "teachers": st.integers(1, 3),
    "seed": st.integers(0, 10**6),
}


@pytest.mark.parametrize(("divergence", "tail"), KINDS)
@EXAMPLES
@given(**shapes)
def test_value_and_gradient_are_the_formulas(
    divergence: Divergence, tail: Tail, rows: int, k: int, teachers: int, seed: int
) -> None:
    """arXiv 2306.13649, 2306.08543, 2608.14728: values, and gradients by finite differences, in float64."""
    step, loss = a_step(rows, k, teachers, seed), Distillation(divergence=divergence, tail=tail, beta=0.3)
    loss_T, grad_TV = step.gradient(loss)
    logits = step.logits_TV.numpy()
    np.testing.assert_allclose(loss_T.numpy(), reference(step, loss, logits), rtol=1e-9, atol=1e-12)
    h = 1e-5
    for t in range(rows):
        for v in range(V):
            up, down = logits.copy(), logits.copy()
            up[t, v] += h
            down[t, v] -= h
            slope = (reference(step, loss, up).sum() - reference(step, loss, down).sum()) / (2 * h)
            assert float(grad_TV[t, v]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def two(p: list[float], q: list[float], divergence: Divergence, tail: Tail) -> float:
    """One token, one teacher: the loss of probabilities given by hand."""
    inputs = DistillInputs(
        behavior_logprobs_T=torch.zeros(1),
        teacher_logprobs_TK=torch.tensor([p], dtype=torch.float64).log(),
        teacher_weights_TM=torch.ones(1, 1, dtype=torch.float64),
    )
    student = torch.tensor([q], dtype=torch.float64).log()
    return float(Distillation(divergence=divergence, tail=tail).of(student, inputs, torch.tensor([True]))[0])


def test_by_hand() -> None:
    """p = (1/2, 1/4) and q = (1/4, 1/4) at two ids: what is left is 1/4 of p and 1/2 of q."""
    p, q, log2 = [0.5, 0.25], [0.25, 0.25], np.log(2.0)
    assert two(p, q, Divergence.FORWARD_KL, Tail.DROPPED) == pytest.approx(0.5 * log2)
    assert two(p, q, Divergence.FORWARD_KL, Tail.BUCKET) == pytest.approx(0.5 * log2 - 0.25 * log2)
    assert two(p, q, Divergence.FORWARD_KL, Tail.RENORMALISED) == pytest.approx(
        2 / 3 * np.log(4 / 3) + 1 / 3 * np.log(2 / 3)
    )
    assert two(p, q, Divergence.REVERSE_KL, Tail.BUCKET) == pytest.approx(-0.25 * log2 + 0.5 * log2)
    m = [3 / 8, 1 / 4, 3 / 8]
    js = 0.5 * kl(np.array([0.5, 0.25, 0.25]), np.array(m)) + 0.5 * kl(np.array([0.25, 0.25, 0.5]), np.array(m))
    assert two(p, q, Divergence.JENSEN_SHANNON, Tail.BUCKET) == pytest.approx(js)


def test_only_the_bucket_sees_what_the_student_gives_the_others() -> None:
    """A student that halves all of the teacher's tokens: renormalised, nothing is wrong with it (arXiv 2608.14728)."""
    p, q = [0.5, 0.25], [0.25, 0.125]
    assert two(p, q, Divergence.REVERSE_KL, Tail.RENORMALISED) == pytest.approx(0.0, abs=1e-12)
    assert two(p, q, Divergence.REVERSE_KL, Tail.BUCKET) > 0.1
    assert two(p, q, Divergence.REVERSE_KL, Tail.DROPPED) < 0.0, "not a divergence: it would reward leaving them"


@pytest.mark.parametrize("divergence", list(Divergence))
@EXAMPLES
@given(rows=st.integers(1, 4), k=st.integers(1, V), seed=st.integers(0, 10**6))
def test_the_bucket_never_exceeds_the_whole_and_all_of_the_vocabulary_is_the_whole(
    divergence: Divergence, rows: int, k: int, seed: int
) -> None:
    """Merging outcomes cannot raise a divergence; with K = V every rule for the tail is the exact divergence."""
    full = a_step(rows, V, 1, seed)
    best = full.inputs.teacher_logprobs_TK[:, :k]  # topk sorts
    few = replace(full, ids_TK=full.ids_TK[:, :k], inputs=replace(full.inputs, teacher_logprobs_TK=best))
    whole_T, whole_grad = full.gradient(Distillation(divergence=divergence, tail=Tail.DROPPED))
    part_T, _ = few.gradient(Distillation(divergence=divergence, tail=Tail.BUCKET))
    assert bool((part_T <= whole_T + 1e-3).all()) and bool((part_T >= -1e-9).all())
    renormalised_T, grad = full.gradient(Distillation(divergence=divergence, tail=Tail.RENORMALISED))
    torch.testing.assert_close(renormalised_T, whole_T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, whole_grad, rtol=1e-7, atol=1e-10)
    bucket_T, grad = full.gradient(Distillation(divergence=divergence, tail=Tail.BUCKET))
    torch.testing.assert_close(bucket_T, whole_T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(grad, whole_grad, rtol=1e-3, atol=1e-3)
    if divergence is Divergence.FORWARD_KL:  # d/dz sum p log(p / q) = q - p
        weight_T = torch.where(full.mask_T, full.inputs.teacher_weights_TM[:, 0], 0.0)
        p_TV = torch.zeros_like(full.logits_TV).scatter(-1, full.ids_TK, full.inputs.teacher_logprobs_TK.exp())
        torch.testing.assert_close(whole_grad, weight_T[:, None] * (full.logits_TV.softmax(-1) - p_TV))


@pytest.mark.parametrize(("divergence", "tail"), KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_and_untaught_places_may_hold_anything(divergence: Divergence, tail: Tail, poison: float) -> None:
    """A10: bit for bit, values, gradients and metrics, also where a teacher does not teach."""
    step, loss = a_step(6, 3, 2, 5), Distillation(divergence=divergence, tail=tail)
    taught_TM = (step.inputs.teacher_weights_TM > 0) & step.mask_T[:, None]
    assert 0 < int(taught_TM.sum()) < taught_TM.numel() and not bool(step.mask_T.all())
    bad_TK = ~taught_TM.repeat_interleave(3, -1)
    weights_TM = torch.where(step.mask_T[:, None], step.inputs.teacher_weights_TM, poison)
    poisoned = replace(
        step.inputs,
        teacher_logprobs_TK=torch.where(bad_TK, poison, step.inputs.teacher_logprobs_TK),
        teacher_weights_TM=weights_TM,
    )
    results = []
    for inputs, spoil in ((step.inputs, False), (poisoned, True)):
        student = step.student(step.logits_TV).requires_grad_()
        seen = torch.where(bad_TK, poison, student) if spoil else student
        loss_T, metrics = loss.of(seen, inputs, step.mask_T)
        loss_T.sum().backward()
        assert student.grad is not None and bool(student.grad.isfinite().all())
        results.append(
            (loss_T.detach(), student.grad, {n: (float(m.value), float(m.count)) for n, m in metrics.items()})
        )
    (a, grad_a, metrics_a), (b, grad_b, metrics_b) = results
    assert torch.equal(a, b) and torch.equal(grad_a, grad_b) and metrics_a == metrics_b


@pytest.mark.parametrize(("divergence", "tail"), KINDS)
@EXAMPLES
@given(**shapes)
def test_order_and_cuts_change_nothing(
    divergence: Divergence, tail: Tail, rows: int, k: int, teachers: int, seed: int
) -> None:
    """A01: a loss of single tokens: reversed or cut in two, each token has its loss and gradient; metrics merge."""
    step, loss = a_step(rows, k, teachers, seed), Distillation(divergence=divergence, tail=tail)
    whole_T, whole_grad = step.gradient(loss)
    _, measured = loss.of(step.student(step.logits_TV), step.inputs, step.mask_T)

    def part(order: Tensor) -> Step:
        inputs = DistillInputs(
            behavior_logprobs_T=step.inputs.behavior_logprobs_T[order],
            teacher_logprobs_TK=step.inputs.teacher_logprobs_TK[order],
            teacher_weights_TM=step.inputs.teacher_weights_TM[order],
        )
        return Step(step.logits_TV[order], step.ids_TK[order], inputs, step.mask_T[order])

    backwards = torch.arange(rows - 1, -1, -1)
    cuts = [backwards[: rows // 2], backwards[rows // 2 :]]
    found = [part(cut).gradient(loss) for cut in cuts]
    torch.testing.assert_close(torch.cat([loss_T for loss_T, _ in found]), whole_T[backwards], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([grad for _, grad in found]), whole_grad[backwards], rtol=1e-12, atol=1e-14)
    halves = [part(cut) for cut in cuts]
    merged = merge_metrics([loss.of(half.student(half.logits_TV), half.inputs, half.mask_T)[1] for half in halves])
    for name, metric in measured.items():
        assert float(merged[name].count) == float(metric.count)
        assert float(merged[name].value) == pytest.approx(float(metric.value), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("divergence", "tail"), KINDS)
def test_float32_stays_finite_at_the_edges(divergence: Divergence, tail: Tail) -> None:
    """A certain student, a certain teacher, and both, where what is left of 1 is rounding."""
    certain = torch.tensor([60.0, 0.0, -60.0, -60.0])
    even = torch.zeros(4)
    for teacher, student in ((certain, even), (even, certain), (certain, certain), (-certain, certain)):
        best = teacher.log_softmax(-1)[None].topk(2, -1)
        inputs = DistillInputs(
            behavior_logprobs_T=torch.zeros(1),
            teacher_logprobs_TK=best.values,
            teacher_weights_TM=torch.ones(1, 1),
        )
        step = Step(student[None], best.indices, inputs, torch.tensor([True]))
        loss_T, grad_TV = step.gradient(Distillation(divergence=divergence, tail=tail))
        assert bool(loss_T.isfinite().all()) and bool(grad_TV.isfinite().all())
        assert float(grad_TV.abs().max()) < 50.0


def test_a_token_that_the_student_lacks_is_no_outcome() -> None:
    """Padded output matrices differ in size: a teacher's id beyond the student's is -inf, its column not read."""
    step = a_step(3, 3, 1, 1)
    step = replace(step, mask_T=torch.ones(3, dtype=torch.bool))
    wide = replace(
        step.inputs,
        teacher_logprobs_TK=torch.nn.functional.pad(step.inputs.teacher_logprobs_TK, (0, 1), value=-torch.inf),
    )
    for divergence, tail in KINDS:
        loss = Distillation(divergence=divergence, tail=tail)
        more = replace(step, ids_TK=torch.nn.functional.pad(step.ids_TK, (0, 1)), inputs=wide)
        (a, grad_a), (b, grad_b) = step.gradient(loss), more.gradient(loss)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(grad_a, grad_b, rtol=1e-12, atol=1e-14)


def test_what_does_not_fit_is_refused() -> None:
    step = a_step(3, 2, 2, 0)
    with pytest.raises(ValueError, match=r"\[T, M K\]"):
        Distillation().of(step.student(step.logits_TV)[:, :3], step.inputs, step.mask_T)
    with pytest.raises(ValueError, match="beta"):
        Distillation(beta=1.0)


def test_rewards_are_minus_the_reverse_kl_of_the_sampled_token() -> None:
    student, teachers = np.log([0.5, 0.25]), np.log([[0.25, 0.5], [0.5, 0.25]])
    weights = np.array([[1.0, 0.5], [0.0, 0.5]])
    assert reverse_kl_rewards(student, teachers, weights) == pytest.approx([-np.log(2), 0.5 * np.log(2)])
    assert reverse_kl_rewards(student, np.where(weights > 0, teachers, np.nan), weights) == pytest.approx(
        [-np.log(2), 0.5 * np.log(2)]
    ), "where a teacher does not teach"


def test_the_mean_policy_gradient_of_the_rewards_is_that_of_the_reverse_kl() -> None:
    """sum over tokens of q r grad log q = -grad KL(q, p): what sampling estimates, summed exactly (2306.08543)."""
    rng = np.random.default_rng(0)
    z, p = rng.normal(size=V), softmax(rng.normal(size=V))
    q = softmax(z)
    rewards = reverse_kl_rewards(np.log(q), np.log(p)[None], np.ones((1, V)))
    policy_gradient = sum(q[v] * rewards[v] * (np.eye(V)[v] - q) for v in range(V))
    h = 1e-6
    slopes = [(kl(softmax(z + h * e), p) - kl(softmax(z - h * e), p)) / (2 * h) for e in np.eye(V)]
    np.testing.assert_allclose(policy_gradient, -np.array(slopes), rtol=1e-6, atol=1e-9)
