"""The memory estimate against what a real engine really keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from strop import estimate
from strop.algos.losses import CrossEntropy
from strop.config.activations import ActivationsConfig
from strop.config.adapter import AdapterConfig
from strop.config.model import Kernels, ModelConfig
from strop.config.policy import GRPOConfig, KLConfig
from strop.config.recipe import EngineConfig, Recipe, SamplerConfig, TasksConfig
from strop.data.packing import Batch
from strop.engines.base import OptimParams
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.models.loading import load_model
from strop.plan import _measure
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Layout

DENSE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **DENSE},
    "llama": {"model_type": "llama", **DENSE, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128,
             "bos_token_id": 0, "eos_token_id": 0},
    "qwen3_moe": {"model_type": "qwen3_moe", **DENSE, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 48},
    "qwen3_5": {"model_type": "qwen3_5_text", **DENSE, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
}  # fmt: skip
TOKENS, LENGTH = 1024, 32


def recipe(model: str, kernels: str, **engine: Any) -> Recipe:
    return Recipe(
        model=ModelConfig(fresh=MODELS[model], kernels=Kernels(kernels)),
        tasks=TasksConfig(source="jsonl", path="t.jsonl"),
        engine=EngineConfig(pack_tokens=TOKENS, **engine),
        sampler=SamplerConfig(max_running=4, cache_tokens=1000),
        grpo=GRPOConfig(kl=KLConfig(coefficient=0.1)),
    )


def batch(vocabulary: int) -> Batch[None]:
    tokens_T = torch.arange(TOKENS) * 7 % vocabulary
    mask_T = torch.ones(TOKENS, dtype=torch.bool)
    mask_T[LENGTH - 1 :: LENGTH] = False
    return Batch(
        tokens_T=tokens_T,
        targets_T=torch.where(mask_T, tokens_T.roll(-1), -1),
        mask_T=mask_T,
        weights_T=mask_T.float(),
        layout=Layout((LENGTH,) * (TOKENS // LENGTH)),
        inputs=None,
    )


def kept_for_backward(engine: Fsdp2Engine, vocabulary: int) -> int:
    """Bytes of distinct storages that autograd saves in one forward_backward, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.model.module.parameters()}
    alive: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            alive[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        asyncio.run(engine.forward_backward([batch(vocabulary)], CrossEntropy()))
    return sum(storage.nbytes() for storage in alive.values())


@pytest.mark.parametrize(
    ("name", "kernels", "engine"),
    [
        ("qwen3", "torch", {}),
        ("qwen3", "auto", {"optimizer": "muon"}),
        ("qwen3", "torch", {"head": "plain"}),
        ("llama", "auto", {}),
        ("gpt2", "torch", {"optimizer": "muon"}),
        ("qwen3_moe", "torch", {}),
        ("qwen3_5", "torch", {}),
        ("qwen3_5", "auto", {}),
    ],
)
def test_the_estimate_is_what_an_engine_keeps(name: str, kernels: str, engine: dict[str, Any]) -> None:
    """Weights, gradients and optimizer to the byte; activations and logits from above, and not twice too high."""
    config = recipe(name, kernels, **engine)
    model = load_model(config.model, vocab_size=256, seed=0)
    trainer = Fsdp2Engine(model, config.engine)
    shape = _measure(model.module, AdapterConfig())
    memory = estimate.memory(shape, config, step_tokens=10**9, impl=model.impl)
    assert shape.parameters == model.num_parameters()

    kept = kept_for_backward(trainer, 256) / estimate.MIB
    most = memory.activations + (memory.logits if config.engine.head == "plain" else 0)
    assert kept <= most <= 2 * kept

    gradients = sum(p.grad.nbytes for p in model.module.parameters() if p.grad is not None)
    assert memory.gradients * estimate.MIB == gradients
    asyncio.run(trainer.optim_step(OptimParams(lr=1e-3)))
    assert trainer._optimizers is not None
    moments = sum(tensor.nbytes for _, tensor in trainer._optimizers.state() if tensor.ndim)
    assert memory.optimizer * estimate.MIB == moments
    assert memory.weights == memory.sampler == memory.reference == memory.gradients
    assert estimate.checkpoint_bytes(shape, config) == gradients + moments


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_the_cache_is_what_the_sampler_allocates(name: str) -> None:
    config = recipe(name, "torch")
    model = load_model(config.model, vocab_size=256, seed=0)
    sampler = BuiltinSampler(
        model,
        max_running=config.sampler.max_running,
        cache_tokens=config.sampler.cache_tokens,  # 63 pages
    )
    memory = estimate.memory(_measure(model.module, AdapterConfig()), config, step_tokens=1, impl=model.impl)
    assert memory.cache * estimate.MIB == sampler.cache_bytes


def test_a_sampler_of_its_own_has_the_whole_model_under_an_adapter() -> None:
    config = recipe("qwen3", "torch", adapter=AdapterConfig(rank=2))
    actors = config.model_copy(update={"sampler": config.sampler.model_copy(update={"actors": 1})})
    model = load_model(config.model, vocab_size=256, seed=0)
    shape = _measure(model.module, config.engine.adapter)
    here, there = (estimate.memory(shape, c, step_tokens=1, impl=model.impl).sampler for c in (config, actors))
    assert here * estimate.MIB == 4 * shape.adapter
    assert there * estimate.MIB == 4 * shape.parameters


def test_checkpointing_keeps_less_and_says_so() -> None:
    config = recipe("qwen3", "torch", activations=ActivationsConfig(checkpoint_every=1))
    model = load_model(config.model, vocab_size=256, seed=0)
    shape = _measure(model.module, AdapterConfig())
    with_it = estimate.memory(shape, config, step_tokens=10**9, impl=model.impl).activations
    without = estimate.memory(shape, recipe("qwen3", "torch"), step_tokens=10**9, impl=model.impl).activations
    kept = kept_for_backward(Fsdp2Engine(model, config.engine), 256) / estimate.MIB
    assert kept <= with_it < without / 2


@pytest.mark.parametrize("every", [0, 1, 2])
def test_offload_needs_the_host_memory_that_is_said(every: int) -> None:
    """What waits in host buffers, from above and not twice too high; less stays on the device than without."""
    how = ActivationsConfig(checkpoint_every=every, offload=True, offload_min_kib=0, offload_idle_mib=0)
    config = recipe("qwen3", "torch", activations=how)
    model = load_model(config.model, vocab_size=256, seed=0)
    trainer = Fsdp2Engine(model, config.engine)
    asyncio.run(trainer.forward_backward([batch(256)], CrossEntropy()))
    buffers = trainer._activations.buffers
    assert buffers is not None
    memory = estimate.memory(_measure(model.module, AdapterConfig()), config, step_tokens=10**9, impl=model.impl)
    without = config.model_copy(update={"engine": EngineConfig(pack_tokens=TOKENS)})
    plain = estimate.memory(_measure(model.module, AdapterConfig()), without, step_tokens=10**9, impl=model.impl)
    assert buffers.peak / estimate.MIB <= memory.offloaded <= 2 * buffers.peak / estimate.MIB
    assert memory.activations < plain.activations and plain.offloaded == 0
    idle = config.engine.activations.model_copy(update={"offload_idle_mib": 1})
    more = config.model_copy(update={"engine": config.engine.model_copy(update={"activations": idle})})
    waiting = estimate.memory(
        _measure(model.module, AdapterConfig()), more, step_tokens=10**9, impl=model.impl
    ).offloaded
    assert waiting == memory.offloaded + min(memory.offloaded, 1)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_nth_layer_keeps_less(every: int) -> None:
    config = recipe("qwen3", "torch", activations=ActivationsConfig(checkpoint_every=every))
    model = load_model(config.model, vocab_size=256, seed=0)
    most = estimate.memory(
        _measure(model.module, AdapterConfig()), config, step_tokens=10**9, impl=model.impl
    ).activations
    kept = kept_for_backward(Fsdp2Engine(model, config.engine), 256) / estimate.MIB
    plain = estimate.memory(
        _measure(model.module, AdapterConfig()), recipe("qwen3", "torch"), step_tokens=10**9, impl=model.impl
    )
    one_again = plain.activations / 3
    assert kept <= most and most - one_again <= 2 * kept


def test_a_small_step_needs_less_than_a_full_pack() -> None:
    config = recipe("qwen3", "torch")
    shape = _measure(load_model(config.model, vocab_size=256, seed=0).module, AdapterConfig())
    small, full = (estimate.memory(shape, config, step_tokens=n, impl=estimate.Impl.TORCH) for n in (128, TOKENS))
    assert small.activations == full.activations / 8


def test_disk_counts_the_newest_the_best_and_the_export() -> None:
    config = recipe("qwen3", "torch")
    shape = _measure(load_model(config.model, vocab_size=256, seed=0).module, AdapterConfig())
    one, weights = estimate.checkpoint_bytes(shape, config), 4 * shape.parameters
    many = config.model_copy(update={"run": config.run.model_copy(update={"save_every": 1, "keep": 5})})
    assert estimate.disk_bytes(shape, many) == 7 * one + weights  # five newest, the best, the one being written
    assert estimate.disk_bytes(shape, config) < estimate.disk_bytes(shape, many)


@pytest.mark.parametrize("parallel", [{"data": 4}, {"data": 2, "sequence": 2}, {"data": 2, "replicas": 2}], ids=str)
def test_ranks_keep_shares_and_replicas_divide_nothing(parallel: dict[str, int]) -> None:
    """Exact for what is kept between steps; T tokens of a batch are dealt to sequence ranks."""
    model = load_model(ModelConfig(fresh=MODELS["qwen3"]), vocab_size=256, seed=0)
    shape = _measure(model.module, AdapterConfig())
    alone = estimate.memory(shape, recipe("qwen3", "torch"), step_tokens=10**9, impl=model.impl)
    spread = estimate.memory(shape, recipe("qwen3", "torch", parallel=parallel), step_tokens=10**9, impl=model.impl)
    shards = parallel["data"] * parallel.get("sequence", 1)
    for part in ("weights", "gradients", "optimizer", "reference weights"):
        assert spread.of_rank()[part] == pytest.approx(alone.of_rank()[part] / shards), part
    assert spread.activations == pytest.approx(alone.activations / parallel.get("sequence", 1))
    assert spread.elsewhere() == alone.elsewhere() and spread.ranks == 4
    assert spread.total == pytest.approx(4 * sum(spread.of_rank().values()) + sum(spread.elsewhere().values()))
    assert alone.gathered == 0 < spread.gathered < 4 * alone.weights


def test_tensor_ranks_share_hidden_matrices_alone() -> None:
    model = load_model(ModelConfig(fresh=MODELS["qwen3"]), vocab_size=256, seed=0)
    shape = _measure(model.module, AdapterConfig())
    found = estimate.memory(shape, recipe("qwen3", "torch", parallel={"tensor": 2}), step_tokens=9, impl=model.impl)
    assert found.weights == pytest.approx((shape.parameters - shape.matrices / 2) * 4 / estimate.MIB)


def test_ranks_gather_the_experts_that_they_have() -> None:
    """What a rank keeps is the same however the experts are cut; of a layer it computes, only its own are whole."""
    model = load_model(ModelConfig(fresh=MODELS["qwen3_moe"]), vocab_size=256, seed=0)
    shape = _measure(model.module, AdapterConfig())
    per_layer = 4 * 3 * 64 * 48
    assert shape.stacked == 3 * per_layer
    whole, dealt = (
        estimate.memory(shape, recipe("qwen3_moe", "torch", parallel=sizes), step_tokens=9, impl=model.impl)
        for sizes in ({"data": 2}, {"data": 2, "experts": 2})
    )
    assert dealt.weights == whole.weights and dealt.ranks == whole.ranks == 2
    assert whole.gathered - dealt.gathered == pytest.approx(2 * 2 * per_layer / 2 * 4 / estimate.MIB)
