"""Packed attention: both forms against one masked softmax over everything in float64; isolation, prefixes, threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from strop.ops.attention import attention_impl, packed_attention
from strop.ops.select import Impl
from strop.types import Layout

Three = tuple[Tensor, Tensor, Tensor]
IMPLS = [Impl.TORCH, Impl.NATIVE]
impls = pytest.mark.parametrize("impl", IMPLS)

# lengths and parents; the long ones cross the native form's blocks of queries and tiles of keys
LAYOUTS = {
    "one": Layout((1,)),
    "ragged": Layout((5, 1, 33, 16, 17)),
    "branches": Layout((9, 4, 1, 7, 12), (-1, 0, 0, 0, -1)),
    "two-families": Layout((3, 20, 6, 8, 2, 5), (-1, 0, -1, 2, 0, 2)),
    "empty-ones": Layout((0, 6, 0, 3, 4, 0), (-1, 0, -1, -1, 3, 3)),
    "long": Layout((300, 70, 2), (-1, 0, -1)),
    "no-tokens": Layout((0, 0)),
    "no-sequences": Layout(()),
}
HEADS = [(1, 1), (2, 2), (4, 2), (9, 3), (6, 1), (8, 1), (16, 2)]
CHANNELS = [(16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (24, 12), (5, 9)]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: every score of every pair of tokens, then who may see whom."""
    sequence, position = torch.tensor(layout.sequence_T).long(), torch.tensor(layout.positions_T).long()
    parent = torch.tensor(layout.parents).long()[sequence] if len(layout.parents) else sequence
    text = (sequence[:, None] == sequence) | (parent[:, None] == sequence)
    seen = text & (position <= position[:, None])
    if window is not None:
        seen &= position > position[:, None] - window
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("thc,shc->hts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:  # one more key with this score and a value of zero
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
        seen, v = (
            torch.cat((seen, torch.ones(len(seen), 1, dtype=torch.bool)), 1),
            torch.cat((v, torch.zeros_like(v[:1]))),
        )
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shc->thc", weights, v)


def draw(layout: Layout, heads: tuple[int, int], channels: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Three:
    g = torch.Generator().manual_seed(seed)
    (H, J), (C, CV), T = heads, channels, layout.num_tokens
    q, k, v = (torch.randn(T, n, c, generator=g, dtype=torch.float64) for n, c in ((H, C), (J, C), (J, CV)))
    return leaves((q.to(dtype), k.to(dtype), v.to(dtype)))


def leaves(tensors: Iterable[Tensor]) -> Three:
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    return q, k, v


def run(inputs: Three, layout: Layout, impl: Impl | None, scale: float = 0.3) -> list[Tensor]:
    """Output and gradients of a fixed random combination of it; the reference when `impl` is None."""
    if impl is None:
        out = reference(*inputs, layout, scale)
    else:
        out = packed_attention(*inputs, layout, scale=scale, impl=impl)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [
        out.detach(),
        *torch.autograd.grad(out, inputs, seed, allow_unused=True, materialize_grads=True),
    ]


def close(mine: Tensor, true: Tensor, tolerance: float) -> None:
    scale = max(1.0, float(true.detach().abs().max()) if true.numel() else 0.0)
    torch.testing.assert_close(mine.double(), true.double(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@impls
def test_every_layout_equals_the_definition(layout: Layout, impl: Impl) -> None:
    inputs = draw(layout, (4, 2), (32, 32), torch.float32)
    expected = run(leaves(x.double() for x in inputs), layout, None)
    for mine, true in zip(run(inputs, layout, impl), expected, strict=True):
        close(mine, true, 3e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("channels", CHANNELS)
@impls
def test_every_shape_of_heads_equals_the_definition(
    heads: tuple[int, int], channels: tuple[int, int], impl: Impl
) -> None:
    layout = LAYOUTS["two-families"]
    inputs = draw(layout, heads, channels, torch.float32)
    expected = run(leaves(x.double() for x in inputs), layout, None)
    for mine, true in zip(run(inputs, layout, impl), expected, strict=True):
        close(mine, true, 3e-6)


@pytest.mark.parametrize("seed", range(12))
@impls
def test_random_layouts_equal_the_definition(seed: int, impl: Impl) -> None:
    rng = random.Random(seed)
    lengths: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(1, 6)):
        roots = [s for s, parent in enumerate(parents) if parent == -1]
        parents.append(rng.choice(roots) if roots and rng.random() < 0.6 else -1)
        lengths.append(rng.choice([1, 2, 3, 5, 8, 15, 16, 17, 31, 40, 97]))
    layout, J = Layout(tuple(lengths), tuple(parents)), rng.randint(1, 3)
    inputs = draw(
        layout, (J * rng.randint(1, 8), J), (rng.choice([16, 40, 64]), rng.choice([16, 40, 64])), torch.float32, seed
    )
    expected = run(leaves(x.double() for x in inputs), layout, None)
    for mine, true in zip(run(inputs, layout, impl), expected, strict=True):
        close(mine, true, 5e-6)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_window_softcap_and_sinks_equal_the_definition(window: int | None, softcap: float | None, sinks: bool) -> None:
    layout = LAYOUTS["branches"]
    q, k, v = draw(layout, (4, 2), (8, 6), torch.float64)
    sinks_H = torch.randn(4, dtype=torch.float64).requires_grad_() if sinks else None
    inputs = [q, k, v] if sinks_H is None else [q, k, v, sinks_H]
    seed = torch.randn(layout.num_tokens, 4, 6, dtype=torch.float64)
    mine = packed_attention(
        q, k, v, layout, scale=0.4, window=window, softcap=softcap, sinks_H=sinks_H, impl=Impl.TORCH
    )
    true = reference(q, k, v, layout, 0.4, window, softcap, sinks_H)
    for a, b in zip(
        [mine, *torch.autograd.grad(mine, inputs, seed)], [true, *torch.autograd.grad(true, inputs, seed)], strict=True
    ):
        close(a, b, 1e-11)


def test_native_leaves_window_softcap_and_sinks_to_torch_openly() -> None:
    assert attention_impl(Impl.NATIVE, None, None, None) is Impl.NATIVE
    assert attention_impl(Impl.TORCH, None, None, None) is Impl.TORCH
    assert attention_impl(Impl.NATIVE, 4, None, None) is Impl.TORCH
    assert attention_impl(Impl.NATIVE, None, 30.0, None) is Impl.TORCH
    assert attention_impl(Impl.NATIVE, None, None, torch.zeros(4)) is Impl.TORCH
    layout = LAYOUTS["ragged"]
    inputs = draw(layout, (4, 2), (16, 16), torch.float32)
    forms = [packed_attention(*inputs, layout, scale=0.2, window=3, impl=impl) for impl in IMPLS]
    assert torch.equal(*forms)


@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks"])
def test_torch_form_passes_gradcheck(kind: str) -> None:
    layout = Layout((2, 2, 1), (-1, 0, -1))
    inputs = draw(layout, (2, 1), (2, 2), torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return packed_attention(
            q,
            k,
            v,
            layout,
            scale=0.5,
            window=2 if kind == "window" else None,
            softcap=1.5 if kind == "softcap" else None,
            sinks_H=sinks if kind == "sinks" else None,
            impl=Impl.TORCH,
        )

    assert torch.autograd.gradcheck(
        attend, [*inputs, torch.randn(2, dtype=torch.float64).requires_grad_(kind == "sinks")]
    )


@pytest.mark.parametrize("bad", ["other tokens", "nan", "inf"])
@impls
def test_a_neighbours_tokens_change_no_bit(bad: str, impl: Impl) -> None:
    """A47: changing one sequence leaves every other sequence's output and gradients as they were, bit for bit.

    A prefix may feel its branches in the gradients of its keys and values, and its branches feel a prefix: neither is a
    neighbour. Everything else is.
    """
    layout = Layout((20, 33, 7, 40, 18, 50), (-1, 0, 0, -1, 3, -1))
    inputs = draw(layout, (6, 3), (32, 32), torch.float32)
    before = run(inputs, layout, impl)
    for s in range(len(layout.lengths)):
        own = slice(int(layout.starts_S[s]), int(layout.starts_S[s]) + layout.lengths[s])
        changed = [x.detach().clone() for x in inputs]
        for x in changed:
            x[own] = torch.randn_like(x[own]) if bad == "other tokens" else float(bad)
        after = run(leaves(changed), layout, impl)
        for other in range(len(layout.lengths)):
            related = other == s or layout.parents[other] == s
            rows = slice(int(layout.starts_S[other]), int(layout.starts_S[other]) + layout.lengths[other])
            for i, (x, y) in enumerate(zip(before, after, strict=True)):
                if not related and not (layout.parents[s] == other and i >= 2):
                    assert torch.equal(x[rows], y[rows]), (s, other, i)
        assert not torch.equal(before[0][own], after[0][own])


@impls
def test_branches_feel_their_prefix_and_prefixes_their_branches(impl: Impl) -> None:
    """The complement of isolation: what must be connected is."""
    layout = Layout((6, 4), (-1, 0))
    q, k, v = draw(layout, (2, 1), (16, 16), torch.float32)
    out = packed_attention(q, k, v, layout, scale=0.3, impl=impl)
    dk, dv = torch.autograd.grad(out[6:].sum(), [k, v])
    assert (dk[:6].abs().sum(-1) > 0).all() and (dv[:6].abs().sum(-1) > 0).all()


def unshared(layout: Layout, tensors: Three) -> tuple[Layout, Three, Tensor]:
    """Each text written out in full, and where in it each packed token stands (a prefix: in its own copy)."""
    index, where, lengths = [], [], []
    for s, parent in enumerate(layout.parents):
        own = torch.arange(layout.lengths[s]) + int(layout.starts_S[s])
        text = (
            own if parent < 0 else torch.cat((torch.arange(layout.lengths[parent]) + int(layout.starts_S[parent]), own))
        )
        where.append(torch.arange(len(text) - len(own), len(text)) + sum(lengths))
        index.append(text)
        lengths.append(len(text))
    q, k, v = (x[torch.cat(index)] for x in tensors)
    return Layout(tuple(lengths)), (q, k, v), torch.cat(where)


@pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"), [(Impl.TORCH, torch.float64, 1e-10), (Impl.NATIVE, torch.float32, 3e-6)]
)
def test_a_shared_prefix_is_the_unshared_text(impl: Impl, dtype: torch.dtype, tolerance: float) -> None:
    """Outputs of every token, and gradients of every token summed over the copies of it, equal those of whole texts."""
    for layout in (LAYOUTS["branches"], LAYOUTS["two-families"], LAYOUTS["long"]):
        inputs = draw(layout, (4, 2), (16, 16), dtype)
        seed = torch.randn(layout.num_tokens, 4, 16, dtype=dtype)
        shared = packed_attention(*inputs, layout, scale=0.3, impl=impl)
        full_layout, full, where = unshared(layout, inputs)
        whole = packed_attention(*full, full_layout, scale=0.3, impl=impl)[where]
        close(shared, whole, tolerance)
        if impl is Impl.NATIVE:
            assert torch.equal(shared, whole)  # a branch numbers its keys through, so even the rounding is the same
        grads = zip(torch.autograd.grad(shared, inputs, seed), torch.autograd.grad(whole, inputs, seed), strict=True)
        for a, b in grads:
            close(a, b, tolerance)


def test_native_rows_do_not_depend_on_what_is_packed_beside_them() -> None:
    """The same text alone, and between others of any length: the same bits, forward and backward."""
    alone = Layout((150,))
    inputs = draw(alone, (4, 2), (32, 32), torch.float32)
    seed = torch.randn(150, 4, 32)
    out = packed_attention(*inputs, alone, scale=0.3, impl=Impl.NATIVE)
    expected = [out, *torch.autograd.grad(out, inputs, seed)]
    for before, after in ((1, 0), (37, 400)):
        layout = Layout((before, 150, after))
        q, k, v = (torch.cat((torch.randn(before, *x.shape[1:]), x, torch.randn(after, *x.shape[1:]))) for x in inputs)
        mixed = packed_attention(q, k, v, layout, scale=0.3, impl=Impl.NATIVE)[before : before + 150]
        for a, b in zip([mixed, *torch.autograd.grad(mixed, inputs, seed)], expected, strict=True):
            assert torch.equal(a, b)


@impls
def test_one_thread_and_two_give_the_same_bits(impl: Impl) -> None:
    layout = Layout((60, 33, 7, 140, 18, 50), (-1, 0, 0, -1, 3, -1))
    inputs = draw(layout, (6, 3), (32, 32), torch.float32)
    torch.set_num_threads(1)
    one = run(inputs, layout, impl)
    torch.set_num_threads(2)
    two = run(inputs, layout, impl)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@impls
def test_inputs_of_any_memory_layout_are_made_right(impl: Impl) -> None:
    """A39: slices of one fused projection, and head-major tensors as other libraries keep them."""
    layout = LAYOUTS["branches"]
    T = layout.num_tokens
    qkv = torch.randn(T, 8, 16).requires_grad_()
    cuts = (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack((x, x), -1)[..., 0],
    ]
    seed = torch.randn(16, 4, T).permute(2, 1, 0)
    q, k, v = (x.contiguous() for x in cuts)
    plain = packed_attention(q, k, v, layout, scale=0.3, impl=impl)
    expected = [plain, *torch.autograd.grad(plain, qkv, seed.contiguous())]
    for kind in kinds:
        q, k, v = (kind(x) for x in cuts)
        out = packed_attention(q, k, v, layout, scale=0.3, impl=impl)
        for a, b in zip([out, *torch.autograd.grad(out, qkv, seed)], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@impls
def test_a_frozen_input_gets_no_gradient(impl: Impl) -> None:
    layout = LAYOUTS["ragged"]
    q, k, v = (x.detach() for x in draw(layout, (2, 1), (16, 16), torch.float32))
    q.requires_grad_()
    packed_attention(q, k, v, layout, scale=0.3, impl=impl).sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is None
    with torch.no_grad():
        assert not packed_attention(q, k, v, layout, scale=0.3, impl=impl).requires_grad


@impls
def test_large_scores_do_not_overflow(impl: Impl) -> None:
    layout = Layout((70, 400))
    q, k, v = (x.detach() for x in draw(layout, (2, 1), (16, 16), torch.float32))
    q, k = q * 300, k * 300
    out = packed_attention(q, k, v, layout, scale=1.0, impl=impl)
    assert out.isfinite().all()
    torch.testing.assert_close(
        out.double(), reference(q.double(), k.double(), v.double(), layout, 1.0), rtol=1e-3, atol=1e-3
    )


@impls
def test_wrong_shapes_are_named(impl: Impl) -> None:
    layout = Layout((3, 2))
    q, k, v = (torch.randn(5, n, 8) for n in (4, 2, 2))
    with pytest.raises(ValueError, match="the layout holds 5 tokens"):
        packed_attention(q[:4], k, v, layout, scale=1.0, impl=impl)
    with pytest.raises(ValueError, match="do not fit each other"):
        packed_attention(q[:, :3], k, v, layout, scale=1.0, impl=impl)
    with pytest.raises(ValueError, match="do not fit each other"):
        packed_attention(q[..., :4], k, v, layout, scale=1.0, impl=impl)
    with pytest.raises(ValueError, match="without a batch axis"):
        packed_attention(q[None], k[None], v[None], layout, scale=1.0, impl=impl)
