"""Adapters: off they change nothing, on they are PEFT's, and none of them notices another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.config.adapter import AdapterConfig
from strop.errors import CheckpointError, ConfigError, EngineError
from strop.models.attention import PackedAttention
from strop.models.loading import LanguageModel
from strop.models.lora import Adapter, add_adapter, count_matrices, find_adapter, import_adapter, targets
from strop.ops.select import Impl
from strop.types import Layout
from tests.tiny_models import DENSE, EXPERT_MODELS, tiny_model, tiny_module

TOKENS = torch.tensor([5, 6, 7, 8, 9, 10, 11])


def logits(model: LanguageModel) -> Tensor:
    layout = Layout((7,))
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS, torch.arange(7), PackedAttention(layout, model.impl)))


def shake(adapter: Adapter, seed: int = 1, size: float = 0.3) -> None:
    """As if it had been trained: B is no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def every_target(model: LanguageModel) -> AdapterConfig:
    kinds = ["attention", "mlp", "experts", "unembedding"]
    there = []
    for kind in kinds:
        try:
            targets(model.module, (kind,))
        except ConfigError:
            continue
        there.append(kind)
    return AdapterConfig(rank=3, alpha=6.0, targets=tuple(there))


@pytest.mark.parametrize("family", [*DENSE, *EXPERT_MODELS])
def test_an_adapter_that_is_off_changes_no_bit_and_merging_is_what_it_computes(family: str) -> None:
    model = tiny_model(family)
    base = logits(model)
    weights = {name: tensor.clone() for name, tensor in model.state()}
    adapter = add_adapter(model, "a", every_target(model))
    with adapter.on():
        assert torch.allclose(logits(model), base, atol=1e-6), "B begins at zero"
    shake(adapter)
    assert torch.equal(logits(model), base)
    assert {name: t.shape for name, t in model.state()} == {name: t.shape for name, t in weights.items()}
    with adapter.on():
        changed = logits(model)
    assert (changed - base).abs().max() > 1e-2
    merged = dict(adapter.merged())
    assert all(torch.equal(t, weights[name]) for name, t in model.state()), "merging leaves the model as it was"
    other = tiny_model(family)
    if adapter.unties:
        assert merged.keys() - weights.keys() == {"lm_head.weight"}
        other.module.lm_head.weight = torch.nn.Parameter(other.module.lm_head.weight.detach().clone())
    other.load_state(merged.items())
    assert torch.allclose(logits(other), changed, rtol=1e-4, atol=1e-4 * float(changed.abs().max()))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_matrices_are_counted_without_weights(family: str) -> None:
    model = tiny_model(family)
    config = every_target(model)
    with torch.device("meta"):
        skeleton = tiny_module(family)
    counted = count_matrices(skeleton, config)
    adapter = add_adapter(model, "a", config)
    assert counted == sum(p.numel() for p in adapter.parameters().values())


def test_strop_s_fused_forms_see_the_adapter() -> None:
    """They hold modules: the ones that PEFT has wrapped must be those."""
    plain, fast = tiny_model("qwen3"), tiny_model("qwen3", impl=Impl.NATIVE)
    assert fast.fused
    found: list[Tensor] = []
    for model in (plain, fast):
        adapter = add_adapter(model, "a", AdapterConfig(rank=4, targets=("attention", "mlp")))
        shake(adapter)
        with adapter.on():
            found.append(logits(model))
    assert torch.allclose(found[0], found[1], atol=1e-4)
    assert not torch.allclose(found[0], logits(plain), atol=1e-2)


def test_adapters_of_one_model_do_not_notice_each_other() -> None:
    alone = tiny_model("qwen3")
    first = add_adapter(alone, "a", AdapterConfig(rank=2))
    shake(first)
    with first.on():
        expected = logits(alone)
    both = tiny_model("qwen3")
    a = add_adapter(both, "a", AdapterConfig(rank=2))
    b = add_adapter(both, "b", AdapterConfig(rank=5, targets=("mlp", "unembedding"), seed=3))
    shake(a)
    shake(b, seed=9)
    with b.on():
        assert not torch.equal(logits(both), expected)
    with a.on():
        assert torch.equal(logits(both), expected)
        assert a.head() is None
    assert b.head() is not None
    assert a.parameters().keys().isdisjoint(name for name in b.parameters() if "lm_head" in name)


def test_the_seed_alone_draws_an_adapter() -> None:
    def drawn(seed: int, noise: int) -> dict[str, Tensor]:
        torch.manual_seed(noise)
        return dict(add_adapter(tiny_model("llama"), "a", AdapterConfig(rank=2, seed=seed)).parameters())

    one, same, other = drawn(1, 5), drawn(1, 6), drawn(2, 5)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    state = torch.random.get_rng_state()
    add_adapter(tiny_model("llama"), "a", AdapterConfig(rank=2))
    torch.manual_seed(0)
    assert not torch.equal(state, torch.empty(0))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gpt2"])
def test_a_folder_is_peft_s_own(family: str, tmp_path: Path) -> None:
    """What is written here computes the same in PEFT, alpha included, and comes back."""
    model = tiny_model(family)
    base = tiny_module(family, attention="eager")
    base.load_state_dict(dict(model.module.state_dict()))
    adapter = add_adapter(model, "a", every_target(model))
    shake(adapter)
    with adapter.on():
        expected = logits(model)
    adapter.save(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["peft_type"]) == (3, 6.0, "LORA")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        theirs = loaded(input_ids=TOKENS[None]).logits[0]
    assert torch.allclose(theirs, expected, rtol=1e-4, atol=1e-4)
    again = tiny_model(family)
    back = import_adapter(again, "other", tmp_path / "adapter")
    with back.on():
        assert torch.equal(logits(again), expected)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"adapter\.targets: this model has no experts; it has attention, mlp"):
        add_adapter(model, "a", AdapterConfig(rank=2, targets=("experts",)))
    with pytest.raises(ConfigError, match=r"adapter\.rank is 0"):
        add_adapter(model, "a", AdapterConfig())
    adapter = add_adapter(model, "a", AdapterConfig(rank=2))
    assert find_adapter(model, "a").parameters().keys() == adapter.parameters().keys()
    with pytest.raises(EngineError, match="no adapter is called 'b'; there are a"):
        find_adapter(model, "b")
    for name in ("a", "", "x.y"):
        with pytest.raises(EngineError, match="adapter"):
            add_adapter(model, name, AdapterConfig(rank=2))
    own = {name: p.detach().clone() for name, p in adapter.parameters().items()}
    broken = dict(own)
    first = next(iter(broken))
    broken[first] = torch.zeros(9, 9)
    del broken[list(broken)[-1]]
    with pytest.raises(EngineError, match="missing"):
        adapter.load(broken)
    assert all(torch.equal(own[name], p) for name, p in adapter.parameters().items())
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        import_adapter(model, "b", tmp_path)
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="only plain LoRA"):
        import_adapter(model, "b", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), tmp_path / "adapter_model.safetensors")
    with pytest.raises(EngineError, match="missing"):
        import_adapter(model, "b", tmp_path)


def test_routers_are_never_adapted() -> None:
    model = tiny_model("qwen3_moe")
    adapter = add_adapter(model, "a", AdapterConfig(rank=2, targets=("attention", "experts")))
    assert all(".gate." not in name for name in adapter.parameters())
    assert any("experts" in name for name in adapter.parameters())
