"""The checksum of bytes: what it tells apart, and one number whichever form finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strop.ops import checksum as module
from strop.ops.checksum import checksum, native_sums, torch_sums

NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001
Sums = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


@pytest.fixture(params=[native_sums, torch_sums])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Both forms, the second as where no compiler is."""
    monkeypatch.setattr(module, "_has_native", lambda: request.param is native_sums)
    return request.param


@pytest.mark.parametrize("rows", [0, 1, 3, 256, 300])
@pytest.mark.parametrize("more", [0, 1, 1023])
def test_it_tells_any_bit_and_any_order(rows: int, more: int, form: Sums) -> None:
    """Rows of words, and what fills none; where one word changed, or two changed places."""
    random = torch.Generator().manual_seed(rows + more)
    words = torch.randint(-(2**62), 2**62, (rows * 1024 + more,), generator=random)
    known = checksum(words)
    assert known == checksum(words.clone()) == checksum(torch.cat([words[:1], words])[1:])
    for at in {0, len(words) // 2, len(words) - 1} if len(words) else set[int]():
        for bit in (0, 40, 63):
            other = words.clone()
            other[at] ^= torch.tensor(1, dtype=torch.int64) << bit
            assert checksum(other) != known
        other = words.clone()
        other[[0, at]] = other[[at, 0]]
        assert (checksum(other) == known) == (at == 0)


def test_different_nans_differ(form: Sums) -> None:
    """A value that is not equal to itself is still told from another. E03: bytes are those in order."""
    one = torch.tensor([NAN, OTHER_NAN], dtype=torch.int32).view(torch.float32)
    assert checksum(one[:1].clone()) != checksum(one[1:])
    strided = torch.arange(12.0).view(3, 4).t()
    assert checksum(strided) == checksum(strided.contiguous())


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("offset", [0, 2, 8])
def test_the_forms_find_the_same_sums_and_copy_the_same_bytes(rows: int, offset: int) -> None:
    """Also where bytes begin at no multiple of a word, and sums wrap."""
    held = torch.randint(0, 256, (rows * 8192 + offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    raw = held[offset:]
    (row, column), (row_too, column_too) = native_sums(raw, None), torch_sums(raw, None)
    assert torch.equal(row, row_too) and torch.equal(column, column_too)
    exact = [
        sum(int.from_bytes(bytes(word), "little") for word in one.view(-1, 8).tolist()) for one in raw.view(rows, -1)
    ]
    assert [value % 2**64 for value in row.tolist()] == [value % 2**64 for value in exact]
    for sums in (native_sums, torch_sums):
        copies = torch.zeros(rows * 8192 + offset + 1, dtype=torch.uint8)
        again = sums(raw, copies[offset:-1])
        assert torch.equal(copies[offset:-1], raw) and not copies[:offset].any() and not copies[-1]
        assert torch.equal(again[0], row) and torch.equal(again[1], column)


@pytest.mark.parametrize("count", [0, 1, 2047, 2048, 5000])
def test_a_copy_on_the_way_is_one_of_every_byte(count: int, form: Sums) -> None:
    tensor = torch.arange(float(count)).view(1, -1).t()
    copy = torch.zeros(4 * count, dtype=torch.uint8)
    assert checksum(tensor, copy) == checksum(tensor) == checksum(copy)
    assert torch.equal(copy.view(torch.float32), torch.arange(float(count)))


@pytest.mark.parametrize(
    "into", [torch.zeros(7, dtype=torch.uint8), torch.zeros(8), torch.zeros(16, dtype=torch.uint8)[::2]]
)
def test_a_copy_that_does_not_fit_is_refused(into: Tensor) -> None:
    with pytest.raises(ValueError, match="8 bytes do not go into"):
        checksum(torch.zeros(2), into)
