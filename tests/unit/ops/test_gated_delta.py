"""The chunked gated delta rule against its definition, token by token in float64: values, states and gradients."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strop.ops.chunks import SIZES, chunk_size, chunks_of
from strop.ops.gated_delta import gated_delta_rule, gated_delta_step, recurrent_gated_delta_rule
from strop.ops.gated_delta_chunked import GatedDelta
from strop.ops.select import Impl
from strop.types import Layout

LAYOUTS = {
    "one token": Layout((1,)),
    "three tokens": Layout((3,)),
    "around a chunk": Layout((15, 16, 17, 1, 31, 32, 33, 63, 64, 65)),
    "long": Layout((200,)),
    "empty": Layout((0,)),
    "empty among others": Layout((0, 5, 0, 70)),
    "a shared prefix": Layout((20, 3, 40, 16), (-1, 0, 0, 0)),
    "a prefix of whole chunks": Layout((64, 1, 64, 0), (-1, 0, 0, 0)),
    "several prefixes": Layout((70, 5, 0, 130, 64, 7, 9, 0, 3), (-1, 0, 0, 0, -1, 4, 4, -1, 7)),
}
NAMES = ("q", "k", "v", "decay", "beta", "start")


def inputs(
    layout: Layout, J: int = 2, G: int = 1, C: int = 5, CV: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """q, k, v, decay, beta and the states before each text."""
    generator = torch.Generator().manual_seed(seed)
    T, H = layout.num_tokens, J * G

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(T, J, C), dim=-1) for _ in range(2))
    decay, beta = -torch.nn.functional.softplus(normal(T, H) - 1.0), torch.sigmoid(normal(T, H))
    made = [q * C**-0.5, k, normal(T, H, CV), decay, beta, normal(len(layout.lengths), H, C, CV)]
    return [x.to(dtype) for x in made]


def chunked(given_: list[Tensor], layout: Layout, impl: Impl = Impl.TORCH) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta, start = given_
    out, ends = gated_delta_rule(q, k, v, decay, beta, layout, start_SHCC=start, ends=True, impl=impl)
    assert ends is not None
    return out, ends


def recurrent(given_: list[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta, start = given_
    return recurrent_gated_delta_rule(q, k, v, decay, beta, layout, start_SHCC=start)


def with_gradients(form, given_: list[Tensor], layout: Layout) -> tuple[Tensor, ...]:
    """Outputs, states, and gradients of all inputs for one fixed gradient of the outputs and the states."""
    leaves = [x.clone().requires_grad_() for x in given_]
    results = form(leaves, layout)
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    grads = torch.autograd.grad(results, leaves, seeds, allow_unused=True, materialize_grads=True)
    return (*(x.detach() for x in results), *grads)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_give_the_definition_and_its_gradients(name: str, group: int):
    layout = LAYOUTS[name]
    given_ = inputs(layout, G=group)
    for what, a, b in zip(
        ("out", "ends", *NAMES),
        with_gradients(chunked, given_, layout),
        with_gradients(recurrent, given_, layout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("name", ["around a chunk", "several prefixes", "long"])
def test_float32_stays_close(name: str):
    layout = LAYOUTS[name]
    given_ = inputs(layout, G=2, C=16, CV=8)
    single = with_gradients(chunked, [x.float() for x in given_], layout)
    for a, b in zip(single, with_gradients(recurrent, given_, layout), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("size", SIZES)
def test_every_size_of_chunk_gives_the_same(size: int):
    layout = LAYOUTS["several prefixes"]
    given_ = inputs(layout, G=2)
    chunks = chunks_of(layout, size, torch.device("cpu"))
    expected = with_gradients(recurrent, given_, layout)
    got = with_gradients(lambda x, _: GatedDelta.apply(*x, chunks, True, True, Impl.TORCH), given_, layout)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gradcheck():
    layout = Layout((17, 2, 1), (-1, 0, 0))
    leaves = [x.requires_grad_() for x in inputs(layout, J=1, G=2, C=2, CV=1)]
    assert torch.autograd.gradcheck(lambda *x: chunked(list(x), layout), leaves)


def test_a_pack_is_its_sequences_alone():
    """A47."""
    layout = LAYOUTS["around a chunk"]
    given_ = inputs(layout, G=2)
    out, ends = chunked(given_, layout)
    for s, (first, length) in enumerate(zip(layout.starts_S.tolist(), layout.lengths, strict=True)):
        alone = [x[first : first + length] for x in given_[:5]] + [given_[5][s : s + 1]]
        for a, b in zip(chunked(alone, Layout((length,))), (out[first : first + length], ends[s : s + 1]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_shared_prefix_is_a_repeated_one_and_its_gradient_their_sum():
    prefix, branches = 37, (5, 1, 40)
    shared = Layout((prefix, *branches), (-1, 0, 0, 0))
    given_ = inputs(shared, G=2)
    starts = shared.starts_S.tolist()[1:]
    rows = [[*range(prefix), *range(first, first + n)] for first, n in zip(starts, branches, strict=True)]
    index = torch.tensor([t for part in rows for t in part])
    apart = Layout(tuple(prefix + n for n in branches))

    def repeated(x: list[Tensor], _: Layout) -> tuple[Tensor, Tensor]:
        out, ends = chunked([*(each[index] for each in x[:5]), x[5][[0, 0, 0]]], apart)
        kept = [torch.arange(prefix), *(torch.arange(n) + prefix for n in branches)]
        offsets = [0, *(int(a) for a in apart.starts_S)]
        own = torch.cat([part + offset for part, offset in zip(kept, offsets, strict=True)])
        return out[own], ends

    def once(x: list[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        out, ends = chunked(x, layout)
        return out, ends[1:]

    for a, b in zip(with_gradients(once, given_, shared), with_gradients(repeated, given_, shared), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_neighbours_poison_does_not_leak():
    """A47: NaN in one sequence and its state, other numbers in a branch that counts for nothing: the rest keeps every
    bit, gradients too."""
    layout = Layout((20, 33, 5, 18), (-1, -1, 1, 1))
    given_ = [x.float() for x in inputs(layout)]
    poisoned = [x.clone() for x in given_]
    for x, other in zip(poisoned[:5], inputs(layout, seed=1), strict=False):
        x[:20] = torch.nan
        x[53:58] = other[53:58].float()  # one branch of the prefix
    poisoned[5][0] = torch.nan
    results: list[list[Tensor]] = []
    for each in (given_, poisoned):
        leaves = [x.clone().requires_grad_() for x in each]
        out, ends = chunked(leaves, layout)
        kept = torch.ones(len(out), dtype=torch.bool)
        kept[:20] = kept[53:58] = False
        grads = torch.autograd.grad((out[kept].sum(), ends[[1, 3]].sum()), leaves)
        results.append([out[kept], ends[[1, 3]], *(g[kept] for g in grads[:5]), grads[5][1]])
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
        assert clean.abs().max() > 0


def test_a_text_may_be_cut_anywhere_and_go_on_from_its_state():
    whole = Layout((50,))
    given_ = inputs(whole, G=2)
    expected = with_gradients(recurrent, given_, whole)
    for cut in (1, 15, 16, 33, 49):

        def twice(x: list[Tensor], _: Layout, cut: int = cut) -> tuple[Tensor, Tensor]:
            first, state = chunked([*(each[:cut] for each in x[:5]), x[5]], Layout((cut,)))
            second, state = chunked([*(each[cut:] for each in x[:5]), state], Layout((50 - cut,)))
            return torch.cat((first, second)), state

        for a, b in zip(with_gradients(twice, given_, whole), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_step_is_the_rule_for_one_token_and_moves_the_state():
    layout = Layout((1,) * 6)
    given_ = inputs(layout, G=3)
    out, ends = recurrent(given_, layout)
    q, k, v, decay, beta, start = given_
    state = start.clone()
    torch.testing.assert_close(gated_delta_step(q, k, v, decay, beta, state), out, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, ends, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["forgets at once", "never forgets", "one key, full strength", "no strength"])
def test_extreme_inputs_stay_finite_and_right(kind: str):
    layout = Layout((150,))
    q, k, v, decay, beta, start = inputs(layout)
    if kind == "forgets at once":
        decay = torch.full_like(decay, -80.0)
    elif kind == "never forgets":
        decay = torch.zeros_like(decay)
    elif kind == "one key, full strength":
        k, beta, decay = k[:1].expand_as(k), torch.ones_like(beta), torch.zeros_like(decay)
    else:
        beta = torch.zeros_like(beta)
    given_ = [q, k, v, decay, beta, start]
    for a, b in zip(with_gradients(chunked, given_, layout), with_gradients(recurrent, given_, layout), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_bfloat16_is_computed_in_float32():
    layout = Layout((40, 9))
    given_ = [x.bfloat16() for x in inputs(layout)]
    out, ends = chunked(given_, layout)
    expected, states = recurrent([x.double() for x in given_], layout)
    assert out.dtype == ends.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ends.double(), states, rtol=0, atol=1e-5)


def test_a_layout_met_in_inference_can_be_trained():
    layout = Layout((19, 4), (-1, 0))
    given_ = inputs(layout)
    with torch.inference_mode():
        chunked(given_, layout)
    assert all(g.isfinite().all() for g in with_gradients(chunked, given_, layout))


def test_shapes_that_do_not_fit_are_refused():
    layout = Layout((4, 3))
    q, k, v, decay, beta, start = inputs(layout, G=2)
    for wrong in (
        [q[:-1], k, v, decay, beta, start],
        [q, k[..., :-1], v, decay, beta, start],
        [q, k, v[:, :3], decay, beta, start],
        [q, k, v, decay[:, :2], beta, start],
        [q, k, v, decay, beta, start[:1]],
    ):
        with pytest.raises(ValueError, match=r"fit|holds 7 tokens|are needed"):
            chunked(wrong, layout)


layouts = st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=8)


@given(layouts, st.sampled_from(SIZES))
def test_every_token_has_one_place_and_every_chunk_follows_the_level_before(parts: list[tuple[int, bool]], size: int):
    parents: list[int] = []
    for s, (_, branch) in enumerate(parts):
        roots = [r for r in range(s) if parents[r] == -1]
        parents.append(roots[-1] if branch and roots else -1)
    layout = Layout(tuple(n for n, _ in parts), tuple(parents))
    chunks = chunks_of(layout, size, torch.device("cpu"))
    rows, T = chunks.rows.numpy(), layout.num_tokens
    assert sorted(chunks.slots.tolist()) == sorted(set(range(len(rows))) - set(chunks.padding.tolist()))
    assert rows[chunks.slots.numpy()].tolist() == list(range(T))
    level_of = np.zeros(chunks.num_chunks, np.int64)
    for number, level in enumerate(chunks.levels):
        level_of[level.first : level.end] = number
    assert [level.end for level in chunks.levels[:-1]] == [level.first for level in chunks.levels[1:]]
    for n, before in enumerate(chunks.previous_N.tolist()):
        assert level_of[n] == (0 if before < 0 else level_of[before] + 1)
    ended = [s for level in chunks.levels if level.ends is not None for s in level.ends[1].tolist()]
    assert sorted([*ended, *chunks.unread[0].tolist()]) == list(range(len(layout.lengths)))


def test_short_sequences_take_short_chunks():
    assert chunk_size(Layout((4096,)), 128, 128) == 64
    assert chunk_size(Layout((85,) * 12), 128, 128) == 32
    assert chunk_size(Layout((9,) * 20), 128, 128) == 16


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize(("group", "value_channels"), [(1, 70), (2, 5)])
def test_triton_gives_the_definition_and_its_gradients(group: int, value_channels: int):
    """On a GPU, or in the interpreter: channels that fill no block, and more of them than one program takes; lengths
    around a chunk's, an empty sequence, prefixes of whole chunks and of none."""
    layout = Layout((17, 1, 16, 0, 3, 0, 2), (-1, 0, -1, -1, 2, 2, 3))
    given_ = inputs(layout, J=1, G=group, C=9, CV=value_channels)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    single = [x.float().to(device) for x in given_]
    got = with_gradients(lambda x, layout: chunked(x, layout, Impl.TRITON), single, layout)
    for what, a, b in zip(("out", "ends", *NAMES), got, with_gradients(recurrent, given_, layout), strict=True):
        assert float((a.cpu() - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max())), what


@needs_triton
def test_triton_refuses_float64():
    with pytest.raises(ValueError, match="float32"):
        chunked(inputs(Layout((3,))), Layout((3,)), Impl.TRITON)
