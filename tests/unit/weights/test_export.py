"""A folder that strop exports beside one that transformers saves: the same files, names, bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strop.config.adapter import AdapterConfig
from strop.config.recipe import EngineConfig
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.models.attention import NAME
from strop.models.loading import prepare
from strop.ops.select import Impl
from strop.weights.export import export_model
from tests.tiny_models import EXPERT_MODELS, FAMILIES, tiny_model


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


@pytest.mark.parametrize("family", [*EXPERT_MODELS, "llama", "qwen3", "gpt2"])
def test_a_folder_is_the_one_that_transformers_saves(family: str, tmp_path: Path) -> None:
    """E07: a tied output matrix is not there twice."""
    model = tiny_model(family)
    export_model(model, None, tmp_path / "own")
    export_model(model, None, tmp_path / "engine", Fsdp2Engine(model, EngineConfig()).weights())
    model.module.save_pretrained(tmp_path / "theirs")
    names = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    for made in (tmp_path / "own", tmp_path / "engine"):
        assert sorted(file.name for file in made.iterdir()) == names
        assert same(tensors(made), tensors(tmp_path / "theirs"))
        for file in ("config.json", "generation_config.json"):
            assert (made / file).read_text() == (tmp_path / "theirs" / file).read_text()


def test_a_folder_of_many_files_and_then_of_one(tmp_path: Path) -> None:
    """No file is larger than was asked, unless a tensor is; a later export leaves no file of an earlier one."""
    model, folder = tiny_model("qwen3_moe"), tmp_path / "out"
    export_model(model, None, folder, shard_bytes=20_000)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 3 and files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert all(sum(t.nbytes for t in load_file(folder / file).values()) <= 20_000 for file in files)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in files for name in load_file(folder / file)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(folder).values())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert same(loaded.state_dict(), dict(model.state()))
    export_model(model, None, folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert same(AutoModelForCausalLM.from_pretrained(folder).state_dict(), dict(model.state()))


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False)])
def test_a_head_adapter_where_two_levels_of_a_configuration_speak_of_ties(
    outer: bool, inner: bool, tmp_path: Path
) -> None:
    """E08: the nested text config decides. A tied output matrix that an adapter changed is exported beside the
    embedding, which stays what it was: merged into both it would change what the model reads."""
    fields: dict[str, Any] = {**FAMILIES["qwen3_5_moe_text"], "tie_word_embeddings": inner}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=fields, tie_word_embeddings=outer)
    torch.manual_seed(0)
    model = prepare(AutoModelForCausalLM.from_config(config, attn_implementation=NAME), Impl.TORCH)
    base = Fsdp2Engine(model, EngineConfig(), trainable=False)
    assert ("lm_head.weight" in dict(base.weights())) is not inner
    at = base.adapter("a", AdapterConfig.model_validate({"rank": 2, "targets": ["unembedding"]}))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    for engine, tied in ((base, inner), (at, False)):
        folder = tmp_path / f"{tied}-{engine is at}"
        export_model(model, None, folder, engine.weights())
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
        head, embedding = loaded.lm_head.weight, loaded.get_input_embeddings().weight
        assert (head is embedding) is tied
        assert torch.equal(embedding, dict(model.state())["model.embed_tokens.weight"])
        expected = dict(engine.weights())["lm_head.weight" if not tied else "model.embed_tokens.weight"]
        assert torch.equal(head, expected)
        assert loaded.config.get_text_config().tie_word_embeddings is tied
