"""Routes over ranks: what is recorded comes back whole and in order, what is given is replayed, gradients are one
rank's; whether ranks share the weights, the tokens of a batch, or the heads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algos.balance import router_terms
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.errors import EngineError
from strop.models.experts import Form
from strop.runtime.remote_engine import RemoteEngine
from strop.types import Layout, Metrics, Outputs, Routes, Want, results
from tests.conformance.test_engine import Scaled, assert_close, gradient, pack, sequences
from tests.ranks.shapes import SHAPES, over
from tests.tiny_models import tiny_model

CHECKPOINTED = EngineConfig.model_validate({"activations": {"checkpoint_every": 1}})
ROUTES = Want(routes=True)


@pytest.fixture
def spread() -> Iterator[list[RemoteEngine]]:
    """Engines over ranks, which end with the test."""
    made: list[RemoteEngine] = []
    yield made
    for engine in made:
        engine.close()


def alone(family: str, seed: int = 0) -> Engine:
    return build_engine(EngineConfig(), tiny_model(family, torch.float64, seed=seed))


def batches(count: int = 2) -> list[Batch[Tensor]]:
    """Packs whose tokens no two ranks can share evenly."""
    texts = sequences(3 * count, seed=5)
    packs = [pack(texts[3 * n : 3 * n + 3]) for n in range(count)]
    assert any(len(one) % 2 for one in packs)
    return packs


def routed(engine: Engine | RemoteEngine, given: list[Batch[Any]]) -> list[Routes]:
    found = [output.routes for output in asyncio.run(engine.forward(given, ROUTES))]
    return [routes for routes in found if routes is not None]


@pytest.mark.parametrize(
    ("shape", "family", "config"),
    [
        ("data2", "qwen3_moe", EngineConfig()),
        ("sequence2", "qwen3_moe", CHECKPOINTED),
        ("sequence2", "deepseek_v3", EngineConfig()),
        ("sequence2", "qwen3_next", EngineConfig()),
        ("tensor2", "qwen3_moe", CHECKPOINTED),
        ("tensor2", "mixtral", EngineConfig()),
    ],
)
def test_routes_over_ranks_are_those_of_one(
    shape: str, family: str, config: EngineConfig, spread: list[RemoteEngine]
) -> None:
    """H10: under tensor parallelism a router's gradient is that of one rank, too."""
    given, one, other = batches(), alone(family), alone(family, seed=1)
    many = over(SHAPES[shape], family, torch.float64, config)
    spread.append(many)
    assert many.capabilities.router_replay
    for ours, theirs in zip(routed(many, given), routed(one, given), strict=True):
        assert ours.layers == theirs.layers and np.array_equal(ours.experts_TLK, theirs.experts_TLK)
    foreign = routed(other, given)
    for routes in foreign:
        routes.experts_TLK[-2:] = -1  # some tokens nobody routed
    given = [replace(batch, routes=routes) for batch, routes in zip(given, foreign, strict=True)]
    done = asyncio.run(many.forward_backward(given, Scaled(), ROUTES))
    expected = asyncio.run(one.forward_backward(given, Scaled(), ROUTES))
    measured = results(done.metrics)
    assert measured == pytest.approx(results(expected.metrics), abs=1e-9)
    total = sum(len(batch) for batch in given)
    assert measured["router/replayed"] == pytest.approx((total - 2 * len(given)) / total)
    for batch, ours, theirs in zip(given, done.outputs, expected.outputs, strict=True):
        assert batch.routes is not None and ours.routes is not None and theirs.routes is not None
        assert torch.allclose(ours.logprobs_T, theirs.logprobs_T, atol=1e-7 if family == "deepseek_v3" else 1e-10)
        assert np.array_equal(batch.routes.experts_TLK[:-2], ours.routes.experts_TLK[:-2])
        assert np.array_equal(theirs.routes.experts_TLK, ours.routes.experts_TLK)
        assert ours.expert_counts_LE is not None and theirs.expert_counts_LE is not None
        assert torch.equal(ours.expert_counts_LE, theirs.expert_counts_LE)
    asyncio.run(many.zero_grad())
    asyncio.run(one.zero_grad())
    tolerance = 1e-7 if family == "deepseek_v3" else 1e-10  # its router scores in float32, whatever the model's format
    assert_close(gradient(one, given, Scaled()), gradient(many, given, Scaled()), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_text_of_five_tokens_is_filled_up_and_has_its_five_rows(
    dtype: torch.dtype, spread: list[RemoteEngine]
) -> None:
    """H07: what fills up, here so that two ranks have three tokens each, is no row of the replay, in any format. (No
    engine computes in 8 bits, the format that the row speaks of.)"""
    (text,) = [text for text in sequences(30, seed=1) if len(text.tokens) == 5][:1]
    (foreign,) = routed(alone("qwen3_moe", seed=1), [pack([text])])
    spread.append(over(SHAPES["sequence2"], "qwen3_moe", dtype, EngineConfig()))
    batch = replace(pack([text]), routes=foreign)
    (output,) = asyncio.run(spread[0].forward([batch], Want(routes=True, every_row=True)))
    assert output.routes is not None and output.expert_counts_LE is not None
    assert np.array_equal(output.routes.experts_TLK, foreign.experts_TLK) and len(foreign) == 5
    assert int(output.expert_counts_LE.sum()) == int(batch.mask_T.sum()) * 2 * 2
    (one,) = asyncio.run(
        build_engine(EngineConfig(), tiny_model("qwen3_moe", dtype)).forward([batch], Want(every_row=True))
    )
    assert torch.allclose(output.logprobs_T, one.logprobs_T, atol=5e-2 if dtype is torch.bfloat16 else 1e-5)


@dataclass(frozen=True)
class WithTerms:
    """A loss with the routers' own terms, the update's fractions of choices as constants."""

    fractions_LE: tuple[tuple[float, ...], ...] = ((0.4, 0.3, 0.2, 0.1), (0.1, 0.1, 0.1, 0.7))
    want: Want = Want(router_logits=True)  # noqa: RUF009

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        loss_T, metrics = Scaled()(outputs, inputs, layout, mask_T)
        terms_T, more = router_terms(outputs, torch.tensor(self.fractions_LE), mask_T, balance=0.7, z=0.1)
        return loss_T + terms_T, metrics | more


@pytest.mark.parametrize("shape", ["sequence2", "data2"])
def test_a_routers_own_terms_do_not_know_how_tokens_are_dealt(shape: str, spread: list[RemoteEngine]) -> None:
    """H11: one rank or two that share the tokens, the same values and the same gradient."""
    given, one, loss = batches(), alone("qwen3_moe"), WithTerms()
    many = over(SHAPES[shape], "qwen3_moe", torch.float64, EngineConfig())
    spread.append(many)
    ours = results(asyncio.run(many.forward_backward(given, loss)).metrics)
    theirs = results(asyncio.run(one.forward_backward(given, loss)).metrics)
    assert ours == pytest.approx(theirs) and ours["router/z"] > 0 and ours["router/balance"] > 0
    asyncio.run(many.zero_grad())
    asyncio.run(one.zero_grad())
    assert_close(gradient(one, given, loss), gradient(many, given, loss), 1e-10)  # pyright: ignore[reportArgumentType]


def test_routes_that_do_not_fit_are_refused_by_every_rank(spread: list[RemoteEngine]) -> None:
    """Also where the row that is wrong is one rank's alone: the ranks go on."""
    (batch,) = batches(1)
    many = over(SHAPES["sequence2"], "qwen3_moe", torch.float64, EngineConfig())
    spread.append(many)
    (own,) = routed(many, [batch])
    wrong = own.experts_TLK.copy()
    wrong[-1, 1] = (1, 9)
    for given, says in (
        (Routes(own.layers, wrong), r"routes of layer 1 name experts \[0, 9\]; there are 4"),
        (Routes(own.layers, wrong[1:]), rf"routes of {len(batch) - 1} tokens were given with a batch of {len(batch)}"),
    ):
        with pytest.raises(EngineError, match=says):
            asyncio.run(many.forward([replace(batch, routes=given)]))
    assert np.array_equal(routed(many, [batch])[0].experts_TLK, own.experts_TLK)


@pytest.mark.parametrize(("shape", "family"), [("data2", "qwen3_moe"), ("tensor2", "mixtral"), ("data2", "gpt_oss")])
def test_weights_over_ranks_have_the_names_and_bytes_of_one(
    shape: str, family: str, spread: list[RemoteEngine]
) -> None:
    one, many = alone(family), over(SHAPES[shape], family, torch.float64, EngineConfig())
    spread.append(many)
    for form in Form:
        ours, theirs = dict(many.weights(form)), dict(one.weights(form))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    lent = dict(many.lend_weights())
    assert all(torch.equal(tensor, lent[name]) for name, tensor in one.lend_weights())
