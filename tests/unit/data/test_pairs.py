"""Packing of preferences: pairs stay whole, weights are a mean over pairs, and what is left out is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from strop.algos.preference_losses import PairInputs
from strop.config.recipe import RendererConfig, TooLong
from strop.data.packing import Batch, Example
from strop.data.pairs import (
    Fit,
    Preference,
    elsewhere,
    pack_alone,
    pack_pairs,
    pack_scored,
    preference_of,
    with_reference_logprobs,
)
from strop.data.tasks import Task
from strop.errors import DataError
from strop.tokens.build import build_renderer
from strop.types import Layout
from tests.unit.loops.tiny_task import tokenizer

FIT = Fit(max_tokens=64, share_prefixes=True, data_parallel=1, too_long=TooLong.ERROR)


def example(prompt: list[int], reply: list[int], task_id: str = "t") -> Example:
    return Example(np.array(prompt + reply, np.int32), np.array([False] * len(prompt) + [True] * len(reply)), task_id)


def pair(prompt: list[int], chosen: list[int], rejected: list[int], task_id: str = "t") -> Preference:
    texts = [example(prompt, reply, task_id) for reply in (chosen, rejected)]
    return Preference(task_id=task_id, chosen=texts[0], rejected=texts[1], margin=len(chosen) / 2)


def texts_of(batch: Batch[PairInputs]) -> list[tuple[int, bool, list[int]]]:
    """Of every text: its pair, whether it is the chosen one, and its tokens with its prefix's in front."""
    layout, found = batch.layout, []
    own = [batch.tokens_T.tolist()[a : a + n] for a, n in zip(layout.starts_S.tolist(), layout.lengths, strict=True)]
    for s, start in enumerate(layout.starts_S.tolist()):
        if s not in layout.parents:
            whole = own[layout.parents[s]] + own[s] if layout.parents[s] >= 0 else own[s]
            found.append((int(batch.inputs.pair_T[start]), bool(batch.inputs.chosen_T[start]), whole))
    return found


def test_a_shared_prompt_is_one_prefix_and_what_replies_have_in_common_is_not() -> None:
    """B08: replies that begin alike keep their own beginnings; the prompt alone is shared, without its last token."""
    (batch,) = pack_pairs([pair([1, 2, 3], [7, 8, 9], [7, 5])], FIT).batches
    assert batch.layout == Layout((2, 4, 3), (-1, 0, 0))
    assert batch.tokens_T.tolist() == [1, 2, 3, 7, 8, 9, 3, 7, 5]
    assert batch.targets_T.tolist() == [2, 3, 7, 8, 9, -1, 7, 5, -1]
    assert batch.mask_T.tolist() == [False, False, True, True, True, False, True, True, False]
    assert torch.allclose(batch.weights_T, batch.mask_T / 5)
    assert batch.inputs.chosen_T[batch.mask_T].tolist() == [True] * 3 + [False] * 2
    assert batch.inputs.margin_T is None


@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("max_tokens", [14, 20, 200])
@pytest.mark.parametrize("data_parallel", [1, 3, 9])
def test_pairs_are_never_split_and_ranks_get_equally_many_batches(
    share_prefixes: bool, max_tokens: int, data_parallel: int
) -> None:
    rng = np.random.default_rng(0)
    pairs: list[Preference] = []
    for p in range(7):
        prompt, chosen, rejected = (rng.integers(10 * p + 3, 10 * p + 13, n).tolist() for n in rng.integers(1, 5, 3))
        pairs.append(pair(prompt, chosen, rejected, f"t{p}"))
    fit = replace(FIT, max_tokens=max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel)
    packed = pack_pairs(pairs, fit)
    assert len(packed.batches) % data_parallel == 0 and packed.dropped == 0
    seen: list[tuple[list[int], list[int]]] = []
    for batch in packed.batches:
        assert len(batch) <= max_tokens
        if batch.layout.lengths == (1,):
            assert not batch.mask_T.any()
            continue
        texts = texts_of(batch)
        for p in range(len(texts) // 2):
            (chosen,) = [whole for index, is_chosen, whole in texts if index == p and is_chosen]
            (rejected,) = [whole for index, is_chosen, whole in texts if index == p and not is_chosen]
            seen.append((chosen, rejected))
            own_T = batch.mask_T & (batch.inputs.pair_T == p)
            assert float(batch.weights_T[own_T].sum()) == pytest.approx(1 / 7)
    given = [(p.chosen.tokens.tolist(), p.rejected.tokens.tolist()) for p in pairs if p.chosen and p.rejected]
    assert sorted(seen) == sorted(given)


def test_trained_tokens_come_back_text_by_text_whatever_the_packing() -> None:
    pairs = [pair([1, 2], [11, 12, 13], [14]), pair([3], [15], [16, 17]), pair([4, 5, 6], [18], [19])]
    for fit in (FIT, replace(FIT, max_tokens=9), replace(FIT, share_prefixes=False, data_parallel=2)):
        packed = pack_pairs(pairs, fit)
        targets = packed.trained.gather([batch.targets_T for batch in packed.batches])
        assert targets.tolist() == list(range(11, 20))
        assert packed.trained.counts_N.tolist() == [3, 1, 1, 2, 1, 1]
        scored = pack_scored(pairs, fit)
        ends = scored.trained.gather([batch.tokens_T for batch in scored.batches])
        assert ends.tolist() == [13, 14, 15, 17, 18, 19], "a text is scored at its last token"


def test_scored_texts_count_equally_and_carry_their_margins() -> None:
    packed = pack_scored([pair([1, 2], [11, 12, 13], [14]), pair([3], [15], [16, 17])], FIT)
    (batch,) = packed.batches
    assert batch.weights_T[batch.mask_T].tolist() == [0.25] * 4
    assert (batch.targets_T[batch.mask_T] == -1).all()
    assert batch.inputs.margin_T is not None
    margins = {(int(batch.inputs.pair_T[t]), float(batch.inputs.margin_T[t])) for t in batch.mask_T.nonzero()[:, 0]}
    assert margins == {(0, 1.5), (1, 0.5)}


def test_single_replies_count_each_for_itself() -> None:
    good = Preference(task_id="g", chosen=example([1, 2], [3, 4]), rejected=None)
    bad = Preference(task_id="b", chosen=None, rejected=example([5], [6]))
    (batch,) = pack_alone([good, bad, pair([7, 8], [9], [10, 11])], FIT).batches
    found = {
        int(p): (
            bool(batch.inputs.chosen_T[t]),
            float(batch.weights_T[batch.mask_T & (batch.inputs.pair_T == p)].sum()),
        )
        for t, p in enumerate(batch.inputs.pair_T)
        if batch.mask_T[t]
    }
    assert sorted(found) == [0, 1, 2, 3]
    assert sorted(chosen for chosen, _ in found.values()) == [False, False, True, True]
    assert [weight for _, weight in found.values()] == pytest.approx([0.25] * 4)


def test_a_pair_that_fits_no_batch_is_named_or_counted() -> None:
    long = pair(list(range(20)), [30] * 9, [31] * 9, "long")
    short = pair([1], [2], [3], "short")
    with pytest.raises(DataError, match=r"task long: its replies take 39 tokens together and a batch has 30"):
        pack_pairs([short, long], replace(FIT, max_tokens=30, share_prefixes=True))
    assert len(pack_pairs([long], replace(FIT, max_tokens=39)).batches) == 1, "the prompt counts once"
    with pytest.raises(DataError, match="58 tokens together"):
        pack_pairs([long], replace(FIT, max_tokens=39, share_prefixes=False))
    packed = pack_pairs([short, long, short], replace(FIT, max_tokens=30, too_long=TooLong.DROP))
    assert packed.dropped == 1
    assert sum(float(batch.weights_T.sum()) for batch in packed.batches) == pytest.approx(1.0), "a mean of what is left"
    nothing = pack_pairs([long], replace(FIT, max_tokens=30, too_long=TooLong.DROP))
    assert (nothing.batches, nothing.dropped, len(nothing.trained)) == ([], 1, 0)
    assert pack_pairs([], FIT).batches == []


@pytest.mark.parametrize(
    ("preference", "says"),
    [
        (Preference(task_id="x", chosen=example([1], [2]), rejected=None), "task x has no two replies"),
        (pair([1], [2], [], "x"), "task x: a reply of 1 tokens trains none"),
        (pair([], [2], [3, 4], "x"), "task x: a reply of 1 tokens trains none"),
    ],
)
def test_what_is_no_pair_is_refused(preference: Preference, says: str) -> None:
    with pytest.raises(DataError, match=says):
        pack_pairs([pair([1], [2], [3]), preference], FIT)
    with pytest.raises(DataError, match="no reply to learn from"):
        pack_alone([Preference(task_id="y", chosen=None, rejected=None)], FIT)
    crooked = replace(pair([1], [2], [3]), chosen=Example(np.zeros(3, np.int32), np.ones(2, np.bool_), "z"))
    with pytest.raises(ValueError, match="task z: 3 tokens with a mask of 2"):
        pack_pairs([crooked], FIT)


def test_a_reference_of_other_batches_is_refused() -> None:
    packed = pack_pairs([pair([1], [2], [3])], FIT)
    given = torch.arange(len(packed.batches[0]), dtype=torch.float32)
    (batch,) = with_reference_logprobs(packed.batches, [given])
    assert batch.inputs.reference_logprobs_T is given and batch.inputs.pair_T is packed.batches[0].inputs.pair_T
    with pytest.raises(ValueError, match="do not belong"):
        with_reference_logprobs(packed.batches, [given[1:]])


def test_tasks_become_texts_and_ktos_baseline_takes_the_next_tasks_replies() -> None:
    made = tokenizer()
    renderer = build_renderer(RendererConfig(kind="plain"), made, [14])

    def task(prompt: str, chosen: str | None, rejected: str | None) -> Task:
        return Task(
            id=prompt,
            messages=[{"role": "user", "content": prompt}],
            answer=None,
            source="s",
            meta={},
            chosen=chosen,
            rejected=rejected,
            margin=2.0,
        )

    tasks = [task("1+2=", "3", "44"), task("0+0=", "0", None), task("5+5=", None, "9")]
    first = preference_of(renderer, tasks[0])
    assert first.margin == 2.0 and first.task_id == "1+2="
    assert first.chosen is not None and made.decode(first.chosen.tokens) == "1 + 2 = 3 <eos>"
    assert first.chosen.trained.tolist() == [False] * 4 + [True] * 2
    assert preference_of(renderer, tasks[1]).rejected is None
    texts = [str(made.decode(found.tokens)).replace(" ", "") for found in elsewhere(renderer, tasks)]
    assert texts == ["1+2=0<eos>", "0+0=9<eos>", "5+5=3<eos>", "5+5=44<eos>"]
