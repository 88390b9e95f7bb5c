"""Experts dealt to ranks: every family over two ranks, every shape over four, adapters and models from a recipe."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.config.adapter import AdapterConfig
from strop.config.model import ModelConfig
from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine, OptimParams
from strop.engines.build import build_engine
from strop.models.experts import Form
from strop.models.loading import load_model
from strop.runtime.processes import ProcessRanks
from strop.runtime.remote_engine import RemoteEngine
from strop.runtime.start import RankModel, start_engine
from strop.types import Want
from tests.conformance.expert_checks import check_numbers, check_replay, check_steps, open_engines
from tests.conformance.rank_engines import tiny_rank
from tests.conformance.test_engine import Scaled, assert_close, gradient, pack, sequences
from tests.ranks.shapes import EXPERT_SHAPES, over
from tests.tiny_models import EXPERT_MODELS, FAMILIES, tiny_model

TWO = "data2-experts2"


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_two_ranks_are_one(family: str, again: bool, tmp_path: Path) -> None:
    one, spread = open_engines(family, EXPERT_SHAPES[TWO], again=again)
    try:
        check_numbers(one, spread)
        check_replay(one, spread, family)
        check_steps(one, spread, tmp_path)
    finally:
        spread.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("shape", [shape for shape in EXPERT_SHAPES if shape != TWO])
def test_four_ranks_are_one(shape: str, family: str, tmp_path: Path) -> None:
    one, spread = open_engines(family, EXPERT_SHAPES[shape], again=shape == "data4-experts2")
    try:
        check_numbers(one, spread)
        check_replay(one, spread, family)
        check_steps(one, spread, tmp_path)
    finally:
        spread.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("shape", [TWO, "data4-experts2"])
def test_grouped_experts(shape: str, family: str) -> None:
    """float32, in which transformers computes all experts of a layer in one call."""
    texts = sequences()
    cut = [pack(texts[:1]), pack(texts[1:4]), pack(texts[4:])]
    spread = over(EXPERT_SHAPES[shape], family, torch.float32, EngineConfig())
    try:
        expected = gradient(build_engine(EngineConfig(), tiny_model(family)), [pack(texts)], Scaled())
        assert_close(expected, gradient(spread, cut, Scaled()), 2e-5)
    finally:
        spread.close()


def test_mixed_precision() -> None:
    """bfloat16 arithmetic moves gradients by its own rounding; what is kept is float32."""
    texts = sequences()
    parallel = ParallelConfig(data=2, experts=2, compute="bfloat16")
    spread = over(parallel, "mixtral", torch.float32, EngineConfig())
    try:
        assert {tensor.dtype for _, tensor in spread.weights()} == {torch.float32}
        found = gradient(spread, [pack(texts[:3]), pack(texts[3:])], Scaled())
        expected = gradient(build_engine(EngineConfig(), tiny_model("mixtral")), [pack(texts)], Scaled())
        scale = max(float(tensor.abs().max()) for tensor in expected.values())
        worst = max(float((expected[name] - found[name]).abs().max()) for name in expected)
        assert 1e-5 * scale < worst < 0.3 * scale  # a rounded score may send a token to another expert
    finally:
        spread.close()


def test_an_adapter_over_dealt_experts() -> None:
    """Attention and shared experts learn what they learn over one rank; the base's experts are only run."""
    config = EngineConfig(parallel=EXPERT_SHAPES[TWO])
    make = partial(tiny_rank, "qwen3_next", torch.float64, config, False)
    spread = RemoteEngine(ProcessRanks([make] * config.parallel.ranks, timeout_s=300), config.parallel)
    whole = build_engine(EngineConfig(), tiny_model("qwen3_next", torch.float64), trainable=False)
    wanted = AdapterConfig(rank=4, alpha=8.0, targets=("attention", "mlp", "unembedding"), seed=1)
    batches = [pack(sequences(4, seed=seed)) for seed in range(3)]

    async def work(base: Engine) -> tuple[list[float], dict[str, Tensor]]:
        policy = base.adapter("policy", wanted)
        norms: list[float] = []
        for _ in range(3):
            await policy.forward_backward(batches, Scaled())
            norms.append((await policy.optim_step(OptimParams(lr=1e-2))).grad_norm)
        return norms, dict(policy.adapter_weights())

    try:
        (ours, own), (theirs, other) = asyncio.run(work(whole)), asyncio.run(work(spread))
        assert ours == pytest.approx(theirs, rel=1e-9)
        assert own.keys() == other.keys()
        assert all(torch.allclose(own[name], other[name], rtol=1e-8, atol=1e-9) for name in own)
    finally:
        spread.close()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_ranks_have_the_experts_of_the_model_that_one_of_them_read(family: str) -> None:
    model = ModelConfig.model_validate({"fresh": {"model_type": family, **FAMILIES[family]}, "kernels": "torch"})
    of = RankModel(model=model, vocab_size=96, seed=7)
    engine = start_engine(EngineConfig(parallel=EXPERT_SHAPES[TWO]), of)
    try:
        read = load_model(model, vocab_size=96, seed=7)
        expected, found = dict(read.state()), dict(engine.weights(Form.PACKED))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        texts = pack(sequences())
        plain = asyncio.run(build_engine(EngineConfig(), read, trainable=False).forward([texts], Want()))[0]
        assert torch.allclose(asyncio.run(engine.forward([texts]))[0].logprobs_T, plain.logprobs_T, atol=1e-5)
    finally:
        engine.close()
