"""Folders of weights: whole or not there, and read back by transformers as what was written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.errors import EngineError
from strop.models.attention import NAME
from strop.rollout.folder import INDEX, Policy
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_what_is_written_is_read_back_by_transformers(tmp_path: Path, family: str) -> None:
    """Tied heads, buffers, and experts that the running model keeps in one tensor and a folder one by one. E18."""
    model = tiny_model(family, seed=3)
    policy = Policy.of(tiny_model(family, seed=4))
    asyncio.run(policy.write(model.state(), tmp_path / "v0"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "v0", attn_implementation=NAME, output_loading_info=True
    )
    module, told = loaded
    assert not [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in told[kind]]
    read = module.state_dict()
    for name, tensor in model.state():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)


def test_shards_are_indexed_and_hold_each_tensor_once(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    asyncio.run(Policy.of(model).write(model.state(), tmp_path / "v0", shard_bytes=20_000))
    places = json.loads((tmp_path / "v0" / INDEX).read_text())["weight_map"]
    files = sorted((tmp_path / "v0").glob("*.safetensors"))
    assert len(files) > 2
    found = {name: file.name for file in files for name in load_file(file)}
    assert found == places
    assert set(found) == {name for name, _ in model.state()}
    assert sum(len(load_file(file)) for file in files) == len(found)


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape", "dtype", "raises"])
def test_wrong_weights_leave_nothing_behind(tmp_path: Path, spoil: str) -> None:
    model = tiny_model("qwen3")
    weights = dict(model.state())
    name = next(reversed(weights))
    if spoil == "missing":
        del weights[name]
    elif spoil == "unknown":
        weights["strange"] = torch.zeros(1)
    elif spoil == "shape":
        weights[name] = torch.zeros(2)
    elif spoil == "dtype":
        weights[name] = weights[name].double()

    def given():
        yield from weights.items()
        if spoil == "raises":
            raise EngineError("strange")

    with pytest.raises(EngineError, match=name if spoil in ("missing", "shape", "dtype") else "strange"):
        asyncio.run(Policy.of(model).write(given(), tmp_path / "v0", shard_bytes=20_000))
    assert list(tmp_path.iterdir()) == []


def test_a_coarser_policy_casts_and_views_of_one_buffer_are_saved_apart(tmp_path: Path) -> None:
    coarse, fine = tiny_model("qwen3", torch.bfloat16), dict(tiny_model("qwen3", seed=1).state())
    norms = torch.randn(2, 32)
    halves = {name: norms[n] for n, name in enumerate(("model.norm.weight", "model.layers.0.input_layernorm.weight"))}
    asyncio.run(Policy.of(coarse, casts=True).write({**fine, **halves}.items(), tmp_path / "v0"))
    (file,) = (tmp_path / "v0").glob("*.safetensors")
    read = load_file(file)
    for name, tensor in {**fine, **halves}.items():
        assert torch.equal(read[name], tensor.bfloat16())
