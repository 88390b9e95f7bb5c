"""What is this engine's own: one batch's graph at a time, frozen engines, and which tensor goes to which optimizer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import OptimParams
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.engines.fsdp2.optimizer import build_optimizers, parameter_groups
from strop.errors import EngineError
from strop.types import Layout, Metrics, Outputs, Want
from tests.tiny_models import tiny_model


def batch(tokens: int = 12) -> Batch[None]:
    ids = torch.arange(tokens) % 90 + 3
    targets = torch.cat([ids[1:], torch.tensor([-1])])
    weights = (targets >= 0).float()
    return Batch(
        tokens_T=ids, targets_T=targets, mask_T=targets >= 0, weights_T=weights, layout=Layout((tokens,)), inputs=None
    )


class Likelihood:
    """Calls `seen` with the live outputs of every batch."""

    def __init__(self, seen: Callable[[Outputs], None] = lambda outputs: None) -> None:
        self._seen = seen

    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: None, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        self._seen(outputs)
        return -outputs.logprobs_T, {}


def test_no_batch_keeps_its_graph_until_the_next() -> None:
    """I01: when a batch's loss is computed, the graphs of the batches before it are dead."""
    graphs: list[weakref.ref[object]] = []
    alive: list[int] = []

    def seen(outputs: Outputs) -> None:
        gc.collect()
        alive.append(sum(graph() is not None for graph in graphs))
        graphs.append(weakref.ref(outputs.logprobs_T))

    engine = Fsdp2Engine(tiny_model("qwen3"), EngineConfig())
    learned = asyncio.run(engine.forward_backward([batch() for _ in range(5)], Likelihood(seen)))
    assert alive == [0, 0, 0, 0, 0] and len(graphs) == 5
    assert not any(outputs.logprobs_T.requires_grad for outputs in learned.outputs)


def test_a_frozen_engine_scores_and_refuses_to_learn() -> None:
    engine = Fsdp2Engine(tiny_model("qwen3"), EngineConfig(), trainable=False)
    (scored,) = asyncio.run(engine.forward([batch()]))
    assert scored.logprobs_T.any()
    with pytest.raises(EngineError, match="frozen"):
        asyncio.run(engine.forward_backward([batch()], Likelihood()))
    with pytest.raises(EngineError, match="frozen"):
        asyncio.run(engine.optim_step(OptimParams(lr=1.0)))


def test_a_loss_of_another_shape_is_refused() -> None:
    class Short(Likelihood):
        def __call__(self, outputs: Outputs, inputs: None, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
            return outputs.logprobs_T[1:], {}

    with pytest.raises(EngineError, match=r"\(11,\) for targets \(12,\)"):
        asyncio.run(Fsdp2Engine(tiny_model("qwen3"), EngineConfig()).forward_backward([batch()], Short()))


def test_muon_takes_hidden_matrices_and_nothing_else() -> None:
    model = tiny_model("qwen3")
    groups = parameter_groups(model, EngineConfig(optimizer="muon"))
    assert list(groups.members) == ["adamw/decay", "adamw/no_decay", "muon/hidden"]
    taken = {groups.names[p] for p in groups.members["muon/hidden"]}
    rest = {groups.names[p] for name in ("adamw/decay", "adamw/no_decay") for p in groups.members[name]}
    assert taken | rest == {name for name, _ in model.module.named_parameters()} and not taken & rest
    assert all("_proj.weight" in name for name in taken) and len(taken) == 2 * 7
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= rest


def test_optimizer_state_of_another_model_is_refused() -> None:
    """D06: never a silent fresh start."""
    made = build_optimizers(parameter_groups(tiny_model("qwen3"), EngineConfig()))
    standing = made.standing.state()
    with pytest.raises(EngineError, match="no such parameter"):
        made.load_state({"elsewhere.weight|exp_avg": torch.zeros(2)}, standing)
    with pytest.raises(EngineError, match=r"\(2, 2\)"):
        made.load_state({"model.norm.weight|exp_avg": torch.zeros(2, 2)}, standing)
    other = build_optimizers(parameter_groups(tiny_model("qwen3"), EngineConfig(optimizer="muon")))
    with pytest.raises(EngineError, match="muon/hidden"):
        made.load_state({}, other.standing.state())


def test_a_parameter_that_never_had_a_gradient_is_no_obstacle(tmp_path: Path) -> None:
    """D09: it has no moments to save; after a load it starts from none, and everything else goes on."""

    def made() -> Fsdp2Engine:
        model = tiny_model("qwen3")
        model.module.register_parameter("unused", torch.nn.Parameter(torch.ones(3, 3)))
        return Fsdp2Engine(model, EngineConfig())

    def learn(engine: Fsdp2Engine) -> None:
        asyncio.run(engine.forward_backward([batch()], Likelihood()))
        asyncio.run(engine.optim_step(OptimParams(lr=1e-2, weight_decay=0.1)))

    one, other = made(), made()
    learn(one)
    asyncio.run(one.save(tmp_path))
    asyncio.run(other.load(tmp_path))
    for engine in (one, other):
        learn(engine)
    assert other._optimizers is not None and not any(key.startswith("unused|") for key, _ in other._optimizers.state())
    weights, expected = dict(other.weights()), dict(one.weights())
    assert all(torch.equal(weights[name], expected[name]) for name in expected) and weights["unused"].eq(1.0).all()
