"""One rank reads a model, the others are sent it: the same weights, forms and numbers as if each had read it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.config.model import ModelConfig
from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.build import build_engine
from strop.models.heads import ValueHead
from strop.models.loading import load_model
from strop.models.twin import empty_twin, everything, facts_of
from strop.runtime.start import RankModel, start_engine
from strop.types import Want
from tests.conformance.test_engine import pack, sequences
from tests.tiny_models import FAMILIES, tiny_module

CONFIG = EngineConfig(parallel=ParallelConfig(data=2))


def fresh(family: str, **more: Any) -> ModelConfig:
    return ModelConfig.model_validate({"fresh": {"model_type": family, **FAMILIES[family]}, "kernels": "torch", **more})


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_next", "gpt_oss", "gemma3_text"])
def test_a_twin_has_every_tensor_and_every_fused_form(family: str) -> None:
    model = load_model(fresh(family), vocab_size=96, seed=1)
    twin = empty_twin(fresh(family), 96, facts_of(model))
    ours, theirs = list(everything(model)), list(everything(twin))
    assert [(n, t.shape, t.dtype) for n, t in ours] == [(n, t.shape, t.dtype) for n, t in theirs]
    assert (twin.fused, twin.cache_shape, twin.impl) == (model.fused, model.cache_shape, model.impl)
    for (_, own), (_, sent) in zip(theirs, ours, strict=True):
        own.copy_(sent)
    texts = pack(sequences())
    engines = [build_engine(EngineConfig(), m, trainable=False) for m in (model, twin)]
    outputs = [asyncio.run(engine.forward([texts], Want(every_row=True)))[0] for engine in engines]
    assert torch.equal(outputs[0].logprobs_T, outputs[1].logprobs_T)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_ranks_have_the_model_that_one_of_them_read(family: str) -> None:
    of = RankModel(model=fresh(family), vocab_size=96, seed=7)
    engine = start_engine(CONFIG, of)
    read = load_model(of.model, vocab_size=96, seed=7)
    expected = dict(read.state())
    found = dict(engine.weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    texts = pack(sequences())
    plain = asyncio.run(build_engine(EngineConfig(), read, trainable=False).forward([texts]))[0]
    assert torch.allclose(asyncio.run(engine.forward([texts]))[0].logprobs_T, plain.logprobs_T, atol=1e-5)
    engine.close()


def test_a_value_model_from_a_folder(tmp_path: Path) -> None:
    tiny_module("qwen3").save_pretrained(tmp_path)
    of = RankModel(model=ModelConfig(path=str(tmp_path)), vocab_size=96, seed=0, value_head=ValueHead.FRESH)
    engine = start_engine(CONFIG, of)
    assert engine.capabilities.value_head
    (output,) = asyncio.run(engine.forward([pack(sequences())], Want(values=True)))
    assert output.values_T is not None and not output.values_T.any()
    engine.close()
