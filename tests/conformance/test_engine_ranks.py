"""What only an engine over ranks can get wrong; its whole suite is in tests/ranks (`make ranks`)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strop.algos.losses import ClippedSurrogate, PolicyInputs
from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.data.dummy import dummy_of
from strop.data.packing import Batch
from strop.engines.base import OptimParams
from strop.engines.build import build_engine
from strop.errors import ConfigError, EngineError
from strop.runtime.processes import ProcessRanks
from strop.runtime.ranks import RankError
from strop.runtime.remote_engine import RemoteEngine
from strop.types import Layout, Want
from tests.conformance.rank_engines import tiny_rank
from tests.conformance.test_engine import DEFAULT, TOLERANCE, Scaled, assert_close, gradient, pack, sequences
from tests.ranks.shapes import SHAPES, over
from tests.tiny_models import tiny_model

STEP = OptimParams(lr=1e-2)


@pytest.fixture
def engines() -> Iterator[list[RemoteEngine]]:
    made: list[RemoteEngine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        ("data2", "qwen3"),
        ("sequence2", "llama"),
        ("data2-sequence2", "qwen3_next"),
        ("sequence2", "qwen3_5_text"),
        ("replicas2-data2", "qwen3_moe"),
        ("sequence2", "gpt_oss"),
        ("tensor2", "qwen3"),
        ("data2-tensor2", "qwen3_5_text"),
        ("tensor2", "qwen3_moe"),
    ],
)
def test_gradients_are_those_of_one_rank(shape: str, family: str, engines: list[RemoteEngine]) -> None:
    """A32, G03, G04: three batches on two or four ranks, one of them of a single text without a target."""
    texts, loss = sequences(), Scaled(entropy=0.1)
    engines.append(over(SHAPES[shape], family, torch.float64, DEFAULT))
    cut = [pack(texts[:1]), pack(texts[1:4]), pack(texts[4:])]
    found = gradient(engines[0], cut, loss)
    expected = gradient(build_engine(DEFAULT, tiny_model(family, torch.float64)), [pack(texts)], loss)
    assert_close(expected, found, TOLERANCE[torch.float64])


@pytest.mark.parametrize("shape", ["data2", "data2-tensor2"])
def test_steps_norms_and_checkpoints_do_not_know_how_many_ranks_there_are(
    shape: str, tmp_path: Path, engines: list[RemoteEngine]
) -> None:
    """Trained over ranks, saved, gone on with one; and the other way round: the same weights."""
    batches = [pack(sequences(seed=seed)) for seed in range(4)]
    one = build_engine(DEFAULT, tiny_model("qwen3", torch.float64))
    two = over(SHAPES[shape], "qwen3", torch.float64, DEFAULT)
    engines.append(two)

    async def train(engine: RemoteEngine, number: int) -> float:
        await engine.forward_backward([batches[number]], Scaled())
        return (await engine.optim_step(STEP)).grad_norm

    async def work() -> None:
        norms = [(await train(one, n), await train(two, n)) for n in range(2)]  # pyright: ignore[reportArgumentType]
        assert all(a == pytest.approx(b, rel=1e-10) for a, b in norms)
        for name, engine in (("one", one), ("two", two)):
            (tmp_path / name).mkdir()
            await engine.save(tmp_path / name)
        await one.load(tmp_path / "two")
        await two.load(tmp_path / "one")
        for n in (2, 3):
            assert await train(one, n) == pytest.approx(await train(two, n), rel=1e-10)  # pyright: ignore[reportArgumentType]

    asyncio.run(work())
    ours, theirs = dict(one.weights()), dict(two.weights())
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12) for name in ours)


def test_outputs_come_back_in_order_and_whole(engines: list[RemoteEngine]) -> None:
    texts = sequences(7)
    engines.append(over(SHAPES["data2-sequence2"], "qwen3", torch.float32, DEFAULT))
    batches = [pack([text]) for text in texts]
    want = Want(entropy=True, top_k=3, every_row=True)
    plain = build_engine(DEFAULT, tiny_model("qwen3", torch.float32))
    for ours, theirs in zip(
        asyncio.run(engines[0].forward(batches, want)), asyncio.run(plain.forward(batches, want)), strict=True
    ):
        assert torch.allclose(ours.logprobs_T, theirs.logprobs_T, atol=1e-5)
        assert ours.entropy_T is not None and theirs.entropy_T is not None
        assert torch.allclose(ours.entropy_T, theirs.entropy_T, atol=1e-5)
        assert ours.top_k_ids_TK is not None and theirs.top_k_ids_TK is not None
        assert torch.equal(ours.top_k_ids_TK, theirs.top_k_ids_TK)


def test_mixed_precision_keeps_weights_and_sums_in_float32(engines: list[RemoteEngine]) -> None:
    """bfloat16 arithmetic moves gradients by its own rounding, and nothing that is kept is of that type."""
    texts, loss = sequences(), Scaled()
    parallel = ParallelConfig(data=2, compute="bfloat16")
    engines.append(over(parallel, "qwen3", torch.float32, DEFAULT))
    assert {tensor.dtype for _, tensor in engines[0].weights()} == {torch.float32}
    found = gradient(engines[0], [pack(texts[:3]), pack(texts[3:])], loss)
    expected = gradient(build_engine(DEFAULT, tiny_model("qwen3", torch.float32)), [pack(texts)], loss)
    scale = max(float(t.abs().max()) for t in expected.values())
    worst = max(float((expected[name] - found[name]).abs().max()) for name in expected)
    assert 1e-5 * scale < worst < 0.05 * scale


def test_a_dummy_has_every_field_and_trains_nothing() -> None:
    """G04, H12."""
    batch = pack(sequences(3), temperature=0.5)
    inputs = PolicyInputs(behavior_logprobs_T=torch.zeros(len(batch)), advantages_T=torch.ones(len(batch)))
    whole: Batch[PolicyInputs] = Batch(
        tokens_T=batch.tokens_T,
        targets_T=batch.targets_T,
        mask_T=batch.mask_T,
        weights_T=batch.weights_T,
        layout=batch.layout,
        inputs=inputs,
        temperature_T=batch.temperature_T,
        ids_TK=torch.zeros((len(batch), 2), dtype=torch.int64),
    )
    dummy = dummy_of(whole)
    assert dummy.layout == Layout((1,)) and dummy.targets_T.tolist() == [-1] and not dummy.mask_T.any()
    assert dummy.weights_T.tolist() == [0.0] and dummy.temperature_T is not None and len(dummy.temperature_T) == 1
    assert dummy.ids_TK is not None and dummy.ids_TK.shape == (1, 2)
    assert len(dummy.inputs.advantages_T) == len(dummy.inputs.behavior_logprobs_T) == 1
    loss = ClippedSurrogate(clip_low=0.2, clip_high=0.2)
    assert loss.want == Want(per_row=True)


def test_a_mistake_that_all_ranks_see_is_an_error_and_they_go_on(engines: list[RemoteEngine]) -> None:
    engines.append(over(SHAPES["data2"], "qwen3", torch.float32, DEFAULT))
    with pytest.raises(EngineError, match="no value head"):
        asyncio.run(engines[0].forward([pack(sequences())], Want(values=True)))
    assert len(asyncio.run(engines[0].forward([pack(sequences())]))) == 1
    with pytest.raises(EngineError, match="heads cannot be dealt to 3 ranks"):
        engines.append(over(ParallelConfig(sequence=3), "qwen3", torch.float32, DEFAULT))
        asyncio.run(engines[1].forward([pack(sequences())]))


def children(engine: RemoteEngine) -> list[int]:
    ranks = engine._ranks
    assert isinstance(ranks, ProcessRanks)
    return [child.pid for child in ranks._children if child.pid is not None]


def test_a_rank_that_dies_is_named_within_bounded_time(engines: list[RemoteEngine]) -> None:
    engines.append(over(SHAPES["data2"], "qwen3", torch.float32, DEFAULT))
    os.kill(children(engines[0])[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL"):
        asyncio.run(engines[0].forward([pack(sequences())]))
    with pytest.raises(RankError, match="ranks were stopped: rank 1"):
        asyncio.run(engines[0].forward([pack(sequences())]))


def test_a_rank_that_hangs_is_named_within_bounded_time() -> None:
    config = EngineConfig(parallel=SHAPES["data2"])
    from functools import partial

    make = partial(tiny_rank, "qwen3", torch.float32, config)
    engine = RemoteEngine(ProcessRanks([make, make], timeout_s=20), SHAPES["data2"])
    ranks = engine._ranks
    assert isinstance(ranks, ProcessRanks)
    ranks._timeout_s = 3.0
    stopped = children(engine)
    os.kill(stopped[0], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 0, 1 did not answer forward within 3 s|rank 0 did not answer"):
        asyncio.run(engine.forward([pack(sequences())]))
    for pid in stopped:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.parallel\.tensor is 2, but GptOssForCausalLM has no plan"):
        over(SHAPES["tensor2"], "gpt_oss", torch.float32, DEFAULT)


def broken() -> None:
    raise ValueError("this rank has no model")


def test_ranks_that_cannot_start_say_why() -> None:
    with pytest.raises(ValueError, match="this rank has no model"):
        ProcessRanks([broken, broken], timeout_s=60)  # pyright: ignore[reportArgumentType]
