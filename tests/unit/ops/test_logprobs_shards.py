"""The vocabulary split over ranks: every rank gives what one process gives, and the gradients of its own share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from strop.ops import head_stream, head_tiles
from strop.ops.logprobs import Entropy, Head, HeadImpl, Scored, Shard, learn_targets, score_targets
from tests.unit.ops.head_cases import ROWS, Case, case, gradients, mixed, run, small_tiles

FORMS = ["chunked", "learned"] + ["triton"] * (find_spec("triton") is not None)
PARTS = [slice(0, 9), slice(9, 13)]  # unequal, and neither fills its tiles
OUTPUTS = ("logprobs_N", "entropy_N", "ids_logprobs_NK", "square_sums_N", "top_k_ids_NK", "top_k_logprobs_NK")


def share(of: Case, part: slice, group: dist.ProcessGroup) -> tuple[Case, Head]:
    assert of.bias is not None and of.b is not None
    mine = replace(of, weight=of.weight[part], bias=of.bias[part], b=of.b[part]).live()
    return mine, replace(mine.head(), shard=Shard(group=group, start=part.start, size=13))


def score_share(form: str, mine: Case, head: Head) -> tuple[Scored, Tensor]:
    asked = {"temperature_N": mine.temperature, "entropy": Entropy.GRADIENT, "ids_NK": mine.ids, "rows": ROWS}
    asked |= {"top_k": 6, "square_sums": True}
    if form == "learned":
        return learn_targets(mine.hidden, head, mine.targets, mixed, **asked)  # type: ignore[arg-type]
    scored = score_targets(mine.hidden, head, mine.targets, impl=HeadImpl(form), **asked)  # type: ignore[arg-type]
    return scored, mixed(torch.arange(len(mine.targets)), scored)


FAR = case(full=True, softcap=None, bias=torch.linspace(-900.0, -895.0, 13, dtype=torch.float64))
CASES = [case(full=True), case(full=True, ids=None, softcap=None), case(n=3, full=True)]


def compare(form: str, of: Case, part: slice, group: dist.ProcessGroup) -> None:
    """One rank's side."""
    whole, _ = run("plain", of, top_k=6, square_sums=True)
    wanted = gradients("plain", of)
    mine, head = share(of, part, group)
    scored, total = score_share(form, mine, head)
    for name in OUTPUTS:
        one, other = getattr(scored, name), getattr(whole, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.allclose(one.double(), other.double(), rtol=0, atol=1e-12), name
    total.backward()
    for name, leaf in mine.leaves().items():
        whole_grad = wanted[name]
        assert leaf.grad is not None and whole_grad is not None
        right = whole_grad if name in ("hidden", "a") else whole_grad[part]
        assert torch.allclose(leaf.grad, right, rtol=0, atol=1e-12), (form, name)


def process(rank: int, folder: Path) -> None:
    """Leaves a file when everything was the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch)
        for of in CASES:
            for form in FORMS if len(of.hidden) == 3 else FORMS[:2]:
                compare(form, of, PARTS[rank], group)
    dist.destroy_process_group()
    (folder / f"same-{rank}").touch()


class Threads:
    """Ranks that are threads of this process, and the collectives of `torch.distributed` that the head calls."""

    ReduceOp = dist.ReduceOp

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.given = [torch.zeros(0)] * ranks
        self.local = threading.local()

    def everyones(self, mine: Tensor, group: object) -> list[Tensor]:
        assert group is self
        self.given[self.local.rank] = mine.clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> None:
        found = torch.stack(self.everyones(tensor, group))
        tensor.copy_(found.amax(0) if op == dist.ReduceOp.MAX else found.sum(0))

    def all_gather(self, into: list[Tensor], tensor: Tensor, group: object = None) -> None:
        for place, found in zip(into, self.everyones(tensor, group), strict=True):
            place.copy_(found)

    def get_world_size(self, group: object = None) -> int:
        assert group is self
        return len(self.given)

    def run(self, body: Callable[[int], None]) -> None:
        def of(rank: int) -> None:
            self.local.rank = rank
            try:
                body(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.given)) as pool:
            assert list(pool.map(of, range(len(self.given)))) == [None] * len(self.given)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("of", [*CASES, FAR], ids=["full", "no-ids", "few-rows", "far-below-0"])
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 2), slice(2, 11), slice(11, 13)]], ids=["two", "three"])
def test_ranks_as_threads_give_what_one_gives(
    monkeypatch: pytest.MonkeyPatch, form: str, of: Case, parts: list[slice]
) -> None:
    small_tiles(monkeypatch)
    threads = Threads(len(parts))
    monkeypatch.setattr(head_tiles, "dist", threads)
    monkeypatch.setattr(head_stream, "dist", threads)
    threads.run(lambda rank: compare(form, of, parts[rank], threads))  # type: ignore[arg-type]


def test_two_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    mp.spawn(process, args=(tmp_path,), nprocs=2)  # type: ignore[no-untyped-call]
    assert sorted(path.name for path in tmp_path.glob("same-*")) == ["same-0", "same-1"]


def test_a_share_checks_tokens_against_the_whole_vocabulary() -> None:
    of = case()
    shard = Shard(group=None, start=0, size=20)  # type: ignore[arg-type]
    head = Head(weight_VD=of.weight, shard=shard)
    assert head.vocabulary == 20
    with pytest.raises(ValueError, match="a target is 20, outside a vocabulary of 20"):
        score_targets(of.hidden, head, torch.full((19,), 20), impl=HeadImpl.CHUNKED)
