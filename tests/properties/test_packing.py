"""Packing loses nothing and invents nothing, whatever the lengths, the limits, the ranks and the sharing."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from strop.algos.losses import PolicyInputs
from strop.config.recipe import TooLong
from strop.data.packing import Batch, Example, pack_examples, train_only, with_inputs
from strop.data.pairs import Fit, Preference, pack_pairs
from strop.errors import DataError
from strop.types import Completion, Group, Layout, Segment, Stop, Trajectory
from tests.unit.data.groups import attempt, pack, segment, spare, texts, trained

WEIGHTINGS = ("token_mean", "token_sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_horizon")
TOKENS = st.lists(st.integers(0, 3), max_size=6)


@st.composite
def segments(draw: st.DrawFn, opening: list[int]) -> Segment:
    """An opening, then stretches that are sampled or observed in any order; either may be empty."""
    made = Segment()
    made.observe(np.array(opening, np.int32))
    for tokens, sampled in draw(st.lists(st.tuples(TOKENS, st.booleans()), max_size=3)):
        if not sampled:
            made.observe(np.array(tokens, np.int32))
            continue
        logprobs = -np.array(draw(st.lists(st.integers(1, 9), min_size=len(tokens), max_size=len(tokens))), np.float32)
        made.act(
            Completion(
                tokens=np.array(tokens, np.int32),
                logprobs=logprobs,
                sampling_logprobs=logprobs,
                versions=np.zeros(len(tokens), np.int32),
                stop=Stop.TOKEN,
            )
        )
    return made


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Group], np.ndarray]:
    """Groups of one size whose attempts mostly open alike, and their advantages, some of them missing."""
    size = draw(st.integers(1, 4))
    groups: list[Group] = []
    for p in range(draw(st.integers(0, 5))):
        prompt = draw(TOKENS)
        trajectories: list[Trajectory] = []
        for _ in range(size):
            opening = prompt if draw(st.integers(0, 4)) else draw(TOKENS)
            later = [draw(segments(draw(TOKENS))) for _ in range(draw(st.integers(0, 1)))]
            trajectories.append(Trajectory(segments=[draw(segments(opening)), *later]))
        groups.append(Group(f"t{p}", trajectories))
    values = st.sampled_from([-1.5, -1.0, 0.0, 0.5, 2.0, float("nan")])
    advantages = draw(st.lists(values, min_size=len(groups) * size, max_size=len(groups) * size))
    return groups, np.array(advantages, np.float64).reshape(len(groups), size)


def expected_texts(groups: list[Group], advantages_PG: np.ndarray) -> Counter[tuple[int, ...]]:
    kept = [t for p, group in enumerate(groups) for g, t in enumerate(group) if not np.isnan(advantages_PG[p, g])]
    return Counter(tuple(s.tokens.tolist()) for t in kept for s in t.segments if s.sampled[1:].any())


def predictions(batches: list[Batch[PolicyInputs]]) -> set[tuple[tuple[int, ...], int]]:
    """(text up to a row, its target) for every row: sharing writes each of them once, and no other."""
    found: set[tuple[tuple[int, ...], int]] = set()
    for batch in batches:
        whole, positions, targets = texts(batch), batch.layout.positions_T.tolist(), batch.targets_T.tolist()
        for t, s in enumerate(batch.layout.sequence_T.tolist()):
            found.add((whole[s][: positions[t] + 1], targets[t]))
    return found


@given(steps(), st.integers(0, 40), st.integers(1, 4), st.sampled_from(WEIGHTINGS))
def test_every_token_once_and_every_trained_row_alike(
    step: tuple[list[Group], np.ndarray], room: int, data_parallel: int, weighting: str
) -> None:
    """A01, A04-A06, G02-G04, G13: sharing and splitting change the layout and nothing else."""
    groups, advantages_PG = step
    longest = max((len(s) for group in groups for t in group for s in t.segments), default=1)
    max_tokens = max(longest, 1) + room
    plain, shared = (
        pack(
            groups,
            advantages_PG.tolist(),
            max_tokens=max_tokens,
            weighting=weighting,
            horizon=7,
            share_prefixes=share,
            data_parallel=data_parallel,
        )
        for share in (False, True)
    )
    expected = expected_texts(groups, advantages_PG)
    for packed in (plain, shared):
        assert packed.dropped == 0
        assert len(packed.batches) % data_parallel == 0
        for batch in packed.batches:
            assert 0 < len(batch) <= max_tokens
            assert len(batch.tokens_T) == len(batch.targets_T) == len(batch.mask_T) == len(batch)
            last = (batch.layout.starts_S + batch.layout.lengths_S - 1).tolist()
            prefixes = set(batch.layout.parents)
            ends = [t for s, t in enumerate(last) if s not in prefixes]
            assert [t for t, target in enumerate(batch.targets_T.tolist()) if target == -1] == ends
            assert not batch.weights_T[~batch.mask_T].any()
            assert batch.weights_T.isfinite().all() and batch.inputs.advantages_T.isfinite().all()

    real = [batch for batch in plain.batches if not spare(batch)]
    assert all(set(batch.layout.parents) == {-1} for batch in real)
    assert Counter(text for batch in real for text in texts(batch)) == expected
    branches: Counter[tuple[int, ...]] = Counter()
    for batch in shared.batches:
        prefixes = set(batch.layout.parents)
        branches.update(text for s, text in enumerate(texts(batch)) if s not in prefixes and not spare(batch))
    assert branches == expected
    assert trained(plain.batches) == trained(shared.batches)
    assert predictions(real) == predictions([batch for batch in shared.batches if not spare(batch)])

    rows = trained(plain.batches)
    kept = [t for p, group in enumerate(groups) for g, t in enumerate(group) if not np.isnan(advantages_PG[p, g])]
    assert len(rows) == sum(int(s.sampled[1:].sum()) for t in kept for s in t.segments)
    if weighting in ("token_mean", "sequence_mean_token_mean") and rows:
        assert sum(row.weight for row in rows) == pytest.approx(1.0)
    if weighting == "token_sum":
        assert all(row.weight == 1.0 for row in rows)
    tokens = sum(len(batch) for batch in shared.batches if not spare(batch))
    assert tokens <= sum(len(batch) for batch in real)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=24),
    st.integers(18, 40),
    st.integers(1, 6),
    st.booleans(),
)
@example([(4, 1, 1), (5, 3, 1), (3, 1, 1), (4, 2, 3)], 18, 3, False)
def test_what_belongs_together_is_in_one_batch_and_spare_ones_are_in_the_last_round(
    lengths: list[tuple[int, int, int]], max_tokens: int, data_parallel: int, share_prefixes: bool
) -> None:
    """Pairs, since a text of one that is alone in its batch would be compared with nothing. Ranks with nothing left may
    be any of the last round, whose batches go to whom has least so far."""
    pairs = [
        Preference(task_id=f"t{p}", chosen=own(p, prompt, chosen), rejected=own(p, prompt, rejected), margin=0.0)
        for p, (prompt, chosen, rejected) in enumerate(lengths)
    ]
    fit = Fit(max_tokens=max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel, too_long=TooLong.ERROR)
    batches = pack_pairs(pairs, fit).batches
    assert len(batches) % data_parallel == 0 and all(0 < len(batch) <= max_tokens for batch in batches)
    seen: list[int] = []
    for batch in batches:
        at_row, trained = batch.tokens_T.tolist(), batch.mask_T
        for p in set(batch.inputs.pair_T[trained].tolist()):
            rows = trained & (batch.inputs.pair_T == p)
            (pair,) = {at_row[t] for t in rows.nonzero().flatten().tolist()}
            assert [int((rows & (batch.inputs.chosen_T == side)).sum()) for side in (True, False)] == list(
                lengths[pair][1:]
            )
            seen.append(pair)
    assert sorted(seen) == list(range(len(lengths)))
    empty = [b for b, batch in enumerate(batches) if not batch.mask_T.any()]
    assert all(batches[b].layout == Layout((1,), (-1,)) for b in empty)
    assert all(b >= len(batches) - data_parallel for b in empty) or len(lengths) < len(batches)


def own(p: int, prompt: int, reply: int) -> Example:
    """A text of pair p, all of whose tokens are p."""
    return Example(np.full(prompt + reply, p, np.int32), np.arange(prompt + reply) >= prompt, f"t{p}")


@given(
    st.lists(st.tuples(TOKENS, st.integers(0, 63)), max_size=12),
    st.integers(6, 20),
    st.integers(1, 4),
    st.sampled_from(["token_mean", "sequence_mean_token_mean"]),
)
def test_examples_keep_every_token_and_weigh_one(
    drawn: list[tuple[list[int], int]], max_tokens: int, data_parallel: int, weighting: str
) -> None:
    masks = [[bool(bits >> i & 1) for i in range(len(tokens))] for tokens, bits in drawn]
    assume(any(any(mask[1:]) for mask in masks))
    examples = [
        Example(np.array(tokens, np.int32), np.array(mask, np.bool_), f"t{i}")
        for i, ((tokens, _), mask) in enumerate(zip(drawn, masks, strict=True))
    ]
    packed = pack_examples(examples, max_tokens=max_tokens, data_parallel=data_parallel, weighting=weighting)
    found = Counter(text for batch in packed.batches if not spare(batch) for text in texts(batch))
    assert found == Counter(tuple(t) for (t, _), mask in zip(drawn, masks, strict=True) if any(mask[1:]))
    assert sum(float(batch.weights_T.double().sum()) for batch in packed.batches) == pytest.approx(1.0)
    assert sum(int(batch.mask_T.sum()) for batch in packed.batches) == sum(sum(mask[1:]) for mask in masks)


def test_what_was_dropped_is_counted_when_nothing_is_left() -> None:
    long = [Group("t", [attempt([1, 2, 3], [4]), attempt([5, 6, 7], [8])])]
    packed = pack(long, max_tokens=3, too_long=TooLong.DROP)
    assert (packed.batches, packed.dropped) == ([], 2)
    made = [Example(np.arange(4, dtype=np.int32), np.ones(4, np.bool_), f"t{i}") for i in range(3)]
    examples = pack_examples(made, max_tokens=3, data_parallel=1, too_long=TooLong.DROP)
    assert (examples.batches, examples.dropped) == ([], 3)


def test_temperatures_are_float32() -> None:
    batch = pack([Group("t", [attempt([1], [2])])], temperature=0.7).batches[0]
    assert batch.temperature_T is not None
    assert batch.temperature_T.dtype == torch.float32
    assert batch.temperature_T.tolist() == pytest.approx([0.7, 0.7])


def test_first_segments_keep_the_order_of_the_attempts_and_later_ones_follow() -> None:
    """Sixty-four attempts, each with a second segment."""
    trajectories = [Trajectory(segments=[segment([1], [n]), segment([2], [n])]) for n in range(64)]
    batches = pack([Group("t", trajectories)], max_tokens=1000).batches
    assert [texts(batch) for batch in batches] == [[(first, n) for first in (1, 2) for n in range(64)]]


def test_errors_end_with_what_to_do() -> None:
    group = Group("t", [attempt([1, 2, 3], [4])])
    with pytest.raises(
        DataError, match=r"or set tasks\.too_long to drop, which leaves such attempts out and counts them$"
    ):
        pack([group], max_tokens=3)
    with pytest.raises(ValueError, match=r"they must be \[groups, attempts\], one for each attempt$"):
        pack([group, Group("u", [attempt([1], [2]), attempt([1], [2])])], [[1.0], [1.0]])


def test_constants_are_exchanged_one_by_one_and_the_others_stay() -> None:
    groups = [Group("t", [attempt([1, 2], [3]), attempt([1, 2], [4, 5])]), Group("u", [attempt([6], [7])] * 2)]
    batches = pack(groups, max_tokens=4).batches
    assert len(batches) > 1
    given = {
        name: [torch.full((len(batch),), 10.0 * column + b) for b, batch in enumerate(batches)]
        for column, name in enumerate(
            ("advantages", "reference_logprobs", "proximal_logprobs", "correction", "selected")
        )
    }
    full = [
        replace(batch, inputs=replace(batch.inputs, expert_fractions_LE=torch.ones(1, 2)))
        for batch in with_inputs(batches, **given)
    ]
    for name, columns in given.items():
        moved = with_inputs(full, **{name: [column + 1.0 for column in columns]})
        for b, (before, after) in enumerate(zip(full, moved, strict=True)):
            for field in fields(PolicyInputs):
                was, now = (getattr(batch.inputs, field.name) for batch in (before, after))
                assert torch.equal(now, was + 1.0 if field.name == f"{name}_T" else was), field.name
            assert torch.equal(getattr(before.inputs, f"{name}_T"), columns[b])
        with pytest.raises(ValueError, match="do not belong to batches"):
            with_inputs(batches, **{name: columns[:1]})


def test_training_some_tokens_keeps_the_horizon_and_what_was_dropped() -> None:
    groups = [Group("t", [attempt([1], [2, 3, 4]), attempt([1], [5]), attempt([1, 1, 1, 1], [6])])]
    packed = pack(groups, max_tokens=4, weighting="constant_horizon", horizon=5, too_long=TooLong.DROP)
    keep_M = np.array([True, False, True, False])
    kept = train_only(packed, keep_M, weighting="constant_horizon", horizon=5)
    assert (packed.dropped, kept.dropped) == (1, 1)
    assert [row.weight for row in trained(kept.batches)] == pytest.approx([1 / 5] * 2)  # of the one that is still live
    assert kept.trained.counts_N.sum() == 2
