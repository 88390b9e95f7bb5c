"""The part of the Engine contract that value models add: a backend that says `value_head` adds a factory here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from strop.algos.losses import masked, masked_mean
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Engine, OptimParams
from strop.engines.build import build_engine
from strop.errors import EngineError
from strop.models.heads import make_value_model
from strop.ops.select import Impl
from strop.types import Layout, Metrics, Outputs, Want
from tests.conformance.test_engine import DEFAULT, TOLERANCE, assert_close, pack, sequences, shared_prefix_batch
from tests.tiny_models import tiny_model

Factory = Callable[[str, torch.dtype, EngineConfig], Engine]
READ = OptimParams(lr=1e6, weight_decay=0.0, eps=1e6, betas=(0.0, 0.0), max_grad_norm=1e9)
WANT = Want(values=True)


def fsdp2_torch(family: str, dtype: torch.dtype, config: EngineConfig) -> Engine:
    model = tiny_model(family, dtype, Impl.TORCH)
    torch.manual_seed(9)
    make_value_model(model.module, nn.Linear(32, 1))
    return build_engine(config, model)


FACTORIES: dict[str, Factory] = {"fsdp2-torch": fsdp2_torch}


@pytest.fixture(params=FACTORIES.values(), ids=list(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


@dataclass(frozen=True, slots=True)
class Bent:
    """An asymmetric loss of values and a per-token constant, so that misaligned inputs are seen."""

    want = WANT

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        assert outputs.values_T is not None
        loss_T = inputs * torch.exp(0.5 * masked(outputs.values_T, mask_T))
        return loss_T, {"loss/bent": masked_mean(loss_T, mask_T)}


def values_of(engine: Engine, batch: Batch[Tensor]) -> Tensor:
    (outputs,) = asyncio.run(engine.forward([batch], WANT))
    assert outputs.values_T is not None and not outputs.values_T.requires_grad
    return outputs.values_T


def gradient(engine: Engine, batches: list[Batch[Tensor]], *, calls: int = 1) -> dict[str, Tensor]:
    before = {name: tensor.double() for name, tensor in engine.weights()}

    async def run() -> None:
        size = -(-len(batches) // calls)
        for start in range(0, len(batches), size):
            await engine.forward_backward(batches[start : start + size], Bent())
        assert not (await engine.optim_step(READ)).skipped

    asyncio.run(run())
    return {name: before[name] - tensor.double() for name, tensor in engine.weights()}


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_values_do_not_depend_on_how_a_step_is_cut(
    factory: Factory, family: str, dtype: torch.dtype
) -> None:
    """A01, A50, for critics."""
    texts = sequences()
    whole = gradient(factory(family, dtype, DEFAULT), [pack(texts)])
    alone = gradient(factory(family, dtype, DEFAULT), [pack([t]) for t in texts])
    halves = gradient(factory(family, dtype, DEFAULT), [pack(texts[:2]), pack(texts[2:])], calls=2)
    order = gradient(factory(family, dtype, DEFAULT), [pack(texts[::-1])])
    assert whole["score.weight"].any() and whole["score.bias"].any(), "the head is trained with its model"
    assert not any("lm_head" in name for name in whole)
    for other in (alone, halves, order):
        assert_close(whole, other, TOLERANCE[dtype])


def test_every_row_has_a_value_and_the_last_one_has_read_the_last_token(factory: Factory) -> None:
    """Also where the mask is off: a truncated episode bootstraps there, and a reward model reads its score there."""
    texts = sequences(4)
    engine = factory("qwen3", torch.float32, DEFAULT)
    values_T = values_of(engine, pack(texts))
    silent = [replace(t, mask=t.mask & False) for t in texts]
    assert torch.equal(values_of(engine, pack(silent)), values_T)
    assert values_T.dtype == torch.float32 and (values_T != 0).all()
    tokens = texts[-1].tokens.copy()
    tokens[-1] = (tokens[-1] + 11) % 90 + 3
    moved = values_of(engine, pack([*texts[:-1], replace(texts[-1], tokens=tokens)])) != values_T
    assert moved.nonzero().flatten().tolist() == [len(values_T) - 1]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_values_of_a_shared_prompt_are_those_of_a_repeated_one(factory: Factory, family: str) -> None:
    engine = factory(family, torch.float32, DEFAULT)
    if not engine.capabilities.shared_prefix:
        pytest.skip("this backend does not share prefixes, and says so")
    shared, repeated = shared_prefix_batch()
    a_T, b_T = values_of(engine, shared), values_of(engine, repeated)
    branches = torch.arange(len(a_T)) >= shared.layout.lengths[0]  # each from the prompt's last token on
    rows = torch.from_numpy(repeated.layout.positions_T >= shared.layout.lengths[0])
    assert torch.allclose(a_T[branches], b_T[rows], rtol=0, atol=1e-5)
    grads = [gradient(factory(family, torch.float32, DEFAULT), [batch]) for batch in (shared, repeated)]
    assert_close(grads[0], grads[1], TOLERANCE[torch.float32])


def test_no_temperature_divides_a_value(factory: Factory) -> None:
    """A26."""
    texts, engine = sequences(3), factory("qwen3", torch.float32, DEFAULT)
    assert torch.equal(values_of(engine, pack(texts, 0.5)), values_of(engine, pack(texts)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_critic_takes_the_very_step_that_would_have_been(
    factory: Factory, optimizer: str, tmp_path: Path
) -> None:
    config = EngineConfig.model_validate({"optimizer": optimizer})
    engine, batch = factory("qwen3", torch.float32, config), pack(sequences())
    step = OptimParams(lr=1e-2)

    async def learn(learner: Engine) -> None:
        await learner.forward_backward([batch], Bent())
        await learner.optim_step(step)

    async def run() -> Engine:
        await learn(engine)
        await engine.save(tmp_path)
        other = factory("qwen3", torch.float32, config)
        await other.load(tmp_path)
        await learn(other)
        await learn(engine)
        return other

    other = asyncio.run(run())
    expected = dict(engine.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.weights())


def test_what_a_model_cannot_give_is_an_error(factory: Factory) -> None:
    batch, engine = pack(sequences(3)), factory("qwen3", torch.float32, DEFAULT)
    assert engine.capabilities.value_head
    for want in (Want(), Want(values=True, entropy=True), Want(values=True, top_k=3), Want(values=True, routes=True)):
        with pytest.raises(EngineError):
            asyncio.run(engine.forward([batch], want))
