"""Packing: shifted targets, masks, weights over the whole step, shared prompts, limits, and what ranks receive."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from strop.config.recipe import TooLong
from strop.data.packing import Example, pack_examples, pack_policy, unrouted, with_inputs
from strop.errors import DataError
from strop.types import Completion, Group, Layout, Routes, Segment, Stop, Trajectory
from tests.unit.data.groups import (
    attempt,
    losses_as_logprobs,
    pack,
    segment,
    spare,
    texts,
    trained,
    weighted_sum,
)

NAN = float("nan")


def example(tokens: list[int], mask: list[int], task_id: str = "t") -> Example:
    return Example(np.asarray(tokens, np.int32), np.asarray(mask, np.bool_), task_id)


def test_targets_are_shifted_once_and_the_first_answer_token_is_trained() -> None:
    """A37: three prompt and two answer tokens make two trained targets."""
    packed = pack([Group("t", [attempt([1, 2, 3], [4, 5], [-0.5, -0.25])])], [[2.0]])
    (batch,) = packed.batches
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.targets_T.tolist() == [2, 3, 4, 5, -1]
    assert batch.mask_T.tolist() == [False, False, True, True, False]
    assert batch.weights_T.tolist() == [0.0, 0.0, 0.5, 0.5, 0.0]
    assert batch.inputs.behavior_logprobs_T.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0]
    assert batch.inputs.advantages_T.tolist() == [0.0, 0.0, 2.0, 2.0, 0.0]
    assert batch.tokens_T.dtype == batch.targets_T.dtype == torch.int64
    assert batch.weights_T.dtype == batch.inputs.behavior_logprobs_T.dtype == torch.float32
    assert batch.temperature_T is None and batch.inputs.reference_logprobs_T is None


def test_nothing_of_one_sequence_reaches_its_neighbour() -> None:
    """The second's first token is sampled: it is nobody's target, and its logprob stays out of the first's last row."""
    packed = pack([Group("t", [attempt([1], [2], [-3.0])]), Group("u", [attempt([], [5, 6], [-9.0, -4.0])])])
    (batch,) = packed.batches
    assert batch.layout == Layout((2, 2))
    assert batch.targets_T.tolist() == [2, -1, 6, -1]
    assert batch.inputs.behavior_logprobs_T.tolist() == [-3.0, 0.0, -4.0, 0.0]


@pytest.mark.parametrize("max_tokens", [4, 5, 6, 64])
@pytest.mark.parametrize("data_parallel", [1, 2, 3])
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_token_mean_is_the_same_for_every_split(max_tokens: int, data_parallel: int, share_prefixes: bool) -> None:
    """A01: losses [4] and [1, 1, 1] make 1.75, never a sum or a mean of means."""
    groups = losses_as_logprobs([4.0], [1.0, 1.0, 1.0])
    packed = pack(groups, max_tokens=max_tokens, data_parallel=data_parallel, share_prefixes=share_prefixes)
    assert weighted_sum(packed) == pytest.approx(1.75)


def test_a_mean_divides_by_its_count_and_nothing_makes_nothing() -> None:
    """A03: 8 over 4 tokens is 2; over no tokens there is no batch, and no NaN."""
    assert weighted_sum(pack(losses_as_logprobs([2.0] * 4))) == pytest.approx(2.0)
    assert pack(losses_as_logprobs([])).batches == []


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("sequence_mean_token_sum", 4.0), ("sequence_mean_token_mean", 1.5), ("token_mean", 8 / 6), ("token_sum", 8.0)],
)
def test_a_weighting_is_what_its_name_says(weighting: str, expected: float) -> None:
    """A04: rows [1, 1, 1, 1] and [2, 2]."""
    packed = pack(losses_as_logprobs([1.0] * 4, [2.0, 2.0]), weighting=weighting)
    assert weighted_sum(packed) == pytest.approx(expected)


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
def test_a_constant_horizon_ignores_the_ranks(data_parallel: int) -> None:
    """A05: 4.0 / horizon 4 is 1.0 however many ranks share it."""
    groups = losses_as_logprobs([1.0] * 4, [2.0, 2.0])
    packed = pack(groups, weighting="constant_horizon", horizon=4, data_parallel=data_parallel)
    assert weighted_sum(packed) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="horizon"):
        pack(groups, weighting="constant_horizon")


@pytest.mark.parametrize(("weighting", "expected"), [("token_mean", 2.0), ("sequence_mean_token_sum", 4.0)])
def test_an_attempt_without_trained_tokens_counts_for_nothing(weighting: str, expected: float) -> None:
    """A06, G10: an empty reply is no row, in the sum and in the count alike."""
    packed = pack(losses_as_logprobs([2.0, 2.0], []), weighting=weighting)
    assert weighted_sum(packed) == pytest.approx(expected)
    assert len(packed.batches) == 1 and texts(packed.batches[0]) == [(7, 10, 11)]


def test_counts_are_taken_after_attempts_were_left_out() -> None:
    """A07: of lengths 4 (failed) and 2 with losses of 1, the mean is 1; with both failed there is nothing."""
    groups = losses_as_logprobs([1.0] * 4, [1.0, 1.0])
    assert weighted_sum(pack(groups, [[NAN, 1.0]])) == pytest.approx(1.0)
    assert pack(groups, [[NAN, NAN]]).batches == []


@pytest.mark.parametrize("max_tokens", [3, 6, 12, 24])
def test_weights_span_the_optimizer_step(max_tokens: int) -> None:
    """A08: eight equal micro-batches of loss 1, or four, or one, accumulate to 1."""
    packed = pack(losses_as_logprobs(*[[1.0, 1.0]] * 8), max_tokens=max_tokens)
    assert len(packed.batches) == 24 // max_tokens
    assert weighted_sum(packed) == pytest.approx(1.0)


def test_an_advantage_belongs_to_its_attempt() -> None:
    """A15: [1, -1] over two attempts of two tokens, where a broadcast along tokens would fit as well."""
    packed = pack(losses_as_logprobs([-1.0, -1.0], [-1.0, -1.0]), [[1.0, -1.0]])
    assert len(packed.batches) == 1
    assert packed.batches[0].inputs.advantages_T.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("advantages_PG", [[[1.0, 2.0, 3.0]], [[1.0], [2.0]], [[[1.0], [2.0]]]])
def test_advantages_must_be_those_of_the_groups(advantages_PG: list[list[float]]) -> None:
    """A15: a shape that does not fit is refused, not broadcast."""
    with pytest.raises(ValueError, match=r"\[groups, attempts\]"):
        pack_policy(
            losses_as_logprobs([1.0], [1.0]),
            np.asarray(advantages_PG),
            max_tokens=8,
            weighting="token_mean",
            horizon=None,
            temperature=1.0,
            share_prefixes=True,
            data_parallel=1,
        )


def test_groups_of_unequal_size_are_refused() -> None:
    groups = [*losses_as_logprobs([1.0], [1.0]), *losses_as_logprobs([1.0])]
    with pytest.raises(ValueError, match=r"\[2, 1\] attempts"):
        pack(groups, [[1.0, 1.0], [1.0, 1.0]])


def test_boundaries_come_from_lengths() -> None:
    """A45, A46, G07: a branch starts at position 3, and is a sequence of its own; the longest is 5, not 12."""
    layout = Layout((3, 2, 2, 5), (-1, 0, -1, -1))
    assert layout.starts_S.tolist() == [0, 3, 5, 7]
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert layout.lengths_S.max() == 5


def test_the_same_text_has_the_same_positions_wherever_it_is_packed() -> None:
    """A46: five tokens alone, behind others, and split into prefix and branch stand at positions 0 to 4."""
    text = attempt([1, 2, 3], [4, 5])
    alone = pack([Group("t", [text])]).batches[0]
    behind = pack([Group("s", [attempt([8, 8], [9])]), Group("t", [text])]).batches[0]
    branch = pack([Group("t", [text, attempt([1, 2, 3], [6])])], share_prefixes=True).batches[0]
    assert alone.layout.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert behind.layout.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert branch.layout.positions_T.tolist() == [0, 1, 2, 3, 4, 2, 3]


def test_a_prompt_is_shared_up_to_its_last_token() -> None:
    group = Group("t", [attempt([1, 2, 3], [4, 5]), attempt([1, 2, 3], [6])])
    (batch,) = pack([group], [[1.0, -1.0]], share_prefixes=True).batches
    assert batch.layout == Layout((2, 3, 2), (-1, 0, 0))
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 3, 6]
    assert batch.targets_T.tolist() == [2, 3, 4, 5, -1, 6, -1]
    assert batch.mask_T.tolist() == [False, False, True, True, False, True, False]
    assert batch.inputs.advantages_T.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("attempts", "parents"),
    [
        ([attempt([1], [4, 5]), attempt([1], [6])], (-1, -1)),  # a prompt of one token opens every branch
        ([attempt([1, 2], [4])], (-1,)),  # an attempt alone
        ([attempt([1, 2], [4]), attempt([1, 2], [])], (-1,)),  # alone among attempts that train something
        ([attempt([1, 2], [4]), attempt([3, 2], [4])], (-1, -1)),  # nothing in common
        ([attempt([1, 2], [4]), attempt([], [1, 2, 4])], (-1, -1)),  # the same tokens, but sampled in one
        ([attempt([1, 2, 8], [4]), attempt([1, 2, 9], [4])], (-1, 0, 0)),  # in common up to the 2
    ],
)
def test_what_is_shared(attempts: list[Trajectory], parents: tuple[int, ...]) -> None:
    (batch,) = pack([Group("t", attempts)], share_prefixes=True).batches
    assert batch.layout.parents == parents
    whole = texts(pack([Group("t", attempts)]).batches[0])
    assert [text for s, text in enumerate(texts(batch)) if s not in parents] == whole


def test_failed_attempts_do_not_hinder_sharing() -> None:
    group = Group("t", [attempt([9], [4]), attempt([1, 2, 3], [5]), attempt([1, 2, 3], [6])])
    (batch,) = pack([group], [[NAN, 1.0, 2.0]], share_prefixes=True).batches
    assert batch.layout == Layout((2, 2, 2), (-1, 0, 0))


def test_groups_with_one_text_stay_apart() -> None:
    """G13: two tasks with equal prompts have their own prefixes, advantages and counts."""
    groups = [Group(name, [attempt([1, 2, 3], [5]), attempt([1, 2, 3], [6])]) for name in ("a:0", "b:0")]
    packed = pack(groups, [[0.5, -0.5], [5.0, -5.0]], share_prefixes=True)
    (batch,) = packed.batches
    assert batch.layout == Layout((2, 2, 2, 2, 2, 2), (-1, 0, 0, -1, 3, 3))
    assert [a for a in batch.inputs.advantages_T.tolist() if a] == [0.5, -0.5, 5.0, -5.0]


def test_a_group_too_large_for_one_batch_takes_several_copies_of_its_prefix() -> None:
    group = Group("t", [attempt([1, 2, 3, 4], [10 + g, 20 + g]) for g in range(5)])
    packed = pack([group], max_tokens=10, share_prefixes=True)
    assert sorted(batch.layout.lengths for batch in packed.batches) == [(3, 3), (3, 3, 3), (3, 3, 3)]
    assert all(batch.layout.parents == (-1, *[0] * (len(batch.layout.lengths) - 1)) for batch in packed.batches)
    assert len(trained(packed.batches)) == 10


def test_one_group_keeps_every_rank_busy() -> None:
    """A prefix is copied rather than leaving ranks with nothing to do."""
    packed = pack([Group("t", [attempt([1, 2, 3], [10 + g]) for g in range(8)])], share_prefixes=True, data_parallel=4)
    assert [batch.layout.lengths for batch in packed.batches] == [(2, 2, 2)] * 4


def test_segments_are_sequences_and_weights_are_the_trajectory_s() -> None:
    """Two segments of one attempt count as one sequence; only the first may share a prefix."""
    both = Trajectory(segments=[segment([1, 2], [3], [4.0]), segment([1, 2], [5, 6], [1.0, 1.0])])
    groups = [Group("t", [both, attempt([1, 2], [7], [2.0])])]
    packed = pack(groups, [[3.0, -1.0]], weighting="sequence_mean_token_mean", share_prefixes=True)
    (batch,) = packed.batches
    assert batch.layout == Layout((1, 2, 2, 4), (-1, 0, 0, -1))
    assert texts(batch) == [(1,), (1, 2, 3), (1, 2, 7), (1, 2, 5, 6)]
    assert weighted_sum(packed) == pytest.approx((6 / 3 + 2 / 1) / 2)
    assert [a for a in batch.inputs.advantages_T.tolist() if a] == [3.0, -1.0, 3.0, 3.0]


def test_a_segment_that_trains_nothing_is_left_out() -> None:
    both = Trajectory(segments=[segment([1, 2], [3]), segment([1, 2, 9], [])])
    assert texts(pack([Group("t", [both])]).batches[0]) == [(1, 2, 3)]


def test_what_does_not_fit_is_named_and_never_cut() -> None:
    """G14: lengths are checked before anything is packed; 5 tokens do not fit 4."""
    groups = [Group("a:0", [attempt([1, 2], [3])]), Group("b:7", [attempt([1, 2, 3], [4, 5])])]
    with pytest.raises(DataError, match=r"task b:7: a sequence of 5 tokens does not fit a batch of 4.*pack_tokens"):
        pack(groups, max_tokens=4)
    assert len(trained(pack(groups, max_tokens=5).batches)) == 3


def test_the_longest_of_several_is_named() -> None:
    groups = [Group("a:0", [attempt([1, 2], [3]), attempt([1, 2], [3, 4])])]
    with pytest.raises(DataError, match="4 tokens, the longest of 2 such,"):
        pack(groups, max_tokens=2)


def test_too_long_attempts_are_dropped_whole_and_counted() -> None:
    long = Trajectory(segments=[segment([1], [2]), segment([1, 2, 3], [4, 5])])
    packed = pack([Group("t", [long, attempt([8], [9])])], max_tokens=4, too_long=TooLong.DROP)
    assert packed.dropped == 1
    assert [texts(batch) for batch in packed.batches] == [[(8, 9)]]
    assert float(packed.batches[0].weights_T.sum()) == 1.0


def test_a_failed_attempt_is_not_too_long() -> None:
    assert pack([Group("t", [attempt([1, 2, 3], [4]), attempt([1], [2])])], [[NAN, 1.0]], max_tokens=2).dropped == 0


@pytest.mark.parametrize(("sequences", "spares"), [(7, 1), (8, 0), (1, 3), (0, 0)])
def test_spare_batches_only_where_ranks_would_be_uneven(sequences: int, spares: int) -> None:
    """G02, G03: 7 of 8 batches are real, 8 of 8; one sequence still reaches its rank; none makes none."""
    groups = [Group(f"t{i}", [attempt([1, 2], [3])]) for i in range(sequences)]
    packed = pack(groups, max_tokens=3, data_parallel=4)
    assert len(packed.batches) == sequences + spares
    assert [spare(batch) for batch in packed.batches] == [False] * sequences + [True] * spares


def test_no_sequence_is_lost_to_an_uneven_number() -> None:
    """G03: ten sequences over four ranks are ten sequences."""
    groups = [Group(f"t{i}", [attempt([1, i], [3])]) for i in range(10)]
    packed = pack(groups, max_tokens=9, data_parallel=4)
    assert len(packed.batches) == 4
    assert sorted(text for batch in packed.batches for text in texts(batch)) == sorted((1, i, 3) for i in range(10))


def test_every_rank_runs_as_many_batches() -> None:
    """G04: lengths 8 and 5, 5, 5 under a cap of 10 are two batches for each of two ranks."""
    groups = [Group(f"t{n}{i}", [attempt([1], range(1, n))]) for i, n in enumerate((8, 5, 5, 5))]
    packed = pack(groups, max_tokens=10, data_parallel=2)
    assert len(packed.batches) == 4
    assert [len(packed.batches[r::2]) for r in range(2)] == [2, 2]


def test_a_spare_batch_has_every_field_and_trains_nothing() -> None:
    """G04, H12."""
    packed = pack([Group("t", [attempt([1, 2], [3])])], temperature=0.5, data_parallel=2)
    real, extra = with_inputs(packed.batches, reference_logprobs=[torch.zeros(len(b)) for b in packed.batches])
    assert spare(extra) and not spare(real)
    for batch in (real, extra):
        assert batch.temperature_T is not None and batch.temperature_T.tolist() == [0.5] * len(batch)
        assert batch.inputs.reference_logprobs_T is not None
        assert len(batch.inputs.advantages_T) == len(batch.inputs.behavior_logprobs_T) == len(batch)
    assert extra.targets_T.tolist() == [-1] and extra.mask_T.tolist() == [False] and extra.weights_T.tolist() == [0.0]


def test_nothing_to_train_is_no_batch() -> None:
    """G09, G12: all masked, or no group left, for any number of ranks."""
    assert pack([Group("t", [attempt([1, 2], []), attempt([1, 2], [])])], data_parallel=2).batches == []
    assert pack([], data_parallel=2).batches == []
    assert pack([Group("t", [attempt([], [5])])]).batches == []  # its only token has nothing before it


def test_two_tokens_are_a_sequence() -> None:
    """G11."""
    (batch,) = pack([Group("t", [attempt([1], [2])])]).batches
    assert (batch.tokens_T.tolist(), batch.targets_T.tolist()) == ([1, 2], [2, -1])


def test_the_reference_is_aligned_and_checked() -> None:
    packed = pack(losses_as_logprobs([1.0, 1.0], [1.0]), max_tokens=3)
    columns = [torch.arange(float(len(batch))) for batch in packed.batches]
    for batch, column in zip(with_inputs(packed.batches, reference_logprobs=columns), columns, strict=True):
        assert batch.inputs.reference_logprobs_T is column
        assert batch.inputs.correction_T is None
    with pytest.raises(ValueError, match="do not belong"):
        with_inputs(packed.batches, reference_logprobs=columns[::-1])


def test_a_batch_weighs_what_its_tensors_weigh() -> None:
    """I07: written once; a slice does not carry the whole step along."""
    groups = [Group(f"t{i}", [attempt(range(100), range(100)) for _ in range(4)]) for i in range(20)]
    packed = pack(groups, max_tokens=1000, temperature=0.7, data_parallel=2)
    assert len(packed.batches) >= 8
    for batch in packed.batches:
        columns = [batch.tokens_T, batch.targets_T, batch.mask_T, batch.weights_T, batch.temperature_T]
        columns += [batch.inputs.behavior_logprobs_T, batch.inputs.advantages_T]
        size = sum(column.nbytes for column in columns if column is not None)
        assert size <= len(pickle.dumps(batch)) <= size + 4096


def test_packing_is_deterministic() -> None:
    rng = np.random.default_rng(0)
    groups = [Group(f"t{i}", [attempt([1, 2, i], range(int(rng.integers(1, 9)))) for _ in range(4)]) for i in range(9)]
    first, second = (pack(groups, max_tokens=40, share_prefixes=True, data_parallel=2) for _ in range(2))
    assert [b.layout for b in first.batches] == [b.layout for b in second.batches]
    assert all(torch.equal(a.tokens_T, b.tokens_T) for a, b in zip(first.batches, second.batches, strict=True))


def test_examples_add_no_token() -> None:
    """B09: the one end token of an example is the one that is trained."""
    (batch,) = pack_examples([example([9, 5, 2], [0, 1, 1])], max_tokens=8, data_parallel=1).batches
    assert batch.tokens_T.tolist() == [9, 5, 2]
    assert batch.targets_T[batch.mask_T].tolist() == [5, 2]
    assert batch.inputs is None


def test_examples_are_masked_by_position() -> None:
    """B10: of three equal tokens, the first ends the answer and the others pad it."""
    (batch,) = pack_examples([example([9, 5, 6, 2, 2, 2], [0, 1, 1, 1, 0, 0])], max_tokens=8, data_parallel=1).batches
    assert batch.targets_T.tolist() == [5, 6, 2, 2, 2, -1]
    assert batch.mask_T.tolist() == [True, True, True, False, False, False]
    assert batch.weights_T[:3].tolist() == pytest.approx([1 / 3] * 3)


def test_headers_and_separators_are_not_trained() -> None:
    """B12: header, header, reply, end, newline."""
    (batch,) = pack_examples([example([1, 1, 5, 2, 10], [0, 0, 1, 1, 0])], max_tokens=8, data_parallel=1).batches
    assert batch.targets_T[batch.mask_T].tolist() == [5, 2]
    assert batch.mask_T.tolist() == [False, True, True, False, False]


def test_examples_follow_the_same_rules() -> None:
    examples = [example([1, 2], [0, 1]), example([1, 2, 3, 4], [0, 1, 1, 1], "long"), example([1, 2], [0, 0])]
    with pytest.raises(DataError, match="task long: a sequence of 4 tokens"):
        pack_examples(examples, max_tokens=3, data_parallel=2)
    packed = pack_examples(examples, max_tokens=3, data_parallel=2, too_long=TooLong.DROP)
    assert packed.dropped == 1
    assert [batch.layout.lengths for batch in packed.batches] == [(2,), (1,)]
    assert pack_examples([], max_tokens=3, data_parallel=2).batches == []
    with pytest.raises(ValueError, match="3 tokens with a mask of 2"):
        pack_examples([example([1, 2, 3], [0, 1])], max_tokens=3, data_parallel=1)


def routed(prompt: list[int], reply: list[int]) -> Trajectory:
    """An attempt whose tokens 10 and up took experts that are called after them; the last token was never routed."""
    made = Segment()
    made.observe(np.asarray(prompt, np.int32))
    text = np.asarray([*prompt, *reply], np.int16)
    experts_TLK = np.stack([text, text + 1], -1)[:, None]
    experts_TLK[-1] = -1
    column = np.full(len(reply), -1.0, np.float32)
    made.act(
        Completion(
            tokens=np.asarray(reply, np.int32),
            logprobs=column,
            sampling_logprobs=column,
            versions=np.zeros(len(reply), np.int32),
            stop=Stop.TOKEN,
            routes=Routes((4,), experts_TLK),
        )
    )
    return Trajectory([made])


@pytest.mark.parametrize("data_parallel", [1, 3])
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_routes_stand_beside_their_own_tokens(share_prefixes: bool, data_parallel: int) -> None:
    """H05, H12: 4 tokens have 3 routes and a last row without one, where nothing is trained; however texts are packed,
    and in batches that only fill a rank too."""
    two = Group("t", [routed([10, 11], [12, 13]), routed([10, 11], [14])])
    groups = [two, Group("u", [routed([20], [21]), attempt([30], [31])])]
    packed = pack(groups, share_prefixes=share_prefixes, data_parallel=data_parallel)
    rows: list[tuple[int, int]] = []
    for batch in packed.batches:
        assert batch.routes is not None and batch.routes.layers == (4,) and len(batch.routes) == len(batch)
        columns = zip(batch.tokens_T.tolist(), batch.targets_T.tolist(), batch.routes.experts_TLK.tolist(), strict=True)
        for token, target, experts in columns:
            rows.append((token, experts[0][0]))
            known = token < 30 and target >= 0
            assert experts == ([[token, token + 1]] if known else [[-1, -1]]) or spare(batch)
    last = [(13, -1), (14, -1), (21, -1)]
    assert sorted(row for row in rows if row in last) == last
    (free, *_), (held, *_) = unrouted(packed.batches), packed.batches
    assert free.routes is None and held.routes is not None, "what it was made of stays as it is"
    assert free.tokens_T is held.tokens_T and free.inputs is held.inputs
    plain = pack([Group("t", [attempt([1], [2])])]).batches
    assert unrouted(plain)[0] is plain[0]
