"""Which routers are a model's own, and what each family's formula makes of scores."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from strop.errors import EngineError
from strop.models.moe import ROUTERS, Routing, find_routers, has_routers, text_config
from strop.types import Routes
from tests.tiny_models import EXPERT_MODELS, FAMILIES, tiny_module

LAYERS = {"deepseek_v3": (1, 2), "glm4_moe": (1, 2)}  # a dense layer leads
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip


def made(family: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **(FAMILIES[family] | fields))
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_every_familys_routers_by_layer(family: str) -> None:
    types = {} if "layer_types" not in FAMILIES[family] else {"layer_types": ["full_attention"] * 3}
    module = made(family, num_hidden_layers=3, **types)
    found = find_routers(module)
    assert tuple(router.layer for router in found) == LAYERS.get(family, (0, 1, 2))
    assert [(router.num_experts, router.top_k) for router in found] == [(4, 2)] * len(found)
    names = {part: name for name, part in module.named_modules()}
    assert all(names[router.module].startswith(f"model.layers.{router.layer}.mlp") for router in found)
    assert has_routers(module) and not has_routers(made("qwen3"))


def test_layers_that_the_configuration_says_are_dense() -> None:
    module = made("qwen3_moe", num_hidden_layers=5, decoder_sparse_step=2)
    assert [router.layer for router in find_routers(module)] == [1, 3]
    module = made("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1, 2])
    assert [router.layer for router in find_routers(module)] == [0, 3]


def test_a_vision_towers_siblings_branch_is_taken() -> None:
    config: Any = AutoConfig.for_model("qwen3_5_moe", text_config=FAMILIES["qwen3_5_moe_text"], vision_config=VISION)
    module = Qwen3_5MoeForConditionalGeneration(config)
    found = find_routers(module)
    assert [router.layer for router in found] == [0, 1]
    layers = module.model.language_model.layers
    assert [router.module for router in found] == [layers[0].mlp.gate, layers[1].mlp.gate]


def test_the_thinker_of_a_model_that_also_hears() -> None:
    audio = {
        "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 32,
        "num_mel_bins": 8, "downsample_hidden_size": 8, "n_window": 4, "max_source_positions": 16,
    }  # fmt: skip
    text = {**FAMILIES["qwen3_moe"], "num_hidden_layers": 3}
    config: Any = AutoConfig.for_model(
        "qwen3_omni_moe_thinker", text_config=text, vision_config=VISION, audio_config=audio
    )
    module = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    assert [router.layer for router in find_routers(module)] == [0, 1, 2]


def test_the_text_branch_of_a_configuration() -> None:
    """Vision and audio siblings count layers too, and are never asked; a configuration that holds itself ends."""
    text = SimpleNamespace(num_hidden_layers=7)
    root: Any = SimpleNamespace(
        vision_config=SimpleNamespace(num_hidden_layers=2),
        audio_config=SimpleNamespace(num_hidden_layers=3),
        thinker_config=SimpleNamespace(text_config=text, num_hidden_layers=None),
    )
    root.text_config = root
    assert text_config(root).num_hidden_layers == 7
    circle: Any = SimpleNamespace()
    circle.text_config = circle
    with pytest.raises(EngineError, match="does not say how many layers"):
        text_config(circle)


def test_a_decoder_that_does_not_run_is_not_looked_at() -> None:
    """H02: a model that built its decoder twice, and a head that looks further ahead, each with routers."""
    module = made("qwen3_moe")
    module.discarded = made("qwen3_moe").model
    module.model.mtp = nn.ModuleDict({"layers": made("qwen3_moe").model.layers})
    module.model.layers.append(made("qwen3_moe").model.layers[0])  # kept after the last, as some checkpoints do
    layers = module.model.layers
    assert [router.module for router in find_routers(module)] == [layers[0].mlp.gate, layers[1].mlp.gate]


def test_two_routers_in_a_layer_are_refused() -> None:
    module = made("qwen3_moe")
    module.model.layers[1].second = made("qwen3_moe").model.layers[0].mlp
    with pytest.raises(EngineError, match="Qwen3MoeForCausalLM has 2 routers in layer 1"):
        find_routers(module)


def test_fewer_routers_than_the_configuration_says_are_refused() -> None:
    module = made("qwen3_moe", num_hidden_layers=3)
    module.model.layers[1].mlp = made("qwen3").model.layers[0].mlp
    with pytest.raises(EngineError, match=r"routers in layers \[0, 2\], but its configuration says \[0, 1, 2\]"):
        find_routers(module)
    with pytest.raises(EngineError, match="Qwen3ForCausalLM has no router that strop knows"):
        find_routers(made("qwen3"))


def test_a_router_of_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    native = modeling_qwen3_moe.Qwen3MoeTopKRouter.forward

    def doubled(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, ids = native(self, hidden_states)
        return logits, 2 * weights, ids

    module = tiny_module("qwen3_moe", attention="eager")
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", doubled)
    with pytest.raises(EngineError, match=r"formula for the weights of Qwen3MoeTopKRouter \(layer 0\)"):
        find_routers(module)


def test_weights_of_replayed_experts_by_hand() -> None:
    """H08: from the scores of the moment at the replayed ids; the gradient flows to the scores."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    for name in ("Qwen3_5MoeTopKRouter", "MixtralTopKRouter", "GptOssTopKRouter"):
        free = ROUTERS[name](nn.Module(), logits, torch.tensor([[0, 1]]))
        replayed = ROUTERS[name](nn.Module(), logits, torch.tensor([[0, 2]]))
        assert free.tolist() == [pytest.approx([0.7311, 0.2689], abs=1e-4)]
        assert replayed.tolist() == [pytest.approx([0.8808, 0.1192], abs=1e-4)]
        (gradient,) = torch.autograd.grad(replayed[0, 0], logits)
        assert gradient.tolist() == [pytest.approx([0.1050, 0.0, -0.1050, 0.0], abs=1e-4)]


def scaled(name: str, ids: list[int], **fields: object) -> list[float]:
    module = nn.Module()
    vars(module).update(fields)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    return ROUTERS[name](module, logits, torch.tensor([ids]))[0].tolist()


def test_other_formulas_by_hand() -> None:
    # sigmoids: .8808, .7311, .5, .2689; softmax over all: .6439, .2369, .0871, .0321
    assert scaled("MiniMaxM2TopKRouter", [0, 2]) == pytest.approx([0.6379, 0.3621], abs=1e-4)
    for name in ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"):
        assert scaled(name, [1, 3], norm_topk_prob=True, routed_scaling_factor=2.5) == pytest.approx(
            [1.8278, 0.6724], abs=2e-4
        )
        assert scaled(name, [1, 3], norm_topk_prob=False, routed_scaling_factor=1.0) == pytest.approx(
            [0.7311, 0.2689], abs=1e-4
        )
    assert scaled("Qwen3MoeTopKRouter", [0, 3], norm_topk_prob=False) == pytest.approx([0.6439, 0.0321], abs=1e-4)
    assert scaled("Qwen3MoeTopKRouter", [0, 3], norm_topk_prob=True) == pytest.approx([0.9526, 0.0474], abs=1e-4)


def test_a_router_takes_part_in_one_pass_at_a_time() -> None:
    found = find_routers(made("qwen3_moe"))
    with Routing(found, 3).bound():
        with (
            pytest.raises(EngineError, match="router of layer 0 takes part in another pass"),
            Routing(found, 3).bound(),
        ):
            pass
        assert all("forward" in vars(router.module) for router in found)
    assert not any("forward" in vars(router.module) for router in found)


def test_a_forward_of_the_instance_comes_back() -> None:
    """A layer's router may be wrapped already, by checkpointing."""
    found = find_routers(made("qwen3_moe"))
    calls: list[int] = []
    native: Callable[..., Any] = found[0].module.forward

    def wrapped(x: Tensor) -> Any:
        calls.append(len(x))
        return native(x)

    found[0].module.forward = wrapped
    with Routing(found, 5).bound():
        found[0].module(torch.zeros(5, 32))
    assert calls == [5] and vars(found[0].module)["forward"] is wrapped


def test_a_router_that_does_not_run_is_named() -> None:
    found = find_routers(made("qwen3_moe"))
    routing = Routing(found, 5)
    with routing.bound():
        found[1].module(torch.zeros(5, 32))
    with pytest.raises(EngineError, match=r"routers of layers \[0\] did not run"):
        routing.check()


def test_another_number_of_tokens_is_refused() -> None:
    found = find_routers(made("qwen3_moe"))
    with Routing(found, 5).bound(), pytest.raises(EngineError, match="layer 0 routes 4 tokens in a pass over 5"):
        found[0].module(torch.zeros(4, 32))


def test_running_again_does_the_same_and_counts_once() -> None:
    """Recomputation replays the same rows: nothing is taken from a queue."""
    found = find_routers(made("qwen3_moe"))
    given = Routes((0, 1), np.array([[[3, 1], [0, 2]]] * 4, np.int16))
    routing = Routing(found, 4, given=given)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with routing.bound():
        first = [[router.module(x)[1:] for router in found] for _ in range(3)]
    for weights, ids in (first[0][0], first[1][0], first[2][0]):
        assert ids.tolist() == [[3, 1]] * 4 and torch.equal(weights, first[0][0][0])
    assert float(routing.metrics()["router/replayed"].result) == 1.0
    assert routing.taken().experts_TLK.tolist() == given.experts_TLK.tolist()
