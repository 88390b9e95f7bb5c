"""Every form of the head against definitions in NumPy, finite differences, and the plain form."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.ops import head_tiles
from strop.ops.head_tiles import Logits, Slope, column_tiles, row_tiles
from strop.ops.logprobs import Entropy, Head, HeadImpl, Scored, learn_targets, score_targets
from strop.ops.native.halves import half_product
from tests.unit.ops.head_cases import (
    COLUMNS,
    FORMS,
    ROWS,
    STREAMS,
    Case,
    case,
    expected,
    gradients,
    mixed,
    run,
    small_tiles,
)


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


def assert_same(a: dict[str, Tensor | None], b: dict[str, Tensor | None], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, one in a.items():
        other = b[name]
        assert one is not None and other is not None
        assert float(one.abs().max()) > 1e-3 and torch.allclose(one, other, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "of",
    [
        case(),
        case(full=True),
        case(full=True, softcap=None, temperature=0.7),
        case(full=True, a=None, temperature=None),
        case(v=40, d=20, seed=1, temperature=torch.linspace(0.3, 2.0, 19)),
        case(n=3, v=40, full=True, seed=2),
    ],
    ids=["bare", "full", "one-temperature", "no-adapter", "wide", "few-rows"],
)
def test_values_are_the_definitions(form: str, of: Case) -> None:
    scored, _ = run(form, of, top_k=4, square_sums=True)
    logprobs = expected(of)
    p = np.exp(logprobs)
    every = np.arange(len(logprobs))
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    assert scored.entropy_N is not None and scored.square_sums_N is not None
    assert np.allclose(scored.logprobs_N.detach(), logprobs[every, of.targets], **close)
    assert np.allclose(scored.entropy_N.detach(), -(p * logprobs).sum(-1), **close)
    assert np.allclose(scored.square_sums_N, (p * p).sum(-1), **close)
    assert scored.top_k_ids_NK is not None and scored.top_k_logprobs_NK is not None
    assert np.allclose(scored.top_k_logprobs_NK, -np.sort(-logprobs, -1)[:, :4], **close)
    assert np.array_equal(scored.top_k_ids_NK, np.argsort(-logprobs, -1)[:, :4])
    if of.ids is not None:
        assert scored.ids_logprobs_NK is not None
        assert np.allclose(scored.ids_logprobs_NK.detach(), np.take_along_axis(logprobs, of.ids.numpy(), -1), **close)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_asked_for_is_not_there(form: str) -> None:
    scored, _ = run(form, case(), entropy=Entropy.NONE)
    assert scored.entropy_N is None and scored.ids_logprobs_NK is None and scored.square_sums_N is None
    assert scored.top_k_ids_NK is None and scored.top_k_logprobs_NK is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "of",
    [case(n=3), case(n=3, v=7, full=True), case(n=3, v=7, full=True, softcap=None, temperature=2.0)],
    ids=["bare", "full", "one-temperature"],
)
def test_gradients_are_finite_differences(form: str, of: Case) -> None:
    names = list(of.leaves())
    leaves = tuple(t.clone().requires_grad_() for t in of.leaves().values())

    def value(*leaves: Tensor) -> Tensor:
        return run(form, replace(of, **dict(zip(names, leaves, strict=True))), rows=2)[1]

    assert torch.autograd.gradcheck(value, leaves, fast_mode=form == "triton")


@pytest.mark.parametrize("form", STREAMS)
@pytest.mark.parametrize("entropy", list(Entropy))
def test_every_form_has_the_gradients_of_the_plain_one(form: str, entropy: Entropy) -> None:
    for of in (case(full=True), case(n=3, v=40, d=20, full=True, a=None, softcap=None, seed=5)):
        assert_same(gradients(form, of, entropy=entropy), gradients("plain", of, entropy=entropy))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_one_output_alone(form: str) -> None:
    """A loss of the entropy only, or of the given ids only, leaves nothing of the others behind."""
    for pick in ("entropy_N", "ids_logprobs_NK", "logprobs_N"):
        found = []
        for kind in ("plain", form):
            live = case(full=True).live()
            asked: dict[str, Any] = {"temperature_N": live.temperature, "ids_NK": live.ids, "entropy": Entropy.GRADIENT}
            if kind == "learned":
                continue
            scored = score_targets(live.hidden, live.head(), live.targets, impl=HeadImpl(kind), rows=ROWS, **asked)
            part = {"entropy_N": scored.entropy_N, "ids_logprobs_NK": scored.ids_logprobs_NK}.get(
                pick, scored.logprobs_N
            )
            assert part is not None
            part.square().sum().backward()
            found.append({name: t.grad for name, t in live.leaves().items()})
        assert_same(found[0], found[-1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "b"])
def test_a_frozen_side_gets_no_gradient_and_the_others_are_the_same(form: str, frozen: str) -> None:
    whole = gradients(form, case(full=True))
    live = case(full=True).live()
    for name, tensor in live.leaves().items():
        tensor.requires_grad_(name != frozen)
    run(form, live)[1].backward()
    for name, tensor in live.leaves().items():
        if name == frozen:
            assert tensor.grad is None
        else:
            expected_grad = whole[name]
            assert tensor.grad is not None and expected_grad is not None
            assert torch.equal(tensor.grad, expected_grad)


class Watch(TorchDispatchMode):
    """Counts matrix products, and the numbers in the largest tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest, self.largest_of_whole_numbers = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
            if not out.is_floating_point():
                self.largest_of_whole_numbers = max(self.largest_of_whole_numbers, out.numel())
        return out


TILES = 3 * 3  # 19 rows by 13 tokens in tiles of 8 by 5


@pytest.mark.parametrize(
    ("form", "frozen", "products"),
    [("chunked", "", 4), ("chunked", "weight", 3), ("chunked", "hidden", 3),
     ("learned", "", 3), ("learned", "weight", 2), ("learned", "hidden", 2)],
)  # fmt: skip
def test_no_product_is_made_for_a_frozen_side_or_made_twice_when_learning(
    form: str, frozen: str, products: int
) -> None:
    live = case().live()
    for name, tensor in live.leaves().items():
        tensor.requires_grad_(name != frozen)
    with Watch() as seen:
        run(form, live)[1].backward()
    assert seen.products == products * TILES


@pytest.mark.parametrize("form", ["chunked", "learned"])
@pytest.mark.parametrize("rows", [40, 64])
def test_the_largest_tensor_is_a_tile_of_the_configured_size(form: str, rows: int) -> None:
    """I03, and the entropy's share of memory: no one-hot, no [N, V], with gradients of the entropy on."""
    of = case(n=160, d=1, v=70).live()

    def loss(few: Tensor, at: Scored) -> Tensor:
        assert at.entropy_N is not None
        return at.logprobs_N.sum() - at.entropy_N.sum()

    asked: dict[str, Any] = {"entropy": Entropy.GRADIENT, "top_k": 1, "square_sums": True, "rows": rows}
    with Watch() as seen:
        if form == "learned":
            learn_targets(of.hidden, of.head(), of.targets, loss, **asked)[1].backward()
        else:
            scored = score_targets(of.hidden, of.head(), of.targets, impl=HeadImpl.CHUNKED, **asked)
            loss(of.targets, scored).backward()
    assert seen.largest == (rows * 70 if form == "learned" else rows * COLUMNS) < 160 * 70
    assert seen.largest_of_whole_numbers <= 160 * 2


def test_tiles_of_few_rows_are_wide() -> None:
    """As many logits at once, whatever the number of rows."""
    assert column_tiles(13, 8, 19) == [slice(0, 5), slice(5, 10), slice(10, 13)]
    assert column_tiles(13, 8, 8) == column_tiles(13, 8, 5) == column_tiles(13, 8, 19)
    assert column_tiles(13, 8, 3) == column_tiles(13, 8, 4) == [slice(0, 10), slice(10, 13)]
    assert column_tiles(13, 8, 1) == column_tiles(13, 8, 0) == [slice(0, 13)]
    assert column_tiles(50, 8, 1) == column_tiles(50, 8, 0) == [slice(0, 40), slice(40, 50)]
    assert row_tiles(19, 8) == [slice(0, 8), slice(8, 16), slice(16, 19)] and row_tiles(0, 8) == []


def test_only_inputs_and_statistics_are_kept_for_the_backward_pass() -> None:
    of = case(n=160, v=70).live()
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        score_targets(of.hidden, of.head(), of.targets, entropy=Entropy.GRADIENT, impl=HeadImpl.CHUNKED)
    assert sorted(kept) == sorted([of.hidden.numel(), of.weight.numel(), 160, 160])


def test_no_work_is_done_for_an_output_that_the_loss_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor | None] = []
    original = Slope.by_logits

    def watched(self: Slope, logits: Logits, rows: slice, columns: slice, z: Tensor) -> Tensor:
        seen.append(self.by_entropy_N)
        return original(self, logits, rows, columns, z)

    monkeypatch.setattr(Slope, "by_logits", watched)
    of = case().live()
    scored, _ = run("chunked", of)
    scored.logprobs_N.sum().backward()
    assert len(seen) == TILES and seen[0] is None
    scored, _ = run("chunked", of)
    assert scored.entropy_N is not None
    scored.entropy_N.sum().backward()
    assert len(seen) == 2 * TILES and seen[-1] is not None


@pytest.mark.parametrize("form", FORMS)
def test_non_contiguous_inputs(form: str) -> None:
    """A39: a transposed hidden state still gets its gradient."""
    of = case(full=True)
    turned = {name: t.t().contiguous().requires_grad_() for name, t in of.leaves().items() if t.ndim == 2}
    ids = of.ids
    assert ids is not None
    strided = replace(
        of,
        **{name: t.t() for name, t in turned.items()},
        ids=ids.t().contiguous().t(),
        targets=of.targets.repeat_interleave(2)[::2],
    )
    _, total = run(form, strided)
    total.backward()
    whole = gradients("plain", of)
    for name, base in turned.items():
        wanted = whole[name]
        assert base.grad is not None and wanted is not None
        assert torch.allclose(base.grad.t(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_stay_as_they_are_and_a_second_call_agrees(form: str) -> None:
    """A40: no operation in place reaches what it was given."""
    of = case(full=True)
    before = [t.clone() for t in [*of.leaves().values(), of.temperature, of.targets, of.ids] if isinstance(t, Tensor)]
    first = gradients(form, of)
    assert_same(first, gradients(form, of), 0.0)
    after = [t for t in [*of.leaves().values(), of.temperature, of.targets, of.ids] if isinstance(t, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_ignored_rows_hold_zeros_and_poison_nothing(form: str) -> None:
    of = case(full=True)
    ids = of.ids
    assert ids is not None and isinstance(of.temperature, Tensor)
    targets, hidden, temperature, ids = of.targets.clone(), of.hidden.clone(), of.temperature.clone(), ids.clone()
    gone = torch.tensor([0, 7, 8, 18])
    targets[gone], hidden[gone], temperature[gone], ids[gone] = -1, torch.nan, torch.inf, -9
    poisoned = replace(of, targets=targets, hidden=hidden, temperature=temperature, ids=ids).live()
    scored, total = run(form, poisoned, top_k=2, square_sums=True)
    total.backward()
    kept = (targets >= 0).nonzero()[:, 0]
    alone, _ = run(form, of, top_k=2, square_sums=True)
    for name in ("logprobs_N", "entropy_N", "ids_logprobs_NK", "square_sums_N", "top_k_ids_NK", "top_k_logprobs_NK"):
        there = {"a": scored, "b": alone}
        a, b = (vars_of(s)[name] for s in there.values())
        assert (a[gone] == 0).all() and torch.allclose(a[kept].double(), b[kept].double(), rtol=0, atol=1e-12)
    assert poisoned.hidden.grad is not None and (poisoned.hidden.grad[gone] == 0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in poisoned.leaves().values())
    plain = replace(poisoned, hidden=torch.where(hidden.isnan(), 0.0, hidden)).live()
    run("plain", plain)[1].backward()
    assert_same(
        {name: t.grad for name, t in poisoned.leaves().items()}, {name: t.grad for name, t in plain.leaves().items()}
    )


def vars_of(scored: object) -> dict[str, Tensor]:
    return {name: getattr(scored, name) for name in scored.__slots__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", FORMS)
def test_known_numbers(form: str) -> None:
    """A38: a vocabulary that fills no tile, all logits negative. A41: temperature divides logits. A49: uniform
    entropy."""
    eye = torch.eye(3, dtype=torch.float64)
    z = torch.tensor([[-20.0, -20.0, -17.0]], dtype=torch.float64)

    def one(hidden: Tensor, weight: Tensor, target: int, temperature: float | None = None) -> tuple[float, float]:
        of = Case(hidden=hidden, weight=weight, targets=torch.tensor([target]), temperature=temperature)
        scored, _ = run(form, of)
        assert scored.entropy_N is not None
        return scored.logprobs_N.item(), scored.entropy_N.item()

    assert one(z, eye, 2)[0] == pytest.approx(-0.09492, abs=1e-5)
    assert one(z * 0, eye, 1)[0] == pytest.approx(-1.0986, abs=1e-4)
    two = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    assert one(two, torch.eye(2).double(), 0, 0.5)[0] == pytest.approx(-0.01815, abs=1e-5)
    flat = one(torch.zeros(1, 2).double(), torch.zeros(4, 2).double(), 0)
    assert flat[1] == pytest.approx(1.38629, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e4, -1e4, 3e33])
def test_huge_logits(form: str, size: float) -> None:
    """All logits far above or far below 0; the largest in the last tile, so that the running maximum must move."""
    weight = torch.linspace(0.5, 1.0, 40)[:, None] if size > 0 else torch.linspace(1.0, 0.5, 40)[:, None]
    of = Case(hidden=torch.full((1, 1), size), weight=weight, targets=torch.tensor([38])).live()
    scored, total = run(form, of, square_sums=True, top_k=1)
    total.backward()
    gap = abs(size) * 0.5 / 39
    assert scored.logprobs_N.item() == pytest.approx(-gap, rel=1e-4)
    assert scored.entropy_N is not None and scored.entropy_N.item() == 0.0
    assert scored.square_sums_N is not None and scored.square_sums_N.item() == 1.0
    assert scored.top_k_ids_NK is not None and scored.top_k_ids_NK.item() == 39
    assert of.hidden.grad is not None and of.hidden.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_of_minus_infinity_bans_its_token(form: str) -> None:
    """The entropy, its gradient and the other tokens are those of a vocabulary without it."""
    of = case(full=True, softcap=None, ids=None)
    assert of.bias is not None and of.b is not None
    targets = of.targets.clamp(min=1)
    banned = replace(of, bias=of.bias.index_fill(0, torch.tensor([0]), -torch.inf), targets=targets)
    without = replace(of, bias=of.bias[1:], b=of.b[1:], weight=of.weight[1:], targets=targets - 1)
    (a, sum_a), (b, sum_b) = run(form, banned.live()), run("plain", without.live())
    assert a.entropy_N is not None and b.entropy_N is not None
    assert torch.allclose(a.logprobs_N, b.logprobs_N, rtol=0, atol=1e-12)
    assert torch.allclose(a.entropy_N, b.entropy_N, rtol=0, atol=1e-12)
    assert sum_a.item() == pytest.approx(sum_b.item(), abs=1e-12)
    grads = gradients(form, banned)
    assert grads["bias"] is not None and grads["bias"][0] == 0 and grads["bias"].isfinite().all()
    assert all(g is not None and g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form: str) -> None:
    of = replace(case(full=True, n=1), hidden=torch.zeros(0, 3).double(), targets=torch.zeros(0, dtype=torch.int64),
                 ids=torch.zeros(0, 4, dtype=torch.int64), temperature=torch.zeros(0)).live()  # fmt: skip
    scored, total = run(form, of, top_k=2, square_sums=True)
    shapes = {name: tuple(t.shape) for name, t in vars_of(scored).items()}
    assert shapes == {"logprobs_N": (0,), "entropy_N": (0,), "ids_logprobs_NK": (0, 4), "square_sums_N": (0,),
                      "top_k_ids_NK": (0, 2), "top_k_logprobs_NK": (0, 2)}  # fmt: skip
    total.backward()
    assert of.weight.grad is not None and not of.weight.grad.any()


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("form", STREAMS)
def test_bfloat16_gradients_are_rounded_once(form: str, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over 640 rows run in float32: the result is the exact one to bfloat16's own rounding. So it is where a
    processor has tile registers for bfloat16, whose order of sums every processor can follow."""
    monkeypatch.setattr(head_tiles, "has_tiles", lambda: tiles)
    monkeypatch.setattr(head_tiles, "half_product", partial(half_product, tiles=False))
    made = case(n=96 if form == "triton" else 640, d=8)
    made = replace(made, bias=torch.linspace(-1.0, 1.0, 13))
    coarse = replace(made, **{name: t.bfloat16() for name, t in made.leaves().items()})
    exact = gradients("plain", replace(coarse, **{name: t.double() for name, t in coarse.leaves().items()}))
    assert run(form, coarse.live())[1].dtype == torch.float32
    got = gradients(form, coarse, rows=16)
    for name in ("hidden", "weight", "bias"):
        g, e = got[name], exact[name]
        assert g is not None and e is not None and g.dtype == torch.bfloat16
        assert ((g.double() - e).abs() <= 2**-8 * e.abs() + 1e-4 * e.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", STREAMS)
def test_the_weights_gradient_can_be_added_in_place(form: str, dtype: torch.dtype) -> None:
    made = case()
    of = replace(made, hidden=made.hidden.to(dtype), weight=made.weight.to(dtype))
    alone = gradients(form, of)["weight"]
    assert alone is not None
    live = of.live()
    begun = torch.ones_like(live.weight)
    live.weight.grad = begun
    run(form, live, weight_grad_VD=begun)[1].backward()
    assert live.weight.grad is begun
    assert torch.allclose(begun.double(), 1.0 + alone.double(), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)
    assert live.hidden.grad is not None and torch.equal(live.hidden.grad, gradients(form, of)["hidden"])  # type: ignore
    beside, apart = torch.ones_like(live.weight), of.live()
    run(form, apart, weight_grad_VD=beside)[1].backward()
    assert apart.weight.grad is None and torch.equal(beside, begun)
    frozen = of.live()
    frozen.weight.requires_grad_(False)
    run(form, frozen, weight_grad_VD=begun)[1].backward()
    assert torch.allclose(begun.double(), 1.0 + alone.double(), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("form", FORMS)
def test_a_tied_head_collects_both_gradients(form: str) -> None:
    of = case(d=3)
    tokens = torch.randint(0, 13, (19,))
    tied = of.weight.clone().requires_grad_()
    run(form, replace(of, hidden=tied[tokens].tanh(), weight=tied))[1].backward()
    apart = of.weight.clone().requires_grad_(), of.weight.clone().requires_grad_()
    run("plain", replace(of, hidden=apart[0][tokens].tanh(), weight=apart[1]))[1].backward()
    assert tied.grad is not None and apart[0].grad is not None and apart[1].grad is not None
    assert torch.allclose(tied.grad, apart[0].grad + apart[1].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_an_entropy_to_look_at_has_the_value_and_no_gradient(form: str) -> None:
    of = case(full=True).live()
    seen, live = (run(form, of, entropy=kind)[0].entropy_N for kind in (Entropy.VALUE, Entropy.GRADIENT))
    assert seen is not None and live is not None
    assert torch.equal(seen, live) and not seen.requires_grad
    assert live.requires_grad is (form != "learned")
    looked, _ = run(form, of, entropy=Entropy.NONE, top_k=2, square_sums=True)
    assert looked.square_sums_N is not None and not looked.square_sums_N.requires_grad
    assert looked.top_k_logprobs_NK is not None and not looked.top_k_logprobs_NK.requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_tokens_outside_the_vocabulary_are_refused(form: str) -> None:
    of = case()
    for bad in (13, -2):
        with pytest.raises(ValueError, match=f"a target is {bad}, outside a vocabulary of 13"):
            run(form, replace(of, targets=torch.where(torch.arange(19) == 4, bad, of.targets)))
    for bad in (13, -1):
        with pytest.raises(ValueError, match=f"an id is {bad}, outside a vocabulary of 13"):
            run(form, replace(of, ids=torch.full((19, 1), bad)))
    both = of.targets.index_fill(0, torch.tensor([4]), 13).index_fill(0, torch.tensor([5]), -1)
    with pytest.raises(ValueError, match=r"a target is 13, .*: targets are tokens or -1 .ignored., ids are tokens$"):
        run(form, replace(of, targets=both))
    with pytest.raises(ValueError, match="the 14 likeliest of 13 tokens"):
        run(form, of, top_k=14)
    assert run(form, of, top_k=13)[0].top_k_ids_NK is not None


@pytest.mark.parametrize("form", FORMS)
def test_float32_in_is_float32_out(form: str) -> None:
    of = case(full=True)
    narrow = replace(of, **{name: t.float() for name, t in of.leaves().items()})
    scored, _ = run(form, narrow, top_k=2, square_sums=True)
    kinds = {name: t.dtype for name, t in vars_of(scored).items()}
    assert kinds.pop("top_k_ids_NK") == torch.int64 and set(kinds.values()) == {torch.float32}
    wide, _ = run("plain", of)
    assert torch.allclose(scored.logprobs_N.double(), wide.logprobs_N, rtol=0, atol=1e-5)
    half = replace(of, hidden=of.hidden.bfloat16(), weight=of.weight.bfloat16(), bias=None, a=None)
    assert {run(form, half)[0].logprobs_N.dtype, run(form, half)[1].dtype} == {torch.float32}


def test_a_uniform_row_has_the_logprob_of_chance() -> None:
    scored = score_targets(torch.zeros(1, 2), Head(weight_VD=torch.ones(64, 2)), torch.tensor([5]), impl=HeadImpl.FUSED,
                           square_sums=True)  # fmt: skip
    assert scored.square_sums_N is not None
    assert scored.logprobs_N.item() == pytest.approx(-math.log(64)) and scored.square_sums_N.item() == pytest.approx(
        1 / 64
    )
    assert mixed(torch.arange(1), scored).isfinite()
