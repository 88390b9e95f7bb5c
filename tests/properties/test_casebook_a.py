"""Casebook (a), wrong mathematics that nobody noticed: every row has a test that names it.

A test names a row in its own name (`test_a01_...`) or in its docstring (`A01`). Most of them stand next to what they
test; those of rows that belong to no single part are here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.data.packing import Batch
from strop.ops.logprobs import Entropy, Head, HeadImpl, score_targets
from strop.types import Group, Outputs, Trajectory
from tests.unit.data.groups import pack, segment, trained

# The numbers that are not here belong to rows that say the same as another one.
ROWS = {f"A{n:02d}" for n in (1, *range(3, 11), *range(12, 19), *range(20, 36), *range(37, 42), *range(43, 51))}


def named_rows(source: str) -> set[str]:
    """The rows that a file's tests name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.update(re.findall(r"(?<=_)a\d\d(?=_|$)", node.name), re.findall(r"\bA\d\d\b", doc(node)))
    return {row.upper() for row in found}


def doc(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A docstring, ranges such as A04-A06 written out."""
    text = ast.get_docstring(node) or ""
    return re.sub(
        r"\bA(\d\d)-A(\d\d)\b", lambda m: " ".join(f"A{n:02d}" for n in range(int(m[1]), int(m[2]) + 1)), text
    )


def test_every_row_has_a_test() -> None:
    files = Path(__file__).parents[1].rglob("test_*.py")
    tested = set().union(*(named_rows(path.read_text()) for path in files))
    assert tested <= ROWS, f"no such rows: {sorted(tested - ROWS)}"
    assert tested >= ROWS, f"no test: {sorted(ROWS - tested)}"


def test_what_names_a_row() -> None:
    source = '''
def test_a01_and_a02_in_a_name(): ...
def test_other():
    """A03, A05-A07: but neither BA09 nor A100."""
def a10_is_no_test(): ...
'''
    assert named_rows(source) == {"A01", "A02", "A03", "A05", "A06", "A07"}


def values_at(batch: Batch, old: float) -> tuple[list[float], list[float]]:
    """The critic's values of a batch, its token numbers, where they are trained; and the loss of each token."""
    values_T = batch.tokens_T.double()
    inputs = ValueInputs(old_values_T=torch.full_like(values_T, old), returns_T=values_T + 1.0)
    outputs = Outputs(logprobs_T=torch.zeros_like(values_T), values_T=values_T)
    loss_T, _ = ClippedValue()(outputs, inputs, batch.layout, batch.mask_T)
    return torch.where(batch.mask_T, values_T, 0.0).tolist(), loss_T.tolist()


def test_a24_a_value_belongs_to_the_state_before_its_token() -> None:
    """A24: two prompt tokens and two sampled ones: the values of the second and third row count, no more."""
    packed = pack([Group("t", [Trajectory([segment([10, 11], [12, 13])])])])
    assert values_at(packed.batches[0], 0.0) == ([0.0, 11.0, 12.0, 0.0], [0.0, 0.5, 0.5, 0.0])
    # Whatever the order of the sequences, a value keeps its own mask.
    texts = [([10, 11], [12, 13]), ([20], [21]), ([30, 31, 32], [33, 34, 35])]
    found: list[set[float]] = []
    for order in ((0, 1, 2), (2, 0, 1)):
        groups = [Group(f"t{n}", [Trajectory([segment(*texts[n])])]) for n in order]
        found.append({value for batch in pack(groups).batches for value in values_at(batch, 0.0)[0]})
    assert found[0] == found[1] == {0.0, 11.0, 12.0, 20.0, 32.0, 33.0, 34.0}


def test_a30_an_advantage_belongs_to_all_segments_of_an_attempt() -> None:
    """A30: advantage 0.5, first segment trained at its first row, second at its last two."""
    first, second = segment([1], [2]), segment([6, 7, 8], [9, 10])
    first.observe(np.array([3, 4, 5], np.int32))
    batch = pack([Group("t", [Trajectory([first, second])])], [[0.5]]).batches[0]
    assert batch.inputs.advantages_T.tolist() == [0.5, 0, 0, 0, 0, 0, 0, 0.5, 0.5, 0]
    assert batch.mask_T.tolist() == [True, *[False] * 6, True, True, False]


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_a31_a_token_is_trained_once_however_many_texts_go_on_from_it(share_prefixes: bool) -> None:
    """A31: prompt (1, 2), sampled (3, 4), then two continuations: 3 and 4 are trained in one of the texts."""
    whole = segment([1, 2], [3, 4])
    whole.observe(np.array([5], np.int32))
    later = [segment([1, 2, 3, 4, 5], [6]), segment([1, 2, 3, 4, 5], [7, 8])]
    packed = pack([Group("t", [Trajectory([whole, *later])])], share_prefixes=share_prefixes)
    assert sorted(row.target for row in trained(packed.batches)) == [3, 4, 6, 7, 8]
    assert sum(row.weight for row in trained(packed.batches)) == pytest.approx(1.0)


@pytest.mark.parametrize("impl", [HeadImpl.PLAIN, HeadImpl.CHUNKED, HeadImpl.FUSED])  # those that need no GPU
def test_a40_scoring_changes_nothing_that_it_was_given(impl: HeadImpl) -> None:
    """A40: temperature 0.7, logprobs and entropies in both orders: the same numbers, inputs as they were."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (3, 5))
    temperature_N = torch.full((3,), 0.7, dtype=torch.float64)
    before = [t.clone() for t in (hidden_ND, weight_VD, temperature_N)]
    logits_NV = hidden_ND @ weight_VD.T / 0.7
    targets_N = torch.tensor([0, 4, 2])
    expected_N = logits_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
    expected_entropy_N = torch.distributions.Categorical(logits=logits_NV).entropy()
    for order in ((Entropy.NONE, Entropy.GRADIENT), (Entropy.GRADIENT, Entropy.NONE)):
        live_ND = hidden_ND.clone().requires_grad_()
        for entropy in order:
            scored = score_targets(
                live_ND, Head(weight_VD=weight_VD), targets_N, temperature_N=temperature_N, entropy=entropy, impl=impl
            )
            torch.testing.assert_close(scored.logprobs_N, expected_N)
            total = scored.logprobs_N.sum()
            if scored.entropy_N is not None:
                torch.testing.assert_close(scored.entropy_N, expected_entropy_N)
                total = total + scored.entropy_N.sum()
            total.backward()
        assert live_ND.grad is not None and live_ND.grad.isfinite().all() and live_ND.grad.any()
        assert torch.equal(live_ND.detach(), hidden_ND)
    for now, then in zip((hidden_ND, weight_VD, temperature_N), before, strict=True):
        assert torch.equal(now, then)
