"""What an engine's `activations` section does to a model, while a step is learned and not otherwise."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.config.activations import ActivationsConfig
from strop.config.recipe import EngineConfig
from strop.engines.fsdp2.activations import Activations
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import ConfigError
from strop.models.loading import LanguageModel
from tests.tiny_models import tiny_model
from tests.unit.engines.test_fsdp2 import Likelihood, batch

CPU = torch.device("cpu")


def engine(model: LanguageModel | None = None, **how: Any) -> Fsdp2Engine:
    config = EngineConfig(activations=ActivationsConfig(**how))
    return Fsdp2Engine(model or tiny_model("qwen3"), config)


def learn(made: Fsdp2Engine, seen: Callable[[Any], None] = lambda outputs: None) -> None:
    asyncio.run(made.forward_backward([batch(64)], Likelihood(seen)))


def runs(made: Fsdp2Engine, name: str) -> int:
    """How often a module runs in one step: twice when it is computed again."""
    counted: list[str] = []
    handle = made.model.module.get_submodule(name).register_forward_hook(lambda *_: counted.append(name))
    learn(made)
    handle.remove()
    return len(counted)


def test_what_is_checkpointed_runs_again_and_nothing_else_does() -> None:
    layers = [f"model.layers.{n}.mlp.gate_proj" for n in range(2)]
    assert [runs(engine(), name) for name in layers] == [1, 1]
    assert [runs(engine(checkpoint_every=1), name) for name in layers] == [2, 2]
    assert [runs(engine(checkpoint_every=2), name) for name in layers] == [2, 1]
    assert [runs(engine(checkpoint_modules=("**.1",)), name) for name in layers] == [1, 2]
    assert runs(engine(checkpoint_modules=("**.mlp",)), "model.layers.0.self_attn.q_proj") == 1
    assert runs(engine(checkpoint_every=1), "model.embed_tokens") == 1


def test_offload_uses_host_buffers_as_it_is_told() -> None:
    whole, part, large, idle = (
        engine(offload=True, offload_min_kib=0),
        engine(offload=True, offload_min_kib=0, offload_modules=("model.layers.0",)),
        engine(offload=True),
        engine(offload=True, offload_min_kib=0, offload_idle_mib=0),
    )
    peaks = []
    for made in (whole, part, large, idle):
        learn(made)
        buffers = made._activations.buffers
        assert buffers is not None and buffers.in_use == 0
        assert (buffers.idle > 0) == (made in (whole, part))
        peaks.append(buffers.peak)
    assert peaks[0] > 1.5 * peaks[1] > 0 and peaks[2] == 0 and peaks[3] == peaks[0]
    assert engine()._activations.buffers is None


def test_both_keep_only_inputs_on_the_host() -> None:
    plain, both = (engine(offload=True, offload_min_kib=0, checkpoint_every=every) for every in (0, 1))
    sizes = []
    for made in (plain, both):
        learn(made)
        assert made._activations.buffers is not None
        sizes.append(made._activations.buffers.peak)
    assert sizes[1] < sizes[0] / 4


@pytest.mark.parametrize("how", [{"checkpoint_every": 1}, {"offload": True, "offload_min_kib": 0}])
def test_the_model_is_as_it_was_after_a_step(how: dict[str, Any]) -> None:
    """A copy of it is a model of its own, and scoring runs nothing of it."""
    model = tiny_model("qwen3")
    made = engine(model, **how)
    learn(made)
    layers = [layer for name, layer in model.module.named_modules() if name.endswith(("layers.0", "layers.1"))]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    copied = model.clone()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    (scored,) = asyncio.run(Fsdp2Engine(copied, EngineConfig(), trainable=False).forward([batch()]))
    (zeroed,) = asyncio.run(made.forward([batch()]))
    assert scored.logprobs_T.std() > 0.1 > zeroed.logprobs_T[:-1].std()
    learn(made)


def test_an_exception_in_a_step_leaves_the_model_as_it_was() -> None:
    made = engine(offload=True, offload_min_kib=0, checkpoint_every=1)

    def fail(outputs: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learn(made, fail)
    gc.collect()
    assert made._activations.buffers is not None and made._activations.buffers.in_use == 0
    layer = made.model.module.get_submodule("model.layers.0")
    assert layer.forward.__name__ == "forward" and not layer._forward_hooks


def test_a_frozen_engine_ignores_it_and_checks_it() -> None:
    how = ActivationsConfig(offload=True, offload_modules=("nowhere",))
    with pytest.raises(ConfigError, match="offload_modules: 'nowhere' matches nothing"):
        Fsdp2Engine(tiny_model("qwen3"), EngineConfig(activations=how), trainable=False)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("how", [{"checkpoint_every": 2}, {"offload": True}])
def test_a_model_that_names_no_layers_must_be_told(how: dict[str, Any]) -> None:
    """Fail closed: an option that would change nothing is refused."""
    with pytest.raises(ConfigError, match=r"Plain does not say which .*_modules, like first, second"):
        Activations(Plain(), ActivationsConfig(**how), CPU)
    Activations(Plain(), ActivationsConfig(offload=True, offload_modules=("first",)), CPU)
