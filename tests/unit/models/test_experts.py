"""Experts to checkpoints and back, bitwise, with 12 experts that are each filled with their own numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from strop.config.recipe import EngineConfig
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import EngineError
from strop.models.experts import FAMILIES as NAMED
from strop.models.experts import Form, Order, export_experts, import_experts, join_gate_up, split_gate_up
from strop.models.patterns import chosen
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.rollout.delta import apply_deltas, deltas
from strop.weights.publish import publish
from tests.tiny_models import EXPERT_MODELS, FAMILIES, tiny_model

E = 12  # two digits: in the order of names, expert 10 would come before expert 2


def made(family: str) -> PreTrainedModel:
    fields = FAMILIES[family] | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E)
    known = AutoConfig.for_model(family).to_dict()
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k in known or k in FAMILIES[family]})
    )
    with torch.no_grad():
        for n, (name, tensor) in enumerate(module.state_dict().items()):
            if ".experts." in name:  # every element says which expert and which place it is of
                size = tensor[0].numel()
                tensor.copy_((torch.arange(tensor.numel()) + n * E * size).view(tensor.shape))
    return module


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_there_and_back_changes_no_bit(family: str, form: Form) -> None:
    own = made(family).state_dict()
    sent = list(export_experts(family, own.items(), form))
    assert len({name for name, _ in sent}) == len(sent)
    back = list(import_experts(family, sent[::-1], E))  # shards come in any order
    assert len(back) == len(own)
    for name, tensor in back:
        assert torch.equal(tensor, own[name]) and tensor.dtype == own[name].dtype, name


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_names_and_numbers_are_those_of_a_saved_folder(family: str, tmp_path: Path) -> None:
    module = made(family)
    module.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    saved = load_file(file)
    form = Form.PACKED if family == "gpt_oss" else Form.STREAMED
    ours = dict(export_experts(family, module.state_dict().items(), form))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in saved.items())


def test_gpt_oss_streams_each_expert_in_its_own_orientation() -> None:
    own = made("gpt_oss").state_dict()
    sent = dict(export_experts("gpt_oss", own.items(), Form.STREAMED))
    stem = "model.layers.1.mlp.experts"
    for part, shape in (
        ("gate_up_proj", (32, 96)), ("gate_up_proj_bias", (96,)), ("down_proj", (48, 32)), ("down_proj_bias", (32,)),
    ):  # fmt: skip
        for expert in (0, 2, 10, 11):
            one = sent[f"{stem}.{expert}.{part}"]
            assert one.shape == shape and torch.equal(one, own[f"{stem}.{part}"][expert])


def test_gate_and_up_in_either_order() -> None:
    """E11: gate [1, 2] and up [10, 20]."""
    gate, up = torch.tensor([1, 2]), torch.tensor([10, 20])
    assert join_gate_up(gate, up, Order.CONCATENATED, 0).tolist() == [1, 2, 10, 20]
    assert join_gate_up(gate, up, Order.INTERLEAVED, 0).tolist() == [1, 10, 2, 20]
    x = torch.arange(2 * 6 * 4).view(2, 6, 4)
    for order in Order:
        for dim in (1, 2):
            gate, up = split_gate_up(x, order, dim)
            assert gate.shape == up.shape and torch.equal(join_gate_up(gate, up, order, dim), x)
    assert split_gate_up(x, Order.INTERLEAVED, 2)[1][0, 0].tolist() == [1, 3]


def test_a_checkpoint_that_lacks_experts_is_refused() -> None:
    own = made("qwen3_moe").state_dict()
    sent = list(export_experts("qwen3_moe", own.items(), Form.STREAMED))
    few = [(name, tensor) for name, tensor in sent if ".experts.11.up_proj" not in name]
    with pytest.raises(EngineError, match=r"gate_up_proj: 12 experts are needed"):
        list(import_experts("qwen3_moe", few, E))
    with pytest.raises(EngineError, match=r"experts\.8\..* the model has experts 0 to 7"):
        list(import_experts("qwen3_moe", sent, 8))
    with pytest.raises(EngineError, match="comes twice"):
        list(import_experts("qwen3_moe", [*sent[:9], *sent], E))
    with pytest.raises(EngineError, match="not a weight that an expert of this family has"):
        list(import_experts("mixtral", [("model.layers.0.block_sparse_moe.experts.0.w4.weight", sent[0][1])], E))
    with pytest.raises(EngineError, match="model_type=qwen3 name their experts"):
        list(export_experts("qwen3", own.items(), Form.PACKED))
    assert set(NAMED) == set(EXPERT_MODELS)


def test_names_are_whole_parts() -> None:
    """E16: a dense layer's gate_proj is no router's gate, and `mlp` is a part of a name, not some letters of one."""
    one = torch.zeros(1)
    names = ["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.xmlp.gate.weight"]
    sent = [name for name, _ in export_experts("mixtral", [(name, one) for name in names], Form.STREAMED)]
    assert sent == [
        "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.block_sparse_moe.gate_proj.weight", names[2],
    ]  # fmt: skip
    assert chosen(("**.mlp.gate.*",), names, "here") == [names[0]]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_a_routers_bias_reaches_the_sampler(family: str) -> None:
    """E06: it is a buffer, not a parameter. Set to 7 in the trainer, it is 7 in the sampler."""
    engine, served = Fsdp2Engine(tiny_model(family), EngineConfig()), tiny_model(family)
    biases = [name for name, _ in engine.model.state() if name.endswith("e_score_correction_bias")]
    assert biases
    for name, tensor in engine.model.state():
        if name in biases:
            tensor.fill_(7.0)
    sampler = BuiltinSampler(served, max_running=2, cache_tokens=64)
    asyncio.run(publish(engine, sampler, 1))
    state = dict(served.state())
    assert all(bool((state[name] == 7.0).all()) for name in biases)
    told = [tensor for name, tensor in engine.weights() if name.endswith("e_score_correction_bias")]
    assert len(told) == len(biases) and all(bool((tensor == 7.0).all()) for tensor in told)


def test_a_delta_of_streamed_experts_is_of_those_that_changed() -> None:
    own = {name: tensor.clone() for name, tensor in made("gpt_oss").state_dict().items()}
    before = {name: t.clone() for name, t in export_experts("gpt_oss", own.items(), Form.STREAMED)}
    own["model.layers.1.mlp.experts.down_proj"][10, 3, 4] = float("nan")
    changes = list(deltas(before, export_experts("gpt_oss", own.items(), Form.STREAMED)))
    (change,) = changes
    assert (change.name, change.indices_N.tolist()) == ("model.layers.1.mlp.experts.10.down_proj", [3 * 32 + 4])
    apply_deltas(before, changes)
    back: dict[str, Tensor] = dict(import_experts("gpt_oss", before.items(), E))
    assert all(torch.equal(back[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in own.items())
