"""The vocabulary split over two ranks: every rank gives what one process gives, and the gradients of its own share."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from strop.ops.logprobs import Entropy, Head, HeadImpl, Scored, Shard, learn_targets, score_targets
from tests.unit.ops.head_cases import ROWS, Case, case, gradients, mixed, run, small_tiles

FORMS = ["chunked", "learned"] + ["triton"] * (find_spec("triton") is not None)
PARTS = [slice(0, 9), slice(9, 13)]  # unequal, and neither fills its tiles
OUTPUTS = ("logprobs_N", "entropy_N", "ids_logprobs_NK", "square_sums_N", "top_k_ids_NK", "top_k_logprobs_NK")


def share(of: Case, rank: int) -> tuple[Case, Head]:
    part = PARTS[rank]
    assert of.bias is not None and of.b is not None
    mine = replace(of, weight=of.weight[part], bias=of.bias[part], b=of.b[part]).live()
    group = dist.group.WORLD
    assert group is not None
    return mine, replace(mine.head(), shard=Shard(group=group, start=part.start, size=13))


def score_share(form: str, mine: Case, head: Head) -> tuple[Scored, Tensor]:
    asked = {"temperature_N": mine.temperature, "entropy": Entropy.GRADIENT, "ids_NK": mine.ids, "rows": ROWS}
    asked |= {"top_k": 6, "square_sums": True}
    if form == "learned":
        return learn_targets(mine.hidden, head, mine.targets, mixed, **asked)  # type: ignore[arg-type]
    scored = score_targets(mine.hidden, head, mine.targets, impl=HeadImpl(form), **asked)  # type: ignore[arg-type]
    return scored, mixed(torch.arange(len(mine.targets)), scored)


def compare(rank: int, folder: Path) -> None:
    """One rank's side; leaves a file when everything was the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch)
        for of in (case(full=True), case(full=True, ids=None, softcap=None), case(n=3, full=True)):
            whole, _ = run("plain", of, top_k=6, square_sums=True)
            wanted = gradients("plain", of)
            for form in FORMS if len(of.hidden) == 3 else FORMS[:2]:
                mine, head = share(of, rank)
                scored, total = score_share(form, mine, head)
                for name in OUTPUTS:
                    one, other = getattr(scored, name), getattr(whole, name)
                    assert (one is None) == (other is None), name
                    assert one is None or torch.allclose(one.double(), other.double(), rtol=0, atol=1e-12), name
                total.backward()
                for name, leaf in mine.leaves().items():
                    whole_grad = wanted[name]
                    assert leaf.grad is not None and whole_grad is not None
                    part = whole_grad if name in ("hidden", "a") else whole_grad[PARTS[rank]]
                    assert torch.allclose(leaf.grad, part, rtol=0, atol=1e-12), (form, name)
    dist.destroy_process_group()
    (folder / f"same-{rank}").touch()


def test_two_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    mp.spawn(compare, args=(tmp_path,), nprocs=2)  # type: ignore[no-untyped-call]
    assert sorted(path.name for path in tmp_path.glob("same-*")) == ["same-0", "same-1"]


def test_a_share_checks_tokens_against_the_whole_vocabulary() -> None:
    of = case()
    shard = Shard(group=None, start=0, size=20)  # type: ignore[arg-type]
    head = Head(weight_VD=of.weight, shard=shard)
    assert head.vocabulary == 20
    with pytest.raises(ValueError, match="a target is 20, outside a vocabulary of 20"):
        score_targets(of.hidden, head, torch.full((19,), 20), impl=HeadImpl.CHUNKED)
