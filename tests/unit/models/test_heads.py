"""Value models: heads are read from every folder that others write, and what is missing is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from strop.config.model import Kernels, ModelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.build import build_engine
from strop.errors import ConfigError, EngineError
from strop.models.heads import ValueHead, load_value_head, make_value_model
from strop.models.loading import LanguageModel, load_model
from strop.types import Layout, Want
from tests.tiny_models import tiny_config, tiny_model, tiny_module

FAMILIES = ("qwen3", "llama", "gemma2", "qwen3_moe")
TOKENS = torch.tensor([5, 9, 3, 44, 7, 8, 5, 60, 61, 62, 9])
LENGTHS = (4, 1, 6)


def batch(temperature: float | None = None) -> Batch[None]:
    targets = torch.cat([torch.cat([part[1:], torch.tensor([-1])]) for part in TOKENS.split(LENGTHS)])
    mask = targets >= 0
    return Batch(
        tokens_T=TOKENS,
        targets_T=targets,
        mask_T=mask,
        weights_T=mask.float(),
        layout=Layout(LENGTHS),
        inputs=None,
        temperature_T=None if temperature is None else torch.full((len(TOKENS),), temperature),
    )


def values_of(model: LanguageModel, temperature: float | None = None) -> torch.Tensor:
    engine = build_engine(EngineConfig(), model)
    assert engine.capabilities.value_head
    (outputs,) = asyncio.run(engine.forward([batch(temperature)], Want(values=True)))
    assert outputs.values_T is not None and outputs.values_T.dtype == torch.float32
    assert not outputs.logprobs_T.any()
    return outputs.values_T


def load(folder: Path, head: ValueHead | None = ValueHead.LOADED) -> LanguageModel:
    config = ModelConfig(path=str(folder), kernels=Kernels.TORCH)
    return load_model(config, vocab_size=96, seed=0, value_head=head)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_classifier_of_transformers_gives_its_own_logits(family: str, tmp_path: Path) -> None:
    """Every row, packed: the reference is transformers' own model on one text at a time. No output matrix is needed."""
    torch.manual_seed(1)
    config = tiny_config(family)
    config.num_labels = 1
    theirs = AutoModelForTokenClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = torch.cat([theirs(part[None]).logits[0, :, 0] for part in TOKENS.split(LENGTHS)])
    assert expected.std() > 0.01
    assert torch.allclose(values_of(load(tmp_path)), expected, atol=3e-5 * float(expected.abs().max()))


def test_a_language_model_saved_with_a_value_head_by_trl(tmp_path: Path) -> None:
    """The wrapper saves the language model's folder with `v_head.summary.*` among its weights."""
    module = tiny_module("qwen3")
    weight, bias = torch.randn(1, 32), torch.randn(1)
    state = module.state_dict() | {"v_head.summary.weight": weight, "v_head.summary.bias": bias}
    module.save_pretrained(tmp_path, state_dict=state)
    plain = tiny_model("qwen3")
    make_value_model(plain.module, head := load_value_head(tmp_path))
    assert torch.equal(head.weight, weight) and torch.equal(head.bias, bias)
    assert torch.equal(values_of(load(tmp_path)), values_of(plain))
    assert load(tmp_path, None).value_head is None, "without being asked for, the head stays where it is"


def test_a_fresh_head_gives_zero_and_is_trained_saved_and_restored_with_its_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    names = {name for name, _ in model.state()}
    make_value_model(model.module)
    assert {name for name, _ in model.state()} == names - {"lm_head.weight"} | {"score.weight"}
    assert not values_of(model).any()
    assert model.value_head is not None
    with torch.no_grad():
        model.value_head.weight.normal_()
    expected = values_of(model)
    copy = model.clone()
    assert torch.equal(values_of(copy), expected)
    assert copy.value_head is not None and copy.value_head is not model.value_head
    engine = build_engine(EngineConfig(), model)
    asyncio.run(engine.save(tmp_path))
    other = tiny_model("qwen3", seed=5)
    make_value_model(other.module)
    restored = build_engine(EngineConfig(), other)
    asyncio.run(restored.load(tmp_path))
    assert torch.equal(values_of(other), expected)
    assert dict(restored.weights())["score.weight"].shape == (1, 32)


def test_values_are_not_divided_by_a_temperature() -> None:
    """A26."""
    model = tiny_model("qwen3")
    make_value_model(model.module, torch.nn.Linear(32, 1))
    assert torch.equal(values_of(model), values_of(model, temperature=0.5))


def test_a_saved_value_model_is_a_sequence_classifier_for_everybody(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    make_value_model(model.module)
    assert model.value_head is not None
    with torch.no_grad():
        model.value_head.weight.normal_()
    model.module.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    theirs, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        ends = torch.cat([theirs(part[None]).logits[0] for part in TOKENS.split(LENGTHS)])
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    assert torch.allclose(values_of(model)[last], ends, atol=1e-5)
    assert torch.equal(values_of(load(tmp_path)), values_of(model))


def test_missing_heads_and_weights_are_named(tmp_path: Path) -> None:
    """verl#6539: a load that fails says which weights were missing; nothing is caught and replaced."""
    module = tiny_module("qwen3")
    module.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"missing score\.weight or .* or v_head\.summary\.weight"):
        load(tmp_path)
    assert load(tmp_path, ValueHead.FRESH).value_head is not None

    weights = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    for head in (None, ValueHead.FRESH):
        with pytest.raises(ConfigError, match=rf"missing {gone}"):
            load(tmp_path, head)
    save_file({k: v for k, v in weights.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing lm_head\.weight"):
        load(tmp_path, None)
    assert load(tmp_path, ValueHead.FRESH).value_head is not None, "a value model has no output matrix"


def test_heads_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    module = tiny_module("qwen3")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle"):
        load_value_head(tmp_path)
    for state, says in (
        ({"score.weight": torch.ones(5, 32)}, r"score\.weight has shape \(5, 32\)"),
        ({"score.weight": torch.ones(1, 32), "v_head.summary.weight": torch.ones(1, 32)}, "more than one head"),
    ):
        module.save_pretrained(tmp_path, state_dict=module.state_dict() | state)
        with pytest.raises(ConfigError, match=says):
            load_value_head(tmp_path)
    fresh = ModelConfig(fresh={"model_type": "qwen3"})
    with pytest.raises(ConfigError, match="no value head to load"):
        load_model(fresh, vocab_size=96, seed=0, value_head=ValueHead.LOADED)


@pytest.mark.parametrize("want", [Want(), Want(values=True, entropy=True), Want(values=True, top_k=2)])
def test_a_value_model_gives_values_and_nothing_else(want: Want) -> None:
    model = tiny_model("qwen3")
    make_value_model(model.module)
    with pytest.raises(EngineError, match="a value model has no output matrix"):
        asyncio.run(build_engine(EngineConfig(), model).forward([batch()], want))
    language = build_engine(EngineConfig(), tiny_model("qwen3"))
    assert not language.capabilities.value_head
    with pytest.raises(EngineError, match="no value head"):
        asyncio.run(language.forward([batch()], Want(values=True)))


def test_outputs_of_a_value_model_cover_the_last_row_of_every_text() -> None:
    """A truncated episode bootstraps from there, and a reward model reads its score there."""
    model = tiny_model("qwen3")
    make_value_model(model.module, torch.nn.Linear(32, 1))
    values_T = values_of(model)
    assert torch.isfinite(values_T).all() and (values_T != 0).all()
