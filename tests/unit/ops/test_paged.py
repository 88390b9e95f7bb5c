"""The paged cache: what it gives back equals packed attention over the same text, whatever lies in unused slots."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from strop.ops.attention import packed_attention
from strop.ops.paged import PAGE, PagedKV
from strop.ops.select import Impl
from strop.types import Layout

IMPLS = [Impl.TORCH, Impl.NATIVE]
impls = pytest.mark.parametrize("impl", IMPLS)
CONTEXTS = (37, 1, 16, 200, 33)
SHAPES = [(4, 2, 32, 32), (8, 1, 64, 64), (9, 3, 80, 16), (2, 2, 16, 24), (6, 1, 128, 128), (16, 1, 20, 5)]


class Texts:
    """Requests with given lengths, their queries, keys and values, and a cache of poisoned pages that holds them."""

    def __init__(
        self, impl: Impl, shape: tuple[int, int, int, int] = (4, 2, 32, 32), lengths: tuple[int, ...] = CONTEXTS
    ):
        H, J, C, CV = shape
        g = torch.Generator().manual_seed(5)
        self.layout = Layout(lengths)
        self.q, self.k, self.v = (
            torch.randn(self.layout.num_tokens, n, c, generator=g) for n, c in ((H, C), (J, C), (J, CV))
        )
        needed = [-(-n // PAGE) for n in lengths]
        self.cache = new_cache(impl, shape, sum(needed) + 5)
        pages = list(range(sum(needed) + 5))
        random.Random(1).shuffle(pages)
        self.tables = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
        self.row = torch.tensor(self.layout.sequence_T)
        self.context = torch.tensor(self.layout.positions_T) + 1
        self.last = torch.tensor(lengths).cumsum(0) - 1
        position = self.context - 1
        self.slots = self.tables[self.row, position // PAGE].long() * PAGE + position % PAGE

    def write(self, layer: int = 1) -> None:
        self.cache.write(layer, self.k, self.v, self.slots)

    def attend(self, tokens: Tensor | slice, **options: float) -> Tensor:
        return self.cache.attend(
            1,
            self.q[tokens],
            self.tables,
            self.row[tokens],
            self.context[tokens],
            scale=0.3,
            **options,  # pyright: ignore
        )

    def expected(self) -> Tensor:
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        return packed_attention(q, k, v, self.layout, scale=0.3, impl=Impl.TORCH)


def new_cache(impl: Impl, shape: tuple[int, int, int, int], pages: int) -> PagedKV:
    _, J, C, CV = shape
    cache = PagedKV(
        num_layers=2,
        num_pages=pages,
        num_kv_heads=J,
        key_channels=C,
        value_channels=CV,
        dtype=torch.float32,
        device=torch.device("cpu"),
        impl=impl,
    )
    cache._keys.fill_(float("nan"))
    cache._values.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("shape", SHAPES)
@impls
def test_prefill_and_decode_equal_packed_attention(shape: tuple[int, int, int, int], impl: Impl) -> None:
    """Every slot that holds no token is NaN, and none of it shows."""
    texts = Texts(impl, shape)
    texts.write()
    expected = texts.expected()
    torch.testing.assert_close(texts.attend(slice(None)).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(texts.attend(texts.last).double(), expected[texts.last], rtol=1e-5, atol=1e-5)


@impls
def test_a_text_written_and_read_step_by_step(impl: Impl) -> None:
    """A prompt in two pieces, then one token at a time, each written before it attends."""
    texts = Texts(impl, lengths=(53,))
    expected = texts.expected()
    for start, end in ((0, 30), (30, 41), *((t, t + 1) for t in range(41, 53))):
        piece = slice(start, end)
        texts.cache.write(1, texts.k[piece], texts.v[piece], texts.slots[piece])
        torch.testing.assert_close(texts.attend(piece).double(), expected[piece], rtol=1e-5, atol=1e-5)


def test_a_native_token_has_the_same_bits_in_any_company() -> None:
    """One token alone, all last tokens together, a whole prompt at once, in any order: no bit of the token changes."""
    texts = Texts(Impl.NATIVE, (6, 2, 32, 32))
    texts.write()
    whole = texts.attend(slice(None))
    assert torch.equal(texts.attend(texts.last), whole[texts.last])
    shuffled = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    assert torch.equal(texts.attend(shuffled), whole[shuffled])
    for t in (0, 36, 37, 100, 253):
        assert torch.equal(texts.attend(slice(t, t + 1)), whole[t : t + 1])


@impls
def test_other_requests_change_no_bit(impl: Impl) -> None:
    """A47: the same shapes, other tokens (or NaN) in every other request."""
    texts = Texts(impl)
    texts.write()
    mine = texts.row == 3
    before = texts.attend(slice(None))[mine]
    for poison in (None, float("nan")):
        for x in (texts.q, texts.k, texts.v):
            x[~mine] = torch.randn_like(x[~mine]) if poison is None else poison
        texts.write()
        assert torch.equal(texts.attend(slice(None))[mine], before)


@impls
def test_later_tokens_of_a_request_are_not_seen(impl: Impl) -> None:
    """A row's own later keys and values lie in its last page too: only the context counts."""
    texts = Texts(impl, lengths=(40,))
    texts.write()
    before = texts.attend(torch.tensor([20]))
    texts.k[21:], texts.v[21:] = float("nan"), float("nan")
    texts.write()
    assert torch.equal(texts.attend(torch.tensor([20])), before)


@impls
def test_requests_share_the_pages_of_a_prefix(impl: Impl) -> None:
    """Two requests read one full page and a copy of one partly filled page, then go their own ways."""
    shape = (4, 2, 16, 16)
    texts = Texts(impl, shape, lengths=(21,))
    texts.write()
    texts.write(layer=0)
    first, partial = (int(p) for p in texts.tables[0, :2])
    free = next(p for p in range(texts.cache.num_pages) if p not in (first, partial))
    texts.cache.copy_page(partial, free)
    tables = torch.tensor([[first, partial], [first, free]], dtype=torch.int32)
    q, k, v = (torch.randn(2, n, 16) for n in (4, 2, 2))
    slots = torch.tensor([partial * PAGE + 5, free * PAGE + 5])
    for layer in (0, 1):
        texts.cache.write(layer, k, v, slots)
        got = texts.cache.attend(layer, q, tables, torch.tensor([0, 1]), torch.tensor([22, 22]), scale=0.3)
        for row in (0, 1):
            keys, values = torch.cat((texts.k, k[row : row + 1])), torch.cat((texts.v, v[row : row + 1]))
            queries = torch.cat((texts.q, q[row : row + 1]))
            whole = packed_attention(queries, keys, values, Layout((22,)), scale=0.3, impl=Impl.TORCH)
            torch.testing.assert_close(got[row], whole[-1], rtol=1e-5, atol=1e-5)


@impls
def test_window_softcap_and_sinks(impl: Impl) -> None:
    texts = Texts(impl)
    texts.write()
    sinks_H = torch.randn(4)
    got = texts.attend(slice(None), window=7, softcap=3.0, sinks_H=sinks_H)  # pyright: ignore[reportArgumentType]
    expected = packed_attention(
        texts.q, texts.k, texts.v, texts.layout, scale=0.3, window=7, softcap=3.0, sinks_H=sinks_H, impl=Impl.TORCH
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_one_thread_and_two_give_the_same_bits() -> None:
    texts = Texts(Impl.NATIVE, lengths=CONTEXTS * 4)
    texts.write()
    torch.set_num_threads(1)
    one = texts.attend(slice(None))
    torch.set_num_threads(2)
    assert torch.equal(texts.attend(slice(None)), one)


@impls
def test_nothing_to_do_is_done(impl: Impl) -> None:
    texts = Texts(impl)
    none = slice(0, 0)
    texts.cache.write(0, texts.k[none], texts.v[none], texts.slots[none])
    assert texts.attend(none).shape == (0, 4, 32)


@impls
def test_inputs_of_any_memory_layout_and_integers_of_either_size(impl: Impl) -> None:
    texts = Texts(impl, (4, 2, 32, 32))
    qkv = torch.cat((texts.q, texts.k, texts.v), 1)
    texts.cache.write(1, qkv[:, 4:6], qkv[:, 6:], texts.slots)
    cut = texts.cache.attend(1, qkv[:, :4], texts.tables.long(), texts.row.int(), texts.context.int(), scale=0.3)
    turned = texts.cache.attend(
        1, texts.q.transpose(0, 1).contiguous().transpose(0, 1), texts.tables, texts.row, texts.context, scale=0.3
    )
    texts.write()
    plain = texts.attend(slice(None))
    torch.testing.assert_close(cut, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned, plain, rtol=1e-6, atol=1e-6)


def test_native_form_names_the_token_that_cannot_be() -> None:
    texts = Texts(Impl.NATIVE)
    texts.write()
    q, row = texts.q[:2], torch.tensor([0, 1])
    with pytest.raises(IndexError, match="query token 1: request 1 with context 17"):
        texts.cache.attend(1, q, texts.tables, row, torch.tensor([3, 17]), scale=0.3)  # its second page is -1
    with pytest.raises(IndexError, match="query token 0: request 9"):
        texts.cache.attend(1, q, texts.tables, torch.tensor([9, 0]), torch.tensor([1, 1]), scale=0.3)
    with pytest.raises(IndexError, match="query token 1: request 1 with context 0"):
        texts.cache.attend(1, q, texts.tables, row, torch.tensor([1, 0]), scale=0.3)
    with pytest.raises(IndexError, match="token 0 goes to slot -1"):
        texts.cache.write(1, texts.k[:1], texts.v[:1], torch.tensor([-1]))
