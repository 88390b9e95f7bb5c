"""Products of bfloat16 with sums in float32: on tile registers, where the processor has them, and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.ops.native.halves import half_product, has_tiles

TILES = pytest.param(True, marks=pytest.mark.skipif(not has_tiles(), reason="this processor has no tile registers"))
BOTH = pytest.mark.parametrize("tiles", [False, TILES])
INF, NAN = float("inf"), float("nan")


def product(a: Tensor, b: Tensor, *, tiles: bool, onto: Tensor | None = None) -> Tensor:
    into = torch.full((len(a), b.shape[1]), NAN) if onto is None else onto
    half_product(a, b, into, add=onto is not None, tiles=tiles)
    return into


@BOTH
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 7, 3), (16, 32, 16), (33, 70, 49), (64, 96, 32), (2, 0, 3), (0, 4, 3)]
)
@pytest.mark.parametrize("wide", [False, True])
def test_it_is_the_product(shape: tuple[int, int, int], wide: bool, tiles: bool) -> None:
    """Whatever lies side by side, at the edges of tiles and inside, written and added, beside what is not its own."""
    M, K, N = shape
    g = torch.Generator().manual_seed(M)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g).bfloat16()
    a = a if wide else a.bfloat16()
    exact = a.double() @ b.double()
    bound = (2**-16 if wide else 2**-21) * (a.double().abs() @ b.double().abs() + 1e-30)
    for left in (a, a.t().contiguous().t(), torch.zeros(M, 2 * K, dtype=a.dtype)[:, ::2].copy_(a)):
        for right in (b, b.t().contiguous().t()):
            assert ((product(left, right, tiles=tiles) - exact).abs() <= bound).all()
            held = torch.ones(M, N + 3)
            product(left, right, tiles=tiles, onto=held[:, 1 : N + 1])
            assert ((held[:, 1 : N + 1] - 1.0 - exact).abs() <= bound + 1e-6).all()
            assert (held[:, 0] == 1.0).all() and (held[:, N + 1 :] == 1.0).all()


@BOTH
def test_a_number_in_float32_is_taken_in_two_parts(tiles: bool) -> None:
    """To even, as torch rounds; the remainder likewise; what is not finite stays what it is."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, INF, -INF, NAN])])
    x = x[~((x.abs() > 3e38) & x.isfinite()) & ((x == 0) | ~(x.abs() < 1e-30))]  # no overflow, nothing denormal
    upper = x.bfloat16().float()
    rest = torch.where(upper.isfinite(), x - upper, 0.0).bfloat16().float()
    found = product(x[:, None], torch.ones(1, 1).bfloat16(), tiles=tiles)[:, 0]
    assert torch.equal(found.nan_to_num(7.0), (upper + rest).nan_to_num(7.0))
    assert torch.equal(found.isnan(), x.isnan()) and found.isinf().sum() == 2


@BOTH
def test_poison_stays_in_its_row_and_column(tiles: bool) -> None:
    a, b = torch.ones(40, 33).bfloat16(), torch.ones(33, 35).bfloat16()
    a[17, 5], b[2, 34] = NAN, NAN
    bad = product(a, b, tiles=tiles).isnan()
    expected = torch.zeros(40, 35, dtype=torch.bool)
    expected[17], expected[:, 34] = True, True
    assert torch.equal(bad, expected)


@BOTH
def test_a_rows_bits_do_not_depend_on_the_others(tiles: bool) -> None:
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(50, 80, generator=g), torch.randn(80, 40, generator=g).bfloat16()
    whole = product(a, b, tiles=tiles)
    for rows in (slice(0, 1), slice(7, 9), slice(30, 50)):
        assert torch.equal(product(a[rows], b[:, 3:], tiles=tiles), whole[rows, 3:])


@pytest.mark.skipif(not has_tiles(), reason="this processor has no tile registers")
def test_threads_change_nothing() -> None:
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(300, 200, generator=g), torch.randn(200, 500, generator=g).bfloat16()
    before = torch.get_num_threads()
    found: list[Tensor] = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(product(a, b, tiles=True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_other_tensors_are_refused() -> None:
    half, single = torch.ones(2, 2).bfloat16(), torch.ones(2, 2)
    for a, b, c in (
        (half, single, single),
        (half, half, half),
        (half.half(), half, single),
        (half.double(), half, single),
    ):
        with pytest.raises(TypeError, match="float"):
            half_product(a, b, c, add=False, tiles=False)
    with pytest.raises(TypeError, match="meta"):
        half_product(half.to("meta"), half, single, add=False, tiles=False)
    for a, b, c in ((half, half[:1], single), (half, half, single[:1]), (half, half, torch.ones(2, 4)[:, ::2])):
        with pytest.raises(ValueError, match=r"\[2, 2\] @"):
            half_product(a, b, c, add=False, tiles=False)


@pytest.mark.skipif(has_tiles(), reason="this processor has tile registers")
def test_without_registers_nothing_is_done() -> None:
    half, single = torch.ones(2, 2).bfloat16(), torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="no tile registers"):
        half_product(half, half, single, add=False)
    assert not single.any()
