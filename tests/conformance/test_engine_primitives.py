"""The primitives of the Engine contract as a hand-written loop uses them: hyper-parameters by value, gradients that
survive whatever happens between two calls, losses of the caller's own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algos.losses import CrossEntropy
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Engine, OptimParams, Overrides, SkipReason
from strop.errors import ConfigError, EngineError
from strop.types import Layout, Metrics, Outputs, Want
from tests.conformance.test_engine import (
    DEFAULT,
    FACTORIES,
    READ,
    TOLERANCE,
    Exploding,
    Factory,
    Scaled,
    assert_close,
    gradient,
    pack,
    sequences,
    weights_of,
)

MUON = EngineConfig(optimizer="muon")
ROUTER = EngineConfig.model_validate({"param_groups": {"mlp": {"match": ["**.mlp.*.weight"], "decay": False}}})


@pytest.fixture(params=FACTORIES.values(), ids=list(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


def learned(factory: Factory, config: EngineConfig = DEFAULT, family: str = "qwen3") -> Engine:
    """An engine with a gradient."""
    engine = factory(family, torch.float32, config)
    asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
    return engine


def moved(engine: Engine, params: OptimParams) -> dict[str, float]:
    """How far each weight moves at most in one step."""
    before = weights_of(engine)
    assert not asyncio.run(engine.optim_step(params)).skipped
    return {name: float((tensor - before[name]).abs().max()) for name, tensor in weights_of(engine).items()}


def is_vector(name: str) -> bool:
    return "norm" in name


# Hyper-parameters by value --------------------------------------------------------------------------------------------

REFUSED = [
    OptimParams(lr="1e-3"),  # pyright: ignore[reportArgumentType]
    OptimParams(lr=1.0, eps=math.nan),
    OptimParams(lr=1.0, betas=(0.9,)),
    OptimParams(lr=1.0, scoped={"adamw": Overrides(lr=0.5), "adamw/no_decay": Overrides(momentum=0.5)}),
    OptimParams(lr=1.0, scoped={"adamw/no_such": Overrides(lr=0.5)}),
    OptimParams(lr=1.0, max_grad_norm=True),
    OptimParams(),
]


@pytest.mark.parametrize("params", REFUSED)
def test_a_refused_step_changes_nothing(factory: Factory, params: OptimParams) -> None:
    """All or nothing: weights to the bit, the gradient, and what stands."""
    expected, engine = moved(learned(factory), READ), learned(factory)
    before = weights_of(engine)
    with pytest.raises(ConfigError):
        asyncio.run(engine.optim_step(replace(params, keep=True)))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    assert moved(engine, READ) == expected
    asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
    with pytest.raises(ConfigError, match="no learning rate"):
        asyncio.run(engine.optim_step(OptimParams()))


def test_an_override_lasts_one_step_and_a_kept_one_until_further_notice(factory: Factory) -> None:
    engine = learned(factory)
    asyncio.run(engine.optim_step(OptimParams(lr=1e-3, keep=True)))
    rates = []
    for params in (OptimParams(), OptimParams(lr=5e-3), OptimParams()):
        asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
        rates.append(asyncio.run(engine.optim_step(params)).applied["adamw/decay"].lr)
    assert rates == [1e-3, 5e-3, 1e-3]


def test_a_scope_reaches_its_group_and_no_other(factory: Factory) -> None:
    steps = moved(learned(factory), OptimParams(lr=1e-2, scoped={"adamw/no_decay": Overrides(lr=0.0)}))
    assert all((step == 0.0) == is_vector(name) for name, step in steps.items())
    steps = moved(learned(factory, MUON), OptimParams(lr=0.0, scoped={"muon": Overrides(lr=1e-2)}))
    assert all((step > 0.0) == name.endswith("_proj.weight") for name, step in steps.items())
    steps = moved(learned(factory, ROUTER), OptimParams(lr=0.0, scoped={"adamw/mlp": Overrides(lr=1e-2)}))
    assert all((step > 0.0) == (".mlp." in name) for name, step in steps.items())


def test_decay_reaches_groups_free_of_it_only_by_name(factory: Factory) -> None:
    def shrunk(config: EngineConfig, params: OptimParams) -> set[str]:
        engine = factory("qwen3", torch.float32, config)
        silent = [replace(text, weights=0.0 * text.weights) for text in sequences()]
        asyncio.run(engine.forward_backward([pack(silent)], Scaled()))
        return {name for name, step in moved(engine, params).items() if step > 0.0}

    everything = set(weights_of(factory("qwen3", torch.float32, DEFAULT)))
    vectors = {name for name in everything if is_vector(name)}
    assert shrunk(DEFAULT, OptimParams(lr=0.1, weight_decay=0.5)) == everything - vectors
    assert shrunk(DEFAULT, OptimParams(lr=0.1, scoped={"adamw": Overrides(weight_decay=0.5)})) == everything - vectors
    assert shrunk(DEFAULT, OptimParams(lr=0.1, scoped={"adamw/no_decay": Overrides(weight_decay=0.5)})) == vectors
    spared = everything - vectors - {name for name in everything if ".mlp." in name}
    assert shrunk(ROUTER, OptimParams(lr=0.1, weight_decay=0.5)) == spared
    assert shrunk(MUON, OptimParams(lr=0.1, weight_decay=0.5)) == everything - vectors


def test_what_only_adamw_has_is_refused_beside_muon_unless_scoped(factory: Factory) -> None:
    engine = learned(factory, MUON)
    with pytest.raises(ConfigError, match=r"betas: adamw has it and muon has not.*scoped=\{'adamw'"):
        asyncio.run(engine.optim_step(OptimParams(lr=1e-3, betas=(0.5, 0.5))))
    outcome = asyncio.run(engine.optim_step(OptimParams(lr=1, scoped={"adamw": Overrides(betas=[0.5, 0])})))
    assert outcome.applied["adamw/decay"].betas == (0.5, 0.0)
    assert outcome.applied["muon/hidden"].betas is None and outcome.applied["muon/hidden"].momentum == 0.95
    assert set(outcome.applied) == {"adamw/decay", "adamw/no_decay", "muon/hidden"}


@pytest.mark.parametrize("config", [DEFAULT, MUON], ids=["adamw", "muon"])
def test_a_tensor_is_a_learning_rate(factory: Factory, config: EngineConfig) -> None:
    """Capturable: the same step as with the number, and a number may follow it."""
    ends: list[dict[str, Tensor]] = []
    for rate in (0.01, torch.tensor(0.01)):
        engine = learned(factory, config)
        asyncio.run(engine.optim_step(OptimParams(lr=rate, weight_decay=0.1)))
        asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
        outcome = asyncio.run(engine.optim_step(OptimParams(lr=0.02)))
        assert outcome.applied["adamw/decay"].lr == 0.02
        ends.append(weights_of(engine))
    assert_close(ends[0], ends[1], 1e-6)


def test_groups_of_the_callers_own_are_named_by_pattern(factory: Factory) -> None:
    with pytest.raises(ConfigError, match=r"engine.param_groups.x.match: '\*\*.gate.weight' matches nothing"):
        factory(
            "qwen3",
            torch.float32,
            EngineConfig.model_validate({"param_groups": {"x": {"match": ["**.mlp.*.weight", "**.gate.weight"]}}}),
        )
    both = {"x": {"match": ["**.mlp.**"]}, "y": {"match": ["model.layers.0.mlp.up_proj.weight"]}}
    with pytest.raises(ConfigError, match=r"x and y both match model.layers.0.mlp.up_proj.weight"):
        factory("qwen3", torch.float32, EngineConfig.model_validate({"param_groups": both}))


def test_kept_values_are_part_of_a_checkpoint(factory: Factory, tmp_path: Path) -> None:
    engine = learned(factory)
    kept = OptimParams(lr=3e-3, keep=True, max_grad_norm=2, scoped={"adamw/no_decay": Overrides(eps=1e-3)})
    asyncio.run(engine.optim_step(kept))
    asyncio.run(engine.save(tmp_path))
    other = factory("qwen3", torch.float32, DEFAULT)
    asyncio.run(other.load(tmp_path))
    ends = []
    for each in (engine, other):
        asyncio.run(each.forward_backward([pack(sequences())], Scaled()))
        assert asyncio.run(each.optim_step(OptimParams())).applied["adamw/no_decay"].eps == 1e-3
        ends.append(weights_of(each))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_skipped_step_reports_nothing_applied(factory: Factory) -> None:
    engine = factory("qwen3", torch.float32, DEFAULT)
    asyncio.run(engine.forward_backward([pack(sequences())], Exploding()))
    outcome = asyncio.run(engine.optim_step(OptimParams(lr=1.0)))
    assert outcome.skipped and outcome.reason is SkipReason.NON_FINITE_GRADIENT and outcome.applied == {}
    assert asyncio.run(engine.optim_step(OptimParams(lr=1.0))).reason is SkipReason.NO_GRADIENT, "it was cleared"


# What gradients survive -----------------------------------------------------------------------------------------------


class Failed(Exception):
    pass


class Raising(torch.autograd.Function):
    """Nothing forward; raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise Failed("in backward")


@dataclass
class FailsAtSecond:
    """A loss that is fine for one batch and fails at the second, in the loss or in its backward pass."""

    backward: bool
    calls: int = 0

    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        self.calls += 1
        if self.calls < 2:
            return outputs.logprobs_T, {}
        if not self.backward:
            raise Failed("in the loss")
        return Raising.apply(outputs.logprobs_T), {}  # pyright: ignore[reportReturnType]


async def nothing(engine: Engine, folder: Path) -> None:
    pass


async def scores(engine: Engine, folder: Path) -> None:
    await engine.forward([pack(sequences()[:3])], Want(every_row=True, entropy=True))


async def saves(engine: Engine, folder: Path) -> None:
    await engine.save(folder)


async def goes_away(engine: Engine, folder: Path) -> None:
    await engine.resident(on_device=False)
    await engine.resident(on_device=True)


async def fails_in_the_loss(engine: Engine, folder: Path) -> None:
    with pytest.raises(Failed, match="in the loss"):
        await engine.forward_backward([pack(sequences()[:3]), pack(sequences()[3:])], FailsAtSecond(False))


async def fails_in_backward(engine: Engine, folder: Path) -> None:
    with pytest.raises(Failed, match="in backward"):
        await engine.forward_backward([pack(sequences()[:3]), pack(sequences()[3:])], FailsAtSecond(True))


async def asks_for_a_wrong_step(engine: Engine, folder: Path) -> None:
    with pytest.raises(ConfigError):
        await engine.optim_step(OptimParams(lr=-1.0))


BETWEEN = [nothing, scores, saves, goes_away, fails_in_the_loss, fails_in_backward, asks_for_a_wrong_step]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("between", BETWEEN)
def test_gradients_and_moments_survive_what_happens_between(
    factory: Factory, between: Callable[[Engine, Path], Any], optimizer: str, tmp_path: Path
) -> None:
    """Bitwise, on the second step, so that moments count too; a call that raised half-way has added nothing."""
    texts, config = sequences(), EngineConfig.model_validate({"optimizer": optimizer})
    ends = []
    for happens in (nothing, between):
        engine = factory("llama", torch.float32, config)  # a tied head

        async def run(engine: Engine = engine, happens: Callable[[Engine, Path], Any] = happens) -> None:
            await engine.forward_backward([pack(texts)], Scaled())
            await engine.optim_step(OptimParams(lr=1e-2))
            await engine.forward_backward([pack(texts[:3])], Scaled())
            await happens(engine, tmp_path)
            await engine.forward_backward([pack(texts[3:])], Scaled())
            await engine.optim_step(OptimParams(lr=1e-2, weight_decay=0.1))

        asyncio.run(run())
        ends.append(weights_of(engine))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_first_call_that_fails_leaves_no_gradient(factory: Factory) -> None:
    engine = factory("qwen3", torch.float32, DEFAULT)
    asyncio.run(fails_in_backward(engine, Path()))
    assert asyncio.run(engine.optim_step(OptimParams(lr=1.0))).reason is SkipReason.NO_GRADIENT


def test_an_engine_that_is_away_says_so(factory: Factory, tmp_path: Path) -> None:
    engine = learned(factory)
    before = weights_of(engine)
    asyncio.run(engine.resident(on_device=False))
    asyncio.run(engine.resident(on_device=False))  # twice is once
    calls: list[Callable[[], Any]] = [
        lambda: asyncio.run(engine.forward([pack(sequences())])),
        lambda: asyncio.run(engine.forward_backward([pack(sequences())], Scaled())),
        lambda: asyncio.run(engine.optim_step(OptimParams(lr=1.0))),
        lambda: asyncio.run(engine.zero_grad()),
        lambda: asyncio.run(engine.save(tmp_path)),
        lambda: asyncio.run(engine.load(tmp_path)),
        lambda: list(engine.weights()),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=r"host memory; call resident\(on_device=True\)"):
            call()
    assert not any(tmp_path.iterdir())
    asyncio.run(engine.resident(on_device=True))
    asyncio.run(engine.resident(on_device=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


# Losses of the caller's own -------------------------------------------------------------------------------------------


def custom(logprobs_T: Tensor, constants_T: Tensor) -> Tensor:
    """Any function of logprobs, one value for each token."""
    return (logprobs_T - constants_T).pow(2) + torch.sin(logprobs_T * constants_T)


@dataclass(frozen=True, slots=True)
class Custom:
    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        return custom(outputs.logprobs_T, inputs), {}


def weighted_cross_entropy(batch: Batch[Tensor], outputs: Outputs) -> Batch[None]:
    """The gradient of the custom loss with respect to logprobs, as weights of a cross-entropy."""
    logprobs_T = outputs.logprobs_T.detach().requires_grad_()
    total = (torch.where(batch.mask_T, custom(logprobs_T, batch.inputs), 0.0) * batch.weights_T).sum()
    (grad_T,) = torch.autograd.grad(total, logprobs_T)
    return replace(batch, inputs=None, weights_T=-grad_T.float())  # pyright: ignore[reportArgumentType, reportReturnType]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_custom_loss_in_one_call_and_in_two(factory: Factory, dtype: torch.dtype) -> None:
    """One call with the loss itself; or a forward, then cross-entropy with its gradient as weights: one gradient."""
    batches = [pack(sequences()), pack(sequences(seed=1))]
    one = gradient(factory("qwen3", dtype, DEFAULT), batches, Custom())  # pyright: ignore[reportArgumentType]
    engine = factory("qwen3", dtype, DEFAULT)
    scored = asyncio.run(engine.forward(batches))
    weighted = [weighted_cross_entropy(b, o) for b, o in zip(batches, scored, strict=True)]
    two = gradient(engine, weighted, CrossEntropy())  # pyright: ignore[reportArgumentType]
    assert_close(one, two, TOLERANCE[dtype])


@pytest.mark.parametrize("loss", [CrossEntropy(), Custom(), Scaled()], ids=lambda loss: type(loss).__name__)
def test_outputs_come_back_whichever_the_loss(factory: Factory, loss: Any) -> None:
    batch = pack(sequences())
    engine = factory("qwen3", torch.float32, DEFAULT)
    (scored,) = asyncio.run(engine.forward([batch]))
    (outputs,) = asyncio.run(engine.forward_backward([batch], loss)).outputs
    assert outputs.logprobs_T.shape == batch.targets_T.shape
    assert torch.equal(outputs.logprobs_T, scored.logprobs_T)
