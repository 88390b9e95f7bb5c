"""Weights under the names of saved folders, and back, for every family: against transformers' own `save_pretrained`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from strop.config.adapter import AdapterConfig
from strop.config.recipe import EngineConfig
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import EngineError
from strop.models.experts import Form
from strop.models.saved import export_weights, import_weights
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.rollout.folder import Policy
from strop.types import Prompt, SamplingParams
from strop.weights.publish import publish
from tests.tiny_models import COMMON, EXPERT_MODELS, EXPERTS, FAMILIES, tiny_model


def saved(module: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """What transformers itself writes."""
    module.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engines_weights_are_those_of_a_saved_folder(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.bfloat16 if family == "qwen3_moe" else torch.float32)
    weights = dict(Fsdp2Engine(model, EngineConfig()).weights())
    assert same(weights, saved(model.module, tmp_path))
    own = {tensor.untyped_storage().data_ptr() for tensor in model.module.state_dict().values()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in weights.values()), "a stack came along"


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("family", [*EXPERT_MODELS, "llama"])
def test_a_model_takes_every_form(family: str, form: Form) -> None:
    engine, other = Fsdp2Engine(tiny_model(family), EngineConfig()), tiny_model(family, seed=1)
    weights = list(engine.weights(form))
    other.load_state(iter(weights[::-1]))
    assert same(dict(other.state()), dict(engine.model.state()))
    lent = dict(engine.lend_weights())
    assert all(tensor is lent[name] or torch.equal(tensor, lent[name]) for name, tensor in engine.weights(Form.PACKED))
    with pytest.raises(EngineError, match=r"missing|are needed"):
        tiny_model(family).load_state(weights[:-1])
    with pytest.raises(EngineError, match=r"unknown model\.x"):
        other.load_state([*weights, ("model.x", torch.zeros(1))])


def test_experts_come_one_by_one() -> None:
    """Whoever takes one expert has made the model's engine read one stack, and no more."""
    model = tiny_model("qwen3_moe")
    read: list[str] = []

    def reading() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state():
            read.append(name)
            yield name, tensor

    for name, tensor in export_weights(model.module, reading(), Form.SAVED):
        if ".experts.3.up_proj" in name:
            stack = dict(model.state())["model.layers.0.mlp.experts.gate_up_proj"]
            assert tensor.data_ptr() == stack[3, 16:].data_ptr(), "it is a view"
            break
    assert read[-1] == "model.layers.0.mlp.experts.gate_up_proj"
    assert not any(name.startswith("model.layers.1") for name in read)


@pytest.mark.parametrize("form", list(Form))
def test_a_sampler_takes_every_form_and_casts(form: Form) -> None:
    engine = Fsdp2Engine(tiny_model("mixtral"), EngineConfig())
    served = tiny_model("mixtral", torch.bfloat16, seed=1)
    sampler = BuiltinSampler(served, max_running=2, cache_tokens=64, casts=True)
    asyncio.run(sampler.load_weights(engine.weights(form), 1))
    expected = {name: tensor.bfloat16() for name, tensor in engine.model.state()}
    assert same(dict(served.state()), expected)
    asyncio.run(publish(engine, sampler, 2))
    assert same(dict(served.state()), expected) and sampler.version == 2
    asyncio.run(sampler.sample(Prompt(np.array([3, 4], np.int32)), SamplingParams(max_tokens=2)))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_an_adapter_is_merged_before_experts_are_taken_apart(family: str) -> None:
    base = Fsdp2Engine(tiny_model(family), EngineConfig(), trainable=False)
    targets = ["attention", "experts"] if family != "gpt_oss" else ["attention"]
    at = base.adapter("a", AdapterConfig.model_validate({"rank": 2, "targets": targets}))
    with torch.no_grad():
        for name, parameter in at.model.module.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    plain, merged = dict(base.weights()), dict(at.weights())
    assert plain.keys() == merged.keys()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, plain[name])}
    experts = {name for name in plain if ".experts." in name and family != "gpt_oss"}
    assert changed == {name for name in plain if ".self_attn." in name and "_proj.weight" in name} | experts
    own = import_weights(base.model.module, merged.items())
    assert same(dict(own), dict(at.weights(Form.PACKED)))


def test_other_families_are_saved_as_transformers_saves_them(tmp_path: Path) -> None:
    """A mixture of experts that strop has no names for: transformers' own conversion, reversed."""
    config = AutoConfig.for_model("olmoe", **{**COMMON, **EXPERTS, "num_experts": 4})
    module = AutoModelForCausalLM.from_config(config)
    nn.Module.to(module, torch.float32)
    for form in (Form.SAVED, Form.STREAMED):
        assert same(
            dict(export_weights(module, module.state_dict().items(), form)), saved(module, tmp_path / form.value)
        )
    own = dict(export_weights(module, module.state_dict().items(), Form.PACKED))
    assert same(own, module.state_dict()) and same(dict(import_weights(module, own.items())), own)


@pytest.mark.parametrize("form", [Form.PACKED, Form.SAVED])
@pytest.mark.parametrize("family", [*EXPERT_MODELS, "llama"])
def test_a_sampler_of_another_library_reads_what_transformers_saves(family: str, form: Form, tmp_path: Path) -> None:
    """A version as a folder, published from an engine or given as a checkpoint has it."""
    model = tiny_model(family, seed=1)
    given = Fsdp2Engine(model, EngineConfig()).weights(form)
    asyncio.run(Policy.of(tiny_model(family)).write(given, tmp_path / "v1", shard_bytes=20_000))
    found = [load_file(file) for file in sorted((tmp_path / "v1").glob("*.safetensors"))]
    assert len(found) > 2
    assert same({name: t for shard in found for name, t in shard.items()}, saved(model.module, tmp_path / "theirs"))
