"""Casebook (h), routes and experts, and what section (e) says of them: every row has a test that names it.

A test names a row in its own name (`test_h03_...`) or in its docstring (`H03`). They stand next to what they test; rows
that belong to no single part are here.
"""

from __future__ import annotations

import ast
import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from strop.algos.balance import sampled_rows
from strop.algos.losses import PolicyInputs
from strop.config.recipe import EngineConfig
from strop.data.dummy import dummy_of
from strop.data.packing import Batch
from strop.data.routes import expert_counts, unknown
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.types import Layout, Want
from tests.tiny_models import tiny_model

# H01, and the rows of (e) between these, are others' or were dropped from the casebook as the same as another one.
ROWS = {f"H{n:02d}" for n in range(2, 13)} | {"E06", "E08", "E11", "E16"}


def named_rows(source: str) -> set[str]:
    """The rows of `ROWS` that a file's tests name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            text = f"{node.name.upper()} {ast.get_docstring(node) or ''}"
            found.update(re.findall(r"(?<![A-Za-z0-9])[EH]\d\d(?![A-Za-z0-9])", text.replace("_", " ")))
    return found


def test_every_row_has_a_test() -> None:
    files = Path(__file__).parents[1].rglob("test_*.py")
    tested = set().union(*(named_rows(path.read_text("utf-8")) for path in files))
    assert tested >= ROWS, f"no test: {sorted(ROWS - tested)}"
    assert not {row for row in tested if row[0] == "H"} - ROWS, "no such rows"


def test_what_names_a_row() -> None:
    source = '''
def test_h02_and_e06_in_a_name(): ...
def test_other():
    """H03, E11: but neither BH09 nor H100."""
def h10_is_no_test(): ...
'''
    assert named_rows(source) == {"H02", "E06", "H03", "E11"}


def plain_batch(count: int, lengths: tuple[int, ...], *, layers: int = 2) -> Batch[PolicyInputs]:
    """Texts of `count` tokens, all of them but each one's first sampled."""
    layout = Layout(lengths)
    targets_T = torch.arange(4, 4 + count)
    targets_T[torch.from_numpy(layout.starts_S + layout.lengths_S - 1)] = -1
    mask_T = targets_T >= 0
    column_T = torch.zeros(count)
    return Batch(
        tokens_T=torch.arange(3, 3 + count),
        targets_T=targets_T,
        mask_T=mask_T,
        weights_T=mask_T.float(),
        layout=layout,
        inputs=PolicyInputs(
            behavior_logprobs_T=column_T, advantages_T=column_T + 1.0, expert_fractions_LE=torch.ones(layers, 4) / 4
        ),
        temperature_T=column_T + 0.5,
        ids_TK=torch.zeros(count, 2, dtype=torch.int64),
        routes=unknown(count, tuple(range(layers)), 2),
    )


def test_h05_the_filler_of_a_last_token_trains_nothing_and_is_no_load() -> None:
    """H05: 4 tokens, of which the sampler routed 3: the row after them holds -1, has no loss, and is in no load."""
    batch = plain_batch(4, (4,))
    assert batch.routes is not None
    batch.routes.experts_TLK[:3] = (0, 1)
    assert (batch.routes.experts_TLK[3] == -1).all() and not batch.mask_T[3] and batch.weights_T[3] == 0.0
    counted_T = sampled_rows(batch.mask_T.numpy(), batch.targets_T.numpy())
    assert counted_T.tolist() == [False, True, True, False]
    assert expert_counts(batch.routes, counted_T, 4).tolist() == [[2, 2, 0, 0]] * 2


def test_h06_rows_without_a_route_are_chosen_by_the_model() -> None:
    """H06: three rows that hold -1, top-2 of 4 experts. There are no pad rows whose experts somebody would have to make
    up: each takes two different experts, those that it takes without replay, and -1 is the number of none."""
    engine, batch = Fsdp2Engine(tiny_model("qwen3_moe"), EngineConfig()), plain_batch(3, (3,))
    (free,) = asyncio.run(engine.forward([replace(batch, routes=None)], Want(routes=True)))
    (given,) = asyncio.run(engine.forward([batch], Want(routes=True)))
    assert free.routes is not None and given.routes is not None
    assert np.array_equal(free.routes.experts_TLK, given.routes.experts_TLK)
    assert ((given.routes.experts_TLK >= 0) & (given.routes.experts_TLK < 4)).all()
    assert (given.routes.experts_TLK[..., 0] != given.routes.experts_TLK[..., 1]).all()
    load = expert_counts(unknown(3, (0, 1), 2), np.ones(3, np.bool_), 4)
    assert load.tolist() == [[0] * 4] * 2, "-1 would be the last expert, if it indexed"


def test_h12_a_dummy_has_every_column_and_whole_constants() -> None:
    """H12: routes and logprobs too; fractions of experts, which are the update's and of no token, are not cut."""
    batch = plain_batch(5, (3, 2))
    dummy = dummy_of(batch)
    assert dummy.routes is not None and dummy.routes.experts_TLK.shape == (1, 2, 2)
    assert dummy.ids_TK is not None and dummy.temperature_T is not None
    assert len(dummy.inputs.behavior_logprobs_T) == len(dummy.inputs.advantages_T) == len(dummy) == 1
    assert dummy.inputs.expert_fractions_LE is not None and dummy.inputs.expert_fractions_LE.shape == (2, 4)
    assert dummy.mask_T.tolist() == [False] and dummy.weights_T.tolist() == [0.0] and dummy.targets_T.tolist() == [-1]
