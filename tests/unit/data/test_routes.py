"""Routes as columns: cut, gone on with, joined, gathered over pipeline stages, packed beside their tokens."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from strop.data.packing import pack_policy
from strop.data.routes import (
    cut,
    expert_counts,
    gather_stages,
    join_layers,
    join_texts,
    of_layers,
    unknown,
)
from strop.errors import DataError, EngineError
from strop.types import Completion, Group, Routes, Segment, Stop, Trajectory
from tests.unit.data.groups import attempt, completion


def routes(num_tokens: int, layers: tuple[int, ...] = (0, 1), top_k: int = 2, base: int = 0) -> Routes:
    """Every choice another number: base + 100 * token + 10 * column + k."""
    t, n, k = np.ogrid[:num_tokens, : len(layers), :top_k]
    return Routes(layers, (base + 100 * t + 10 * n + k).astype(np.int16))


def routed(reply: int, total: int, base: int = 0) -> Completion:
    """A completion of `reply` tokens whose text has `total`; the last was never routed."""
    made, told = completion(range(reply)), routes(total, base=base)
    told.experts_TLK[-1] = -1
    return Completion(
        tokens=made.tokens,
        logprobs=made.logprobs,
        sampling_logprobs=made.sampling_logprobs,
        versions=made.versions,
        stop=Stop.TOKEN,
        routes=told,
    )


def grown(prompt: int, *replies: tuple[int, int]) -> Segment:
    """Turns of (reply, tokens observed after it)."""
    segment = Segment()
    segment.observe(np.arange(prompt, dtype=np.int32))
    for turn, (reply, observed) in enumerate(replies):
        segment.act(routed(reply, len(segment) + reply, base=turn * 10_000))
        segment.observe(np.zeros(observed, np.int32))
    return segment


def test_a_cut_text_has_its_own_rows() -> None:
    """H03: a prompt of 3 and a reply of 5, cut to 2, have 5 rows."""
    assert len(cut(routes(3 + 5), 3 + 2)) == 5
    assert np.array_equal(cut(routes(8), 5).experts_TLK, routes(5).experts_TLK)


def test_going_on_keeps_what_was_known() -> None:
    """H04: 3 + 2 rows, then 3 + 2 + 4 with other numbers: the first 5 stay, the last 4 are appended: 9."""
    merged = routes(5).resumed(routes(9, base=5000))
    assert len(merged) == 9 and merged.experts_TLK.dtype == np.int16
    assert np.array_equal(merged.experts_TLK[:5], routes(5).experts_TLK)
    assert np.array_equal(merged.experts_TLK[5:], routes(9, base=5000).experts_TLK[5:])
    assert np.array_equal(routes(9).resumed(routes(5, base=5000)).experts_TLK, routes(9).experts_TLK)
    with pytest.raises(ValueError, match=r"layers \(0, 1\), 2 experts a token, go on in layers \(1, 2\)"):
        routes(5).resumed(routes(9, layers=(1, 2)))


def test_a_segment_grows_over_turns() -> None:
    """H05: the last token of a completion has no row of its own until the next turn reads it; an observation's rows
    come with the next turn too."""
    segment = grown(3, (2, 2), (3, 1))
    assert segment.routes is not None and len(segment) == 11 and len(segment.routes) == 10
    experts, first, second = segment.routes.experts_TLK, routes(5).experts_TLK, routes(10, base=10_000).experts_TLK
    assert np.array_equal(experts[:4], first[:4]), "the first turn's rows were overwritten"
    assert np.array_equal(experts[4:9], second[4:9]), "the sampled token and the observed ones were not filled"
    assert (experts[9] == -1).all()
    with pytest.raises(ValueError, match="routes of 7 tokens for 3 given ones and 2 sampled"):
        segment = Segment()
        segment.observe(np.arange(3, dtype=np.int32))
        segment.act(routed(2, 7))
    assert len(segment) == 3 and segment.routes is None


def test_texts_end_to_end() -> None:
    assert join_texts([None, None], np.array([2, 3])) is None
    joined = join_texts([routes(2), None, routes(1)], np.array([3, 2, 1]))
    assert joined is not None
    assert joined.experts_TLK[:, 0, 0].tolist() == [0, 100, -1, -1, -1, 0]
    with pytest.raises(DataError, match="routed by different models"):
        join_texts([routes(2), routes(2, top_k=3)], np.array([2, 2]))
    with pytest.raises(DataError, match="a text of 1 tokens has routes of 2"):
        join_texts([routes(2)], np.array([1]))


def pack(groups: list[Group], *, share: bool, data_parallel: int = 1, max_tokens: int = 64):
    return pack_policy(
        groups,
        np.ones((len(groups), len(groups[0]))),
        max_tokens=max_tokens,
        weighting="token_mean",
        horizon=None,
        temperature=1.0,
        share_prefixes=share,
        data_parallel=data_parallel,
    ).batches


def attempts(prompt: int, *replies: int) -> Group:
    made: list[Trajectory] = []
    for g, reply in enumerate(replies):
        segment = Segment()
        segment.observe(np.arange(prompt, dtype=np.int32))
        segment.act(routed(reply, prompt + reply, base=1000 * (g + 1)))
        made.append(Trajectory(segments=[segment]))
    return Group("t", made)


def test_packed_rows_stand_beside_their_tokens() -> None:
    (batch,) = pack([attempts(3, 2, 4)], share=False)
    assert batch.routes is not None and batch.routes.layers == (0, 1)
    rows = np.split(batch.routes.experts_TLK[:, 0, 0], [batch.layout.lengths[0]])
    by_length = dict(zip(batch.layout.lengths, rows, strict=True))
    assert by_length[5].tolist() == [1000, 1100, 1200, 1300, -1]
    assert by_length[7].tolist() == [2000, 2100, 2200, 2300, 2400, 2500, -1]


def test_a_shared_prefix_takes_the_first_attempts_routes() -> None:
    (batch,) = pack([attempts(3, 2, 4)], share=True)
    assert batch.routes is not None
    assert batch.layout.lengths == (2, 3, 5) and batch.layout.parents == (-1, 0, 0)
    assert batch.routes.experts_TLK[:, 0, 0].tolist() == [
        *(1000, 1100),
        *(1200, 1300, -1),
        *(2200, 2300, 2400, 2500, -1),
    ]


def test_later_segments_keep_their_own_rows() -> None:
    """A history edit opened a second segment; another attempt has none, and no routes either."""
    one = Trajectory(segments=[grown(2, (2, 0)), grown(3, (1, 0))])
    (batch,) = pack([Group("t", [one, attempt([1, 2], [3, 4])])], share=False)
    assert batch.routes is not None
    rows = np.split(batch.routes.experts_TLK[:, 0, 0], np.cumsum(batch.layout.lengths)[:-1])
    assert sorted(row.tolist() for row in rows) == sorted([[0, 100, 200, -1], [0, 100, 200, -1], [-1, -1, -1, -1]])


def test_a_batch_that_only_fills_a_rank_has_routes_too() -> None:
    """H12: a spare batch has every column that the others have."""
    batches = pack([attempts(3, 2)], share=False, data_parallel=3)
    assert [len(batch) for batch in batches] == [5, 1, 1]
    for batch in batches:
        assert batch.routes is not None and len(batch.routes) == len(batch)
    assert pack([Group("t", [attempt([1], [2])])], share=False)[0].routes is None


def test_load_counts_sampled_tokens_that_have_a_route() -> None:
    """H05: the filler of the last token is not in the load, and neither is what nobody sampled."""
    experts = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[1, 3], [0, 1]], [[-1, -1], [-1, -1]]], np.int16)
    counts = expert_counts(Routes((0, 5), experts), np.array([False, True, True, True]), 5)
    assert counts.tolist() == [[0, 2, 1, 1, 0], [2, 1, 0, 1, 0]]
    assert expert_counts(unknown(3, (0,), 2), np.ones(3, np.bool_), 4).tolist() == [[0, 0, 0, 0]]


def test_a_stages_slice_and_its_return() -> None:
    whole = routes(4, layers=(1, 3, 4))
    pieces = [of_layers(whole, stage) for stage in ((4, 1), (), (3,))]
    assert pieces[0].layers == (4, 1) and pieces[1].experts_TLK.shape == (4, 0, 2)
    joined = join_layers(pieces)
    assert joined.layers == (1, 3, 4) and np.array_equal(joined.experts_TLK, whole.experts_TLK)
    with pytest.raises(EngineError, match=r"say nothing of layers \[2\]"):
        of_layers(whole, (1, 2))
    with pytest.raises(EngineError, match="no stage has a layer with experts"):
        join_layers([pieces[1], pieces[1]])


STAGES: dict[str, list[tuple[int, ...]]] = {  # the layers with experts of each rank
    "even": [(0, 1), (2, 3), (4, 5)],
    "uneven": [(1,), (2, 3, 4), (5, 6)],
    "virtual": [(0, 3), (1, 4), (2, 5)],
    "empty first": [(), (1, 2), (3,)],
    "empty middle": [(1, 2), (), (3,)],
    "empty last": [(1,), (2, 3), ()],
    "two": [(2, 3, 4), (0, 1)],
    "two, empty first": [(), (0, 1, 2)],
}
WRONG: dict[str, list[Routes]] = {
    "rank 1 has routes of 4 tokens, rank 0 of 5": [routes(5, (0,)), routes(4, (1,)), routes(5, (2,))],
    "rank 2 has routes of 3 experts a token, others 2": [routes(5, (0,)), routes(5, (1,)), routes(5, (2,), 3)],
    "rank 1 has routes of layer 0, and so has rank 0": [routes(5, (0,)), routes(5, (0,)), routes(5, (2,))],
    "no stage has a layer with experts: there are no routes": [routes(5, ())] * 3,
}


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    pair = cast(dist.ProcessGroup, dist.new_group([0, 1]))
    seen: dict[str, object] = {}
    for name, stages in STAGES.items():
        if rank >= len(stages):
            continue
        whole = routes(5, tuple(sorted(layer for stage in stages for layer in stage)))
        got = gather_stages(of_layers(whole, stages[rank]), pair if len(stages) == 2 else None)
        seen[name] = got.layers == whole.layers and bool(np.array_equal(got.experts_TLK, whole.experts_TLK))
    for says, pieces in WRONG.items():
        try:
            gather_stages(pieces[rank])
        except EngineError as error:
            seen[says] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def test_stages_are_gathered_on_two_and_three_ranks(tmp_path: Path) -> None:
    """A stage without a layer of experts joins all the same; what does not fit is an error on every rank."""
    mp.spawn(_rank, (str(tmp_path),), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
    for rank in range(3):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = {name for name, stages in STAGES.items() if rank < len(stages)}
        assert {name for name, right in seen.items() if right is True} == expected
        assert {seen[says] for says in WRONG} == set(WRONG)
