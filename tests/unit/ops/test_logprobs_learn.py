"""The fused form: a loss is differentiated while its rows' logits are there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strop.ops.logprobs import Entropy, Scored, learn_targets
from tests.unit.ops.head_cases import ROWS, Case, case, mixed, run, small_tiles


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


def clipped(rows: Tensor, at: Scored) -> Tensor:
    """A policy loss with an entropy bonus: nonlinear in what the rows gave."""
    assert at.entropy_N is not None
    ratio = (at.logprobs_N + 2.0).exp()
    advantage = torch.linspace(-1.0, 1.0, 19).double()[rows]
    return (torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)) - 0.1 * at.entropy_N).sum()


def grads_of(of: Case) -> dict[str, Tensor]:
    found = {name: t.grad for name, t in of.leaves().items()}
    assert all(grad is not None for grad in found.values())
    return {name: grad for name, grad in found.items() if grad is not None}


def test_learning_in_one_pass_is_scoring_and_backward() -> None:
    once, twice = case(full=True).live(), case(full=True).live()
    asked = {"temperature_N": once.temperature, "entropy": Entropy.GRADIENT, "rows": ROWS}
    scored, total = learn_targets(once.hidden, once.head(), once.targets, clipped, **asked)  # type: ignore[arg-type]
    total.backward()
    plain, _ = run("plain", twice)
    loss = clipped(torch.arange(19), plain)
    loss.backward()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(scored.logprobs_N, plain.logprobs_N, rtol=0, atol=1e-12)
    assert not scored.logprobs_N.requires_grad
    a, b = grads_of(once), grads_of(twice)
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-12) for name in a)


def test_the_loss_sees_every_row_once_live_and_under_its_own_number() -> None:
    of = case(n=19)
    targets = of.targets.index_fill(0, torch.tensor([2, 11]), -1)
    seen: list[Tensor] = []
    found: list[Tensor] = []

    def loss(rows: Tensor, at: Scored) -> Tensor:
        assert at.logprobs_N.requires_grad and torch.is_grad_enabled()
        assert at.entropy_N is None and at.ids_logprobs_NK is None
        seen.append(rows)
        found.append(at.logprobs_N.detach())
        return at.logprobs_N.sum()

    scored, _ = learn_targets(of.live().hidden, of.head(), targets, loss, rows=4)
    rows = torch.cat(seen)
    assert [len(part) for part in seen] == [4, 4, 4, 4, 1]
    assert rows.tolist() == [i for i in range(19) if i not in (2, 11)]
    assert torch.equal(scored.logprobs_N[rows], torch.cat(found)) and scored.logprobs_N[2] == 0


def test_an_entropy_to_look_at_is_there_and_adds_nothing() -> None:
    live, none = case().live(), case().live()

    def bonus(rows: Tensor, at: Scored) -> Tensor:
        assert at.entropy_N is not None and not at.entropy_N.requires_grad
        return (at.logprobs_N + 5.0 * at.entropy_N).sum()

    _, total = learn_targets(live.hidden, live.head(), live.targets, bonus, entropy=Entropy.VALUE, rows=ROWS)
    total.backward()
    _, other = learn_targets(none.hidden, none.head(), none.targets, lambda rows, at: at.logprobs_N.sum(), rows=ROWS)
    other.backward()
    a, b = grads_of(live), grads_of(none)
    assert all(torch.equal(a[name], b[name]) for name in a) and total.item() != other.item()


def test_a_loss_of_the_entropy_alone() -> None:
    once, twice = case().live(), case().live()

    def entropy(rows: Tensor, at: Scored) -> Tensor:
        assert at.entropy_N is not None
        return at.entropy_N.square().sum()

    learn_targets(once.hidden, once.head(), once.targets, entropy, entropy=Entropy.GRADIENT, rows=ROWS)[1].backward()
    entropy(torch.arange(19), run("plain", twice)[0]).backward()
    a, b = grads_of(once), grads_of(twice)
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-12) for name in a)


def test_a_loss_that_depends_on_nothing_adds_nothing() -> None:
    of = case().live()
    _, total = learn_targets(of.hidden, of.head(), of.targets, lambda rows, at: torch.tensor(2.0), rows=ROWS)
    assert total.item() == 3 * 2.0
    total.backward()
    assert not any(grad.any() for grad in grads_of(of).values())


def test_the_sum_may_be_scaled_unless_the_weights_gradient_was_added() -> None:
    of, double = case().live(), case().live()
    run("learned", of)[1].backward()
    (run("learned", double)[1] * 2.0).backward()
    a, b = grads_of(of), grads_of(double)
    assert all(torch.allclose(2.0 * a[name], b[name], rtol=0, atol=1e-12) for name in a)
    begun = torch.zeros_like(of.weight)
    _, total = run("learned", case().live(), weight_grad_VD=begun)
    assert torch.allclose(begun, a["weight"], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"scaled by 2\.0, but the weight's gradient has been added already"):
        (total * 2.0).backward()


def test_gradients_wait_in_the_formats_of_their_inputs() -> None:
    """Summed in float32, kept until the backward pass as bfloat16 where that is what goes in."""
    made, bias = case(), torch.linspace(-1.0, 1.0, 13).bfloat16()
    of = replace(made, hidden=made.hidden.bfloat16(), weight=made.weight.float(), bias=bias).live()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        learn_targets(of.hidden, of.head(), of.targets, lambda rows, at: at.logprobs_N.sum(), rows=ROWS)
    assert [(t.dtype, t.shape) for t in kept] == [(t.dtype, t.shape) for t in of.leaves().values()]


def test_every_row_ignored() -> None:
    of = case().live()
    scored, total = learn_targets(of.hidden, of.head(), torch.full((19,), -1), mixed, rows=ROWS)
    total.backward()
    assert total.item() == 0.0 and not scored.logprobs_N.any()
    assert not any(grad.any() for grad in grads_of(of).values())
