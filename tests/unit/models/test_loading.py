"""Models in, checked language models out; what cannot be packed safely is refused by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from strop.config.model import Kernels, ModelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import OptimParams
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import ConfigError, EngineError
from strop.models.attention import NAME, PackedAttention
from strop.models.loading import fresh_config, load_model, prepare, refuse_unpackable
from strop.ops.select import Impl
from strop.types import Layout, Metrics, Outputs, Want
from tests.tiny_models import DENSE, EXPERT_MODELS, FAMILIES, REFUSED, tiny_config, tiny_model, tiny_module

TOKENS = torch.tensor([5, 9, 3, 44, 7, 8, 5, 60, 61, 62, 9])
LENGTHS = (4, 1, 6)


@pytest.mark.parametrize("family", [*DENSE, *EXPERT_MODELS])
def test_packed_logits_are_those_of_separate_texts_in_plain_transformers(family: str) -> None:
    """An independent reference: transformers' own eager model, one text at a time, none of our code."""
    plain = tiny_module(family, attention="eager").eval()
    model = tiny_model(family)
    layout = Layout(LENGTHS)
    with torch.no_grad():
        hidden = model.hidden(TOKENS, torch.from_numpy(layout.positions_T), PackedAttention(layout, Impl.TORCH))
        got = model.logits(hidden)
        expected = torch.cat([plain(part[None], use_cache=False).logits[0] for part in TOKENS.split(LENGTHS)])
    assert expected.std() > 0.05
    assert torch.allclose(got, expected, atol=3e-5 * float(expected.abs().max()))


class _Likelihood:
    want = Want()

    def __call__(self, outputs: Outputs, inputs: None, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        return -outputs.logprobs_T, {}


@pytest.mark.parametrize("family", [*DENSE, *EXPERT_MODELS])
def test_packed_gradients_are_those_of_plain_transformers(family: str) -> None:
    plain = tiny_module(family, attention="eager").eval()
    for part in TOKENS.split(LENGTHS):
        if len(part) > 1:
            logits = plain(part[None], use_cache=False).logits[0, :-1]
            nn.functional.cross_entropy(logits, part[1:], reduction="sum").backward()
    model = tiny_model(family)
    engine = Fsdp2Engine(model, EngineConfig())
    targets = torch.cat([torch.cat([part[1:], torch.tensor([-1])]) for part in TOKENS.split(LENGTHS)])
    batch = Batch(
        tokens_T=TOKENS,
        targets_T=targets,
        mask_T=targets >= 0,
        weights_T=(targets >= 0).float(),
        layout=Layout(LENGTHS),
        inputs=None,
    )
    asyncio.run(engine.forward_backward([batch], _Likelihood()))
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    assert expected.keys() == got.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert float((got[name] - grad).abs().max()) <= 2e-5 * scale, name


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_be_packed_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match=f"model_type={family}"):
        refuse_unpackable(tiny_config(family))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_angles_that_depend_on_the_batch_are_refused(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    config = tiny_config("qwen3")
    config.rope_parameters = rope
    with pytest.raises(ConfigError, match=f"rope_type={kind}"):
        refuse_unpackable(config)


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_a_head_that_does_more_than_a_matrix_is_refused(family: str) -> None:
    FAMILIES[family] = {
        **FAMILIES["llama"],
        **({"logits_scaling": 2.0} if family == "granite" else {"logit_scale": 0.5}),
    }
    try:
        with pytest.raises(EngineError, match="more than its output matrix"):
            tiny_model(family)
    finally:
        del FAMILIES[family]


def test_a_leak_is_found_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention function that forgets the boundaries must not get past the loader."""
    forgetful = lambda q, k, v, layout, **rest: _packed(q, k, v, Layout((layout.num_tokens,)), **rest)  # noqa: E731
    from strop.models import attention

    _packed = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", forgetful)
    with pytest.raises(EngineError, match="reach each other"):
        prepare(tiny_module("llama"), Impl.TORCH)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_common_families_run_fused(family: str) -> None:
    fused = tiny_model(family).fused
    assert {name.removeprefix("Llama").removeprefix("Qwen3").removeprefix("Qwen2") for name in fused} == {
        "Attention", "MLP", "RMSNorm",
    }  # fmt: skip


def test_fusing_touches_no_other_model() -> None:
    before = tiny_module("qwen3")
    tiny_model("qwen3")
    assert not [m for m in before.modules() if "forward" in vars(m)]


def test_float64_models_are_float64_throughout() -> None:
    """transformers' norms compute in float32; strop's do not, or packing could not be proven to 1e-10."""
    layout = Layout((len(TOKENS),))
    model = tiny_model("qwen3", torch.float64)
    other = tiny_model("qwen3", torch.float64)
    with torch.no_grad():
        name, weight = next(iter(other.state()))
        weight += 1e-12 * weight.abs()
        run = [
            m.hidden(TOKENS, torch.from_numpy(layout.positions_T), PackedAttention(layout, Impl.TORCH))
            for m in (model, other)
        ]
    gap = float((run[0] - run[1]).abs().max())
    assert 0 < gap < 1e-9, name


def test_load_state_is_all_or_nothing() -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state()}
    good = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    for bad in (
        {k: v for k, v in good.items() if k != name},
        good | {"extra.weight": torch.zeros(1)},
        good | {name: torch.zeros(2, 2)},
        good | {name: good[name].double()},
    ):
        with pytest.raises(EngineError, match=r"extra\.weight" if "extra.weight" in bad else r"up_proj"):
            model.load_state(bad.items())
        assert all(torch.equal(tensor, before[n]) for n, tensor in model.state())
    model.load_state(good.items())
    assert all(not tensor.any() for _, tensor in model.state())


def test_a_clone_shares_nothing_and_computes_the_same() -> None:
    model = tiny_model("llama")
    twin = model.clone()
    layout = Layout(LENGTHS)
    with torch.no_grad():
        run = [
            m.hidden(TOKENS, torch.from_numpy(layout.positions_T), PackedAttention(layout, Impl.TORCH))
            for m in (model, twin)
        ]
        assert torch.equal(*run)
        for _, tensor in model.state():
            tensor.zero_()
        again = twin.hidden(TOKENS, torch.from_numpy(layout.positions_T), PackedAttention(layout, Impl.TORCH))
    assert torch.equal(again, run[1])
    assert not any(p.requires_grad for p in twin.module.parameters())


def test_a_folder_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    module = tiny_module("llama")
    module.save_pretrained(tmp_path / "m")
    model = load_model(ModelConfig(path=str(tmp_path / "m"), kernels=Kernels.TORCH), vocab_size=0, seed=0)
    expected = module.state_dict()
    state = dict(model.state())
    assert "lm_head.weight" not in state
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "llama"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").config._attn_implementation != NAME


def test_fresh_weights_follow_the_seed_and_the_tokenizer() -> None:
    fields = {k: v for k, v in FAMILIES["qwen3"].items() if k != "vocab_size"} | {"model_type": "qwen3"}
    config = ModelConfig(fresh=fields, kernels=Kernels.TORCH)
    one, same, other = (load_model(config, vocab_size=33, seed=s) for s in (1, 1, 2))
    assert one.vocab_size == 33
    pairs = list(zip(one.state(), same.state(), other.state(), strict=True))
    assert all(torch.equal(a[1], b[1]) for a, b, _ in pairs)
    assert any(not torch.equal(a[1], c[1]) for a, _, c in pairs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({}, "no model_type"), ({"model_type": "qwen33"}, "model_type=qwen33")],
)
def test_fresh_configurations_are_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh_config(fields, 10)


def test_a_missing_folder_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(ModelConfig(path=str(tmp_path / "none")), vocab_size=0, seed=0)


def test_a_step_moves_every_parameter() -> None:
    """Every trainable parameter of a dense model has a gradient path through the fused forms."""
    model = tiny_model("qwen3")
    engine = Fsdp2Engine(model, EngineConfig())
    before = {n: t.clone() for n, t in model.state()}
    targets = torch.cat([TOKENS[1:], torch.tensor([-1])])
    batch = Batch(
        tokens_T=TOKENS,
        targets_T=targets,
        mask_T=targets >= 0,
        weights_T=torch.ones(11),
        layout=Layout((11,)),
        inputs=None,
    )
    asyncio.run(engine.forward_backward([batch], _Likelihood()))
    asyncio.run(engine.optim_step(OptimParams(lr=0.1)))
    assert all(not torch.equal(before[n], t) for n, t in model.state())


def test_a_gguf_file_is_converted_once_for_model_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, tokenizer and end tokens each ask for the folder; a file that changes is converted anew."""
    from strop.models import loading

    made: list[Path] = []

    def convert(source: Path, target: Path) -> Path:
        made.append(target)
        target.mkdir(parents=True)
        return target

    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "convert_gguf", convert)
    (tmp_path / "m.gguf").write_bytes(b"one")
    config = ModelConfig(path=str(tmp_path / "m.gguf"))
    assert loading.model_folder(config) == loading.model_folder(config) == made[0]
    (tmp_path / "m.gguf").write_bytes(b"another")
    assert loading.model_folder(config) == made[1] != made[0]
