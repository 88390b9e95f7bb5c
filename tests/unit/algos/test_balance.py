"""Terms for even use of experts, and what is reported of it: numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.algos.balance import fractions_of, load_balancing, router_terms, router_z, sampled_rows, violations
from strop.types import Metric, Outputs, Reduction

LOGITS = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
SHARES = LOGITS.softmax(-1)


def test_shares_are_one_softmax_of_the_scores() -> None:
    """H09: .644, .237, .087, .032; a softmax of those would be .360, .239, .206, .195."""
    assert SHARES[0, 0].tolist() == pytest.approx([0.6439, 0.2369, 0.0871, 0.0321], abs=1e-4)
    fractions = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert float(load_balancing(SHARES, fractions)) == pytest.approx(4 * 0.5 * (0.6439 + 0.2369), abs=1e-3)


def test_even_load_costs_one_and_a_collapse_e() -> None:
    even, collapsed = torch.full((1, 4), 0.25), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert float(load_balancing(SHARES, even)) == pytest.approx(1.0)
    assert float(load_balancing(torch.full((1, 1, 4), 0.25), collapsed)) == pytest.approx(1.0)
    assert float(load_balancing(collapsed[None], collapsed)) == pytest.approx(4.0)
    two = torch.cat([even, collapsed])[None]
    assert float(load_balancing(two, two[0])) == pytest.approx((1.0 + 4.0) / 2)
    with pytest.raises(ValueError, match="fractions"):
        load_balancing(SHARES, torch.ones(2, 4))


def test_z_by_hand() -> None:
    assert float(router_z(LOGITS)) == pytest.approx(2.4402**2, abs=1e-3)
    assert float(router_z(torch.cat([LOGITS, LOGITS - 2.4402], 1))) == pytest.approx(2.4402**2 / 2, abs=1e-3)


def test_terms_are_constants_times_means_over_the_mask() -> None:
    """Masked rows may hold NaN: neither a value nor a gradient sees them."""
    logits = torch.cat([LOGITS, torch.full_like(LOGITS, float("nan"))]).requires_grad_()
    outputs = Outputs(logprobs_T=torch.zeros(2), router_logits_TLE=logits, router_shares_TLE=logits.softmax(-1))
    fractions, mask = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([True, False])
    terms, metrics = router_terms(outputs, fractions, mask, balance=0.5, z=0.1)
    assert terms.tolist() == pytest.approx([0.5 * 1.7616 + 0.1 * 5.9545, 0.0], abs=1e-3)
    assert metrics["router/balance"].result == pytest.approx(1.7616, abs=1e-3)
    assert metrics["router/z"].result == pytest.approx(5.9545, abs=1e-3)
    assert set(router_terms(outputs, None, mask, balance=0.0, z=0.1)[1]) == {"router/z"}


def terms_of(count: int, *, balance: float, z: float, fractions: bool = True) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Of `count` tokens, all of which count."""
    logits = LOGITS.repeat(count, 1, 1).requires_grad_()
    outputs = Outputs(logprobs_T=torch.zeros(count), router_logits_TLE=logits, router_shares_TLE=logits.softmax(-1))
    even = torch.tensor([[0.5, 0.5, 0.0, 0.0]]) if fractions else None
    return router_terms(outputs, even, torch.ones(count, dtype=torch.bool), balance=balance, z=z)


def test_metrics_of_the_terms_are_means_that_merge() -> None:
    """A sum over tokens and how many there were, so that batches of 1 and 3 tokens merge to the mean over all 4; and
    numbers, which hold no graph."""
    for name, one in (("router/balance", 1.7616), ("router/z", 5.9545)):
        few, many = (terms_of(count, balance=0.5, z=0.1)[1][name] for count in (1, 3))
        assert few.reduction is many.reduction is Reduction.MEAN
        assert (float(few.count), float(many.count)) == (1.0, 3.0)
        assert float(many.value) == pytest.approx(3 * one, abs=1e-3)
        assert few.merge(many).result == pytest.approx(one, abs=1e-3)
        assert isinstance(many.value, torch.Tensor) and not many.value.requires_grad
    assert set(terms_of(2, balance=0.5, z=0.0)[1]) == {"router/balance"}
    assert set(terms_of(2, balance=0.5, z=0.1)[1]) == {"router/balance", "router/z"}
    terms, metrics = terms_of(2, balance=0.0, z=0.0)
    assert terms.tolist() == [0.0, 0.0] and terms.dtype == torch.float32 and metrics == {}
    terms, _ = terms_of(2, balance=0.0, z=0.1, fractions=False)
    assert terms.tolist() == pytest.approx([0.59545] * 2, abs=1e-4)
    terms, _ = terms_of(2, balance=0.5, z=0.0)
    assert terms.tolist() == pytest.approx([0.5 * 1.7616] * 2, abs=1e-4)


def test_what_a_term_lacks_is_said() -> None:
    mask, scores = torch.ones(1, dtype=torch.bool), LOGITS
    nothing = "a router's terms have coefficients, but the engine gave no router_logits_TLE"
    for outputs in (
        Outputs(logprobs_T=torch.zeros(1)),
        Outputs(logprobs_T=torch.zeros(1), router_logits_TLE=scores),
        Outputs(logprobs_T=torch.zeros(1), router_shares_TLE=SHARES),
    ):
        with pytest.raises(ValueError) as raised:
            router_terms(outputs, torch.ones(1, 4), mask, balance=0.0, z=0.1)
        assert str(raised.value) == nothing
    with pytest.raises(ValueError) as raised:
        terms_of(1, balance=0.25, z=0.0, fractions=False)
    assert str(raised.value) == "balance_coefficient is 0.25, but the batch has no expert_fractions_LE"
    with pytest.raises(ValueError) as raised:
        load_balancing(SHARES, torch.ones(2, 4))
    assert str(raised.value) == "shares [T, L, E] (1, 1, 4), fractions [L, E] (2, 4)"


def test_gradient_of_the_balance_treats_fractions_as_constants() -> None:
    """d/dl_j of E sum_e f_e p_e is E p_j (f_j - sum_e f_e p_e)."""
    logits = LOGITS.clone().requires_grad_()
    fractions = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    load_balancing(logits.softmax(-1), fractions).sum().backward()
    p, f = SHARES[0, 0], fractions[0]
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0, 0], 4 * p * (f - (f * p).sum()))


def test_fractions_and_violations() -> None:
    counts = np.array([[4, 2, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2]])
    assert fractions_of(counts).tolist() == [[0.5, 0.25, 0.125, 0.125], [0.25] * 4, [0.25] * 4]
    off = violations(counts)
    assert off["max"].tolist() == [1.0, 0.0, 0.0]
    assert off["min"].tolist() == [-0.5, 0.0, 0.0]
    assert off["mean"].tolist() == [0.5, 0.0, 0.0]


def test_load_is_counted_at_sampled_tokens_but_a_texts_last() -> None:
    """H05. Two texts, prompt prompt sampled sampled, and prompt sampled: row 2 alone is sampled and not a last one."""
    mask = np.array([False, True, True, False, True, False])
    targets = np.array([7, 8, 9, -1, 5, -1])
    assert sampled_rows(mask, targets).tolist() == [False, False, True, False, False, False]
