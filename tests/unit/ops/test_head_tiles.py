"""Tiles of logits and what is summed over them, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.ops import head_tiles
from strop.ops.head import Ask, Entropy
from strop.ops.head_tiles import EVERY, Logits, Statistics, product
from strop.ops.native.halves import half_product
from tests.unit.ops.head_cases import case, run

ASK = Ask(entropy=Entropy.GRADIENT, square_sums=True)


def logits(n: int = 7, v: int = 13) -> Logits:
    of = case(n=n, v=v)
    return Logits(pairs=((3.0 * of.hidden, of.weight),), bias_V=None, softcap=None, temperature=None, shard=None)


@pytest.mark.parametrize("ends", [[0, 5, 11, 13], [0, 1, 2, 13], [0, 13]])
def test_sums_of_some_columns_can_be_put_together(ends: list[int]) -> None:
    """As a kernel leaves them: each span's refer to a maximum of their own."""
    made = logits()
    picks_NJ = torch.zeros(7, 1, dtype=torch.int64)
    z = made.tile(EVERY, EVERY, made.weights(EVERY))
    whole, merged = Statistics(made, picks_NJ, ASK), Statistics(made, picks_NJ, ASK)
    whole.fold(EVERY, slice(0, 13), z)
    for start, end in pairwise(ends):
        part = Statistics(made, picks_NJ, ASK)
        part.fold(EVERY, slice(start, end), z[:, start:end])
        merged.merge(part.max_N, part.sum_N, part.weighted_N, part.squares_N)
    (one, lse_N), (other, whole_lse_N) = merged.summary(), whole.summary()
    assert torch.allclose(lse_N, z.logsumexp(-1), rtol=0, atol=1e-13)
    assert torch.allclose(whole_lse_N, z.logsumexp(-1), rtol=0, atol=1e-13)
    for name in ("entropy_N", "square_sums_N"):
        assert torch.allclose(getattr(one, name), getattr(other, name), rtol=0, atol=1e-13), name


def test_a_cut_has_the_numbers_of_its_rows_and_columns() -> None:
    of = case(full=True)
    assert of.a is not None and of.b is not None
    made = Logits(
        pairs=((of.hidden, of.weight), (of.hidden @ of.a.t(), of.b)),
        bias_V=of.bias, softcap=of.softcap, temperature=of.temperature, shard=None,
    )  # fmt: skip
    for one in (made, replace(made, bias_V=None, temperature=0.5)):
        whole = one.tile(EVERY, EVERY, one.weights(EVERY))
        rows, columns = slice(3, 9), slice(2, 12)
        for few, of_them in ((one.cut(rows), EVERY), (one.cut(rows, columns), columns)):
            z = few.tile(EVERY, EVERY, few.weights(EVERY))
            assert torch.allclose(z, whole[rows, of_them], rtol=0, atol=1e-14)


def test_a_temperature_divides_in_the_format_of_the_logits() -> None:
    of = case(temperature=torch.linspace(0.5, 2.0, 19).double())
    single = Logits(
        pairs=((of.hidden.float(), of.weight.float()),),
        bias_V=None,
        softcap=None,
        temperature=of.temperature,
        shard=None,
    )
    divisor = single.divisor(slice(2, 5))
    assert isinstance(divisor, Tensor) and divisor.dtype == torch.float32 and divisor.shape == (3, 1)


@pytest.mark.parametrize(
    ("device", "half", "tiles", "dtype"),
    [
        ("cpu", torch.bfloat16, False, torch.float32),
        ("cpu", torch.bfloat16, True, torch.bfloat16),
        ("cpu", torch.float16, True, torch.float32),
        ("meta", torch.bfloat16, False, torch.bfloat16),
    ],
)
def test_a_processor_gets_weights_widened_once_that_it_cannot_multiply(
    device: str, half: torch.dtype, tiles: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_tiles, "has_tiles", lambda: tiles)
    hidden, weight = (torch.ones(n, 4, device=device, dtype=half) for n in (3, 8))
    made = Logits(pairs=((hidden, weight),), bias_V=None, softcap=None, temperature=None, shard=None)
    (cut,) = made.weights(slice(1, 6))
    assert cut.dtype == dtype and cut.shape == (5, 4)


@pytest.mark.parametrize(("wide", "upper"), [(False, 2e-7), (True, 2**-16)])
def test_tiles_multiply_bfloat16_as_it_is(wide: bool, upper: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into what is there, onto it, or anew; the first factor may be float32, of which 16 bits count."""
    seen: list[torch.dtype] = []

    def as_tiles_do(a: Tensor, b: Tensor, c: Tensor, *, add: bool) -> None:
        seen.append(a.dtype)
        half_product(a, b, c, add=add, tiles=False)

    monkeypatch.setattr(head_tiles, "has_tiles", lambda: True)
    monkeypatch.setattr(head_tiles, "half_product", as_tiles_do)
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 3, generator=g), torch.randn(3, 4, generator=g).bfloat16()
    a = a if wide else a.bfloat16()
    exact, onto, out = a.double() @ b.double(), torch.ones(5, 4), torch.empty(5, 4)
    assert product(a, b, onto=onto) is onto and product(a, b, out=out) is out
    for found in (product(a, b), onto - 1.0, out):
        assert found.dtype == torch.float32 and (found - exact).abs().max() < upper * exact.abs().max() * 3
    assert seen == [a.dtype] * 3
    for x, y in ((a.double(), b), (a, b.float()), (a, b.half())):  # what tiles do not take
        assert (product(x, y) - x.double() @ y.double()).abs().max() < 1e-6
    assert len(seen) == 3


class Elsewhere(Tensor):
    """Says that it is on a GPU, and multiplies half precision into float32 as a GPU does."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = dict(kwargs or {})
        if func is torch.mm and asked:
            assert asked == {"out_dtype": torch.float32} and args[0].dtype == args[1].dtype
            args = [a.as_subclass(Tensor) for a in args]
            assert args[0].dtype in (torch.bfloat16, torch.float16)
            return (args[0].float() @ args[1].float()).as_subclass(cls)
        return super().__torch_function__(func, types, args, asked)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", ["both", "first", "second"])
def test_a_gpu_multiplies_half_precision_as_it_is(half: torch.dtype, narrow: str) -> None:
    """The other side is rounded to it; sums are float32."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 3, generator=g), torch.randn(3, 4, generator=g)
    right = a.to(half).float() @ b.to(half).float()
    here = (a if narrow == "second" else a.to(half), b if narrow == "first" else b.to(half))
    x, y = (t.as_subclass(Elsewhere) for t in here)
    assert torch.equal(product(x, y).as_subclass(Tensor), right)
    onto, out = torch.ones(5, 4), torch.empty(5, 4)
    assert torch.equal(product(x, y, onto=onto).as_subclass(Tensor), 1.0 + right) and torch.equal(onto, 1.0 + right)
    assert torch.equal(product(x, y, out=out).as_subclass(Tensor), right) and torch.equal(out, right)


def test_a_product_is_as_wide_as_its_sides() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    for x, y in ((a.double(), b), (a, b.double())):
        assert product(x, y).dtype == torch.float64
    for x, y in ((a, b), (a.bfloat16(), b), (a, b.half())):
        assert product(x, y).dtype == torch.float32


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls(form: str, **asked: Any) -> Counter[str]:
    of = case()
    with torch.no_grad(), Count() as seen:
        run(form, of, **asked)
    return seen.calls


def test_what_is_not_asked_for_is_not_computed() -> None:
    bare, entropy, both = Entropy.NONE, Entropy.VALUE, {"entropy": Entropy.VALUE, "square_sums": True}
    found = [calls("plain", entropy=bare), calls("plain", entropy=entropy), calls("plain", **both)]
    assert [seen["exp"] for seen in found] == [0, 1, 2]
    found = [calls("chunked", entropy=bare), calls("chunked", entropy=entropy), calls("chunked", **both)]
    tiles = found[0]["mm"]
    assert [seen["sum"] - found[0]["sum"] for seen in found] == [0, tiles + 1, 2 * tiles + 1]  # one is of the test's
    assert found[0]["topk"] == found[0]["div_"] == 0 and calls("chunked", entropy=bare, top_k=2)["topk"] == 2 * tiles
