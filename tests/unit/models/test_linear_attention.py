"""Whole models with gated delta layers: the same values and gradients however their texts are packed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from strop.algos.losses import CrossEntropy
from strop.config.model import Kernels, ModelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import ConfigError, EngineError
from strop.models import linear_attention
from strop.models.attention import PackedAttention
from strop.models.loading import LanguageModel, load_model, prepare, refuse_unpackable
from strop.ops.select import Impl
from strop.types import Layout
from tests.tiny_models import FAMILIES, LINEAR_MODELS, tiny_config, tiny_model, tiny_module

LENGTHS = (1, 2, 3, 17, 33, 5)
TOKENS = torch.randint(3, 96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
PACKED = [*LINEAR_MODELS, "gpt_oss"]


def run(model: LanguageModel, parts: list[tuple[Tensor, Layout]], seeds: list[Tensor]) -> dict[str, Tensor]:
    """Hidden states of several packs joined, and the gradient of every parameter for a fixed gradient of theirs."""
    model.module.requires_grad_(True).zero_grad()
    hidden: list[Tensor] = []
    for (tokens_T, layout), seed_TD in zip(parts, seeds, strict=True):
        out_TD = model.hidden(tokens_T, torch.from_numpy(layout.positions_T), PackedAttention(layout, model.impl))
        (out_TD * seed_TD.to(out_TD.dtype)).sum().backward()
        hidden.append(out_TD.detach())
    grads = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    return {"hidden": torch.cat(hidden), **grads}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    """Each within `tolerance` of the largest gradient; hidden states within `tolerance` of their own size."""
    assert a.keys() == b.keys()
    scale = max(float(g.abs().max()) for name, g in a.items() if name != "hidden")
    for name in a:
        size = float(a[name].abs().max()) if name == "hidden" else scale
        assert float((a[name] - b[name]).abs().max()) <= tolerance * size, name


def seeds_of(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in lengths]


@pytest.fixture
def _exact_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' routers round their weights to float32; without that the rest can be held to 1e-10 in float64."""
    own = nn.functional.softmax

    def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        return own(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(nn.functional, "softmax", softmax)


@pytest.mark.usefixtures("_exact_routers")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", PACKED)
def test_a_pack_is_its_texts_alone(family: str, dtype: torch.dtype, tolerance: float):
    """A47: values, and gradients of every parameter; texts of one token and shorter than the kernel among them."""
    model = tiny_model(family, dtype)
    seeds = seeds_of(LENGTHS)
    alone = run(model, [(t, Layout((len(t),))) for t in TOKENS.split(LENGTHS)], seeds)
    packed = run(model, [(TOKENS, Layout(LENGTHS))], [torch.cat(seeds)])
    assert_close(alone, packed, tolerance)
    expected = {name for name, _ in model.module.named_parameters() if "lm_head" not in name}
    assert packed.keys() - {"hidden"} == expected
    assert all(bool(g.any()) for g in packed.values())
    order = [3, 0, 5, 4, 2, 1]
    texts, lengths = TOKENS.split(LENGTHS), tuple(LENGTHS[i] for i in order)
    turned = run(
        model,
        [(torch.cat([texts[i] for i in order]), Layout(lengths))],
        [torch.cat([seeds[i] for i in order])],
    )
    parts = turned["hidden"].split(lengths)
    turned["hidden"] = torch.cat([parts[order.index(i)] for i in range(len(order))])
    assert_close(alone, turned, tolerance)


@pytest.mark.usefixtures("_exact_routers")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("prefix", [1, 2, 19])
@pytest.mark.parametrize("family", PACKED)
def test_a_shared_prefix_is_a_repeated_one(family: str, prefix: int, dtype: torch.dtype, tolerance: float):
    """The prefix's gradient is the sum of its branches'; prefixes shorter and longer than kernel, window and chunk."""
    model = tiny_model(family, dtype)
    branches = (1, 2, 23)
    head, *tails = TOKENS[: prefix + sum(branches)].split((prefix, *branches))
    seed, *rest = seeds_of((prefix, *branches))
    shared = run(
        model,
        [(torch.cat((head, *tails)), Layout((prefix, *branches), (-1, 0, 0, 0)))],
        [torch.cat((seed, *rest))],
    )
    repeated = run(
        model,
        [(torch.cat((head, tail)), Layout((prefix + len(tail),))) for tail in tails],
        [torch.cat((seed if i == 0 else torch.zeros_like(seed), part)) for i, part in enumerate(rest)],
    )
    parts = repeated["hidden"].split([prefix + n for n in branches])
    repeated["hidden"] = torch.cat((parts[0][:prefix], *(part[prefix:] for part in parts)))
    assert_close(shared, repeated, tolerance)


@pytest.mark.parametrize("family", PACKED)
def test_a_long_text_is_that_of_plain_transformers(family: str):
    """Several chunks, against transformers' own eager model."""
    plain, model, text = tiny_module(family, attention="eager").eval(), tiny_model(family), TOKENS.repeat(2)[:110]
    layout = Layout((len(text),))
    with torch.no_grad():
        expected = plain(text[None], use_cache=False).logits[0]
        hidden = model.hidden(text, torch.from_numpy(layout.positions_T), PackedAttention(layout, Impl.TORCH))
    torch.testing.assert_close(model.logits(hidden), expected, rtol=0, atol=5e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_5_text"])
def test_a_neighbours_tokens_change_no_bit(family: str):
    """A47, at a fixed shape: the other texts' hidden states, and the gradient of a pack where the neighbour counts for
    nothing."""
    model, layout, seed = tiny_model(family), Layout((20, 33, 8)), torch.cat(seeds_of((20, 33, 8)))
    seed[:20] = 0.0
    tokens = TOKENS
    other = tokens.clone()
    other[:20] = (tokens[:20] + 7) % 90 + 3
    results = [run(model, [(each, layout)], [seed]) for each in (tokens, other)]
    assert not torch.equal(results[0]["hidden"][:20], results[1]["hidden"][:20])
    assert torch.equal(results[0].pop("hidden")[20:], results[1].pop("hidden")[20:])
    for name in results[0].keys() - {"model.embed_tokens.weight"}:
        assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.parametrize("activations", [{"checkpoint_every": 1}, {"offload": True, "offload_min_kib": 0}])
def test_memory_options_change_no_bit_of_the_gradient(activations: dict[str, object]):
    """Layers computed again, and what they keep moved away and back, through the hooked forward."""
    layout = Layout((9, 20, 4), (-1, 0, 0))
    targets_T = TOKENS[:33].roll(-1)
    batch = Batch(
        tokens_T=TOKENS[:33],
        targets_T=targets_T,
        mask_T=torch.arange(33) >= 9,
        weights_T=torch.linspace(0.5, 1.5, 33),
        layout=layout,
        inputs=None,
    )
    grads: list[dict[str, Tensor | None]] = []
    for options in ({}, activations):
        model = tiny_model("qwen3_5_text")
        engine = Fsdp2Engine(model, EngineConfig.model_validate({"activations": options}))
        asyncio.run(engine.forward_backward([batch], CrossEntropy()))
        grads.append({name: p.grad for name, p in model.module.named_parameters()})
    for name, grad in grads[0].items():
        other = grads[1][name]
        assert grad is not None and other is not None and torch.equal(grad, other), name


@pytest.mark.parametrize("family", LINEAR_MODELS)
def test_bfloat16_models_run(family: str):
    model, exact = tiny_model(family, torch.bfloat16), tiny_model(family)
    layout = Layout((21,))
    with torch.no_grad():
        wide, narrow = (
            m.hidden(TOKENS[:21], torch.arange(21), PackedAttention(layout, Impl.TORCH)) for m in (exact, model)
        )
    assert narrow.dtype == torch.bfloat16
    assert nn.functional.cosine_similarity(wide, narrow.float(), dim=-1).mean() > 0.98


def test_every_layer_is_hooked_and_no_other_model_touched():
    before = tiny_module("qwen3_5_text")
    model = tiny_model("qwen3_5_text")
    assert model.fused["Qwen3_5GatedDeltaNet"] == 1
    assert not [m for m in before.modules() if "forward" in vars(m)]
    state = model.cache_shape.states
    assert state is not None
    assert (state.layers, model.cache_shape.layers) == ((0,), (1,))
    assert (state.taps, state.conv_channels, state.heads, state.key_channels, state.value_channels) == (4, 96, 4, 8, 16)


@pytest.mark.parametrize("family", LINEAR_MODELS)
def test_recipes_may_name_these_models(family: str):
    refuse_unpackable(tiny_config(family))
    fresh = {name: value for name, value in FAMILIES[family].items() if name != "vocab_size"}
    config = ModelConfig(fresh={**fresh, "model_type": family}, kernels=Kernels.TORCH)
    assert load_model(config, vocab_size=96, seed=0).cache_shape.states is not None


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_of_a_model_that_sees_the_text_part_is_loaded(family: str, tmp_path: Path):
    """Qwen3.5 comes as one folder with a vision part."""
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = AutoConfig.for_model(family, text_config=FAMILIES[f"{family}_text"], vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), kernels=Kernels.TORCH), vocab_size=0, seed=0)
    assert model.config.model_type == f"{family}_text"
    assert model.max_length == 128
    state = dict(model.state())
    for name, weight in whole.get_submodule("model.language_model").state_dict().items():
        assert torch.equal(state[f"model.{name}"], weight), name


def test_a_clone_has_layers_of_its_own():
    model = tiny_model("qwen3_5_text")
    twin, layout = model.clone(), Layout((9,))
    for _, weight in model.state():
        weight.detach().zero_()
    with torch.no_grad():
        hidden = twin.hidden(TOKENS[:9], torch.arange(9), PackedAttention(layout, Impl.TORCH))
    assert hidden.abs().max() > 0.1


@pytest.mark.parametrize("what", ["_separate", "UNIT_EPS"])
def test_a_form_that_differs_from_transformers_is_found(monkeypatch: pytest.MonkeyPatch, what: str):
    if what == "UNIT_EPS":
        monkeypatch.setattr(linear_attention, what, 1.0)
    else:
        own = linear_attention._separate

        def swapped(module: nn.Module, x_TD: Tensor) -> linear_attention._Projected:
            made = own(module, x_TD)
            return linear_attention._Projected(made.qkv_TF, made.gate_THC, made.rate_TH, made.strength_TH)

        monkeypatch.setitem(linear_attention.PROJECTIONS, "Qwen3_5GatedDeltaNet", swapped)
    with pytest.raises(EngineError, match="does not give transformers' numbers"):
        prepare(tiny_module("qwen3_5_text"), Impl.TORCH)


@pytest.mark.parametrize("what", ["conv", "rule", "branches"])
def test_a_leak_is_found_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, what: str):
    """The loader's probes see a convolution, a state and a prefix that forget where sequences end."""
    from strop.models import attention

    own_conv, own_rule = attention.causal_conv, attention.gated_delta_rule

    def one(layout: Layout) -> Layout:
        if what == "branches":  # the branches become one text that goes on from the prefix
            roots = [s for s in range(len(layout.lengths)) if layout.parents[s] < 0]
            of_root = np.array([s if p < 0 else p for s, p in enumerate(layout.parents)])
            return Layout(tuple(int(layout.lengths_S[of_root == root].sum()) for root in roots))
        return Layout((layout.num_tokens,))

    if what != "rule":
        monkeypatch.setattr(attention, "causal_conv", lambda x, w, layout: own_conv(x, w, one(layout)))
    if what != "conv":

        def forgetful(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, layout: Layout, *, impl: Impl
        ) -> tuple[Tensor, Tensor | None]:
            return own_rule(q, k, v, g, b, one(layout), impl=impl)

        monkeypatch.setattr(attention, "gated_delta_rule", forgetful)
    with pytest.raises(EngineError, match="apart" if what == "branches" else "reach each other"):
        prepare(tiny_module("qwen3_5_text"), Impl.TORCH)


def test_other_activations_are_refused():
    module = tiny_module("qwen3_5_text")
    layer = module.get_submodule("model.layers.0.linear_attn")
    vars(layer)["activation"] = "gelu"
    with pytest.raises(EngineError, match="hidden_act=gelu"):
        prepare(module, Impl.TORCH)


def test_other_kinds_of_linear_attention_stay_refused():
    with pytest.raises(
        ConfigError, match=r"olmo_hybrid.*linear_attention of qwen3_5_moe_text, qwen3_5_text, qwen3_next"
    ):
        refuse_unpackable(tiny_config("olmo_hybrid"))
