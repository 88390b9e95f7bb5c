"""The Engine contract (strop/engines/base.py), against the protocol: a new backend adds a factory to FACTORIES and no
test.

Gradients are read through `optim_step`: with AdamW's moments at zero and betas (0, 0), one step of size lr moves each
weight by lr * g / (|g| + eps); with eps far above |g| that is lr * g / eps, the gradient itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algos.losses import CrossEntropy, masked_mean
from strop.config.adapter import AdapterConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Engine, OptimParams, SkipReason
from strop.engines.build import build_engine
from strop.errors import StropError
from strop.ops.select import Impl
from strop.types import Layout, Metrics, Outputs, Reduction, Want
from tests.tiny_models import DENSE, EXPERT_MODELS, LINEAR_MODELS, tiny_model

Factory = Callable[[str, torch.dtype, EngineConfig], Engine]


def fsdp2_torch(family: str, dtype: torch.dtype, config: EngineConfig) -> Engine:
    return build_engine(config, tiny_model(family, dtype, Impl.TORCH))


def fsdp2_native(family: str, dtype: torch.dtype, config: EngineConfig) -> Engine:
    return build_engine(config, tiny_model(family, dtype, Impl.NATIVE if dtype == torch.float32 else Impl.TORCH))


FACTORIES: dict[str, Factory] = {"fsdp2-torch": fsdp2_torch, "fsdp2-native": fsdp2_native}
DEFAULT = EngineConfig()
READ = OptimParams(lr=1e6, betas=(0.0, 0.0), eps=1e6, weight_decay=0.0, max_grad_norm=math.inf)


@pytest.fixture(params=FACTORIES.values(), ids=list(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """An asymmetric loss of logprobs and a per-token constant, so that misaligned inputs are seen."""

    entropy: float = 0.0

    @property
    def want(self) -> Want:
        return Want(entropy=self.entropy != 0.0)

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        loss_T = -inputs * torch.exp(outputs.logprobs_T.clamp(min=-8.0) * 0.5)
        if self.entropy:
            assert outputs.entropy_T is not None
            loss_T = loss_T - self.entropy * outputs.entropy_T
        return loss_T, {"loss/scaled": masked_mean(loss_T, mask_T)}


@dataclass(frozen=True, slots=True)
class Sequence:
    """One text: tokens, which targets count, and each target's weight and constant."""

    tokens: np.ndarray
    mask: np.ndarray
    weights: np.ndarray
    constants: np.ndarray


def sequences(count: int = 6, seed: int = 0, vocab: int = 96) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        n = int(rng.integers(2, 12)) if i else 1  # a text of one token has no target at all
        mask = rng.random(n) < 0.6
        mask[-1] = False
        made.append(
            Sequence(rng.integers(3, vocab, n), mask, np.where(mask, rng.normal(size=n), 0.0), rng.normal(size=n))
        )
    return made


def pack(texts: list[Sequence], temperature: float | None = None) -> Batch[Tensor]:
    targets = [np.append(t.tokens[1:], -1) for t in texts]
    total = sum(len(t.tokens) for t in texts)
    return Batch(
        tokens_T=torch.from_numpy(np.concatenate([t.tokens for t in texts])),
        targets_T=torch.from_numpy(np.concatenate(targets)),
        mask_T=torch.from_numpy(np.concatenate([t.mask for t in texts])),
        weights_T=torch.from_numpy(np.concatenate([t.weights for t in texts]).astype(np.float32)),
        layout=Layout(tuple(len(t.tokens) for t in texts)),
        inputs=torch.from_numpy(np.concatenate([t.constants for t in texts])),
        temperature_T=None if temperature is None else torch.full((total,), temperature),
    )


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in engine.weights()}


def gradient(engine: Engine, batches: list[Batch[Tensor]], loss: Scaled, *, calls: int = 1) -> dict[str, Tensor]:
    """The accumulated gradient, read by one step and undone by rebuilding: `engine` is spent afterwards."""
    before = weights_of(engine)

    async def run() -> None:
        for part in np.array_split(np.arange(len(batches)), calls):
            await engine.forward_backward([batches[i] for i in part], loss)
        assert not (await engine.optim_step(READ)).skipped

    asyncio.run(run())
    after = weights_of(engine)
    return {name: before[name] - after[name] for name in before}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    scale = max(float(t.abs().max()) for t in a.values())
    assert scale > 1e-3, "the gradient is too small to compare"
    for name in a:
        worst = float((a[name] - b[name]).abs().max())
        assert worst <= tolerance * scale, f"{name}: {worst:.2e} apart at scale {scale:.2e}"


# READ steps are coarse in the last digits: lr * g / (|g| + eps) keeps 1e-6 relative, and weights are of size 1.
TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5}
BIT = 1e-10


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_moe", "gpt_oss", *LINEAR_MODELS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_do_not_depend_on_how_a_step_is_cut(factory: Factory, family: str, dtype: torch.dtype) -> None:
    """A01, A50: one pack, a pack for each text, two calls, another order: the same gradient."""
    texts = sequences()
    loss = Scaled(entropy=0.1)
    whole = gradient(factory(family, dtype, DEFAULT), [pack(texts)], loss)
    alone = gradient(factory(family, dtype, DEFAULT), [pack([t]) for t in texts], loss)
    halves = gradient(factory(family, dtype, DEFAULT), [pack(texts[:2]), pack(texts[2:])], loss, calls=2)
    order = gradient(factory(family, dtype, DEFAULT), [pack(texts[::-1])], loss)
    for other in (alone, halves, order):
        assert_close(whole, other, TOLERANCE[dtype])


@pytest.mark.parametrize("family", [*DENSE, *EXPERT_MODELS])
def test_a_changed_token_never_moves_another_sequence(factory: Factory, family: str) -> None:
    """A47: at fixed shapes the other sequence's logprobs stay the same to the bit."""
    texts = [t for t in sequences(5, seed=3) if len(t.tokens) > 2]
    changed = [replace(texts[0], tokens=np.where(np.arange(len(texts[0].tokens)) == 1, 7, texts[0].tokens)), *texts[1:]]
    assert (changed[0].tokens != texts[0].tokens).any()
    engine = factory(family, torch.float32, DEFAULT)
    want = Want(every_row=True)
    (a,), (b,) = (asyncio.run(engine.forward([pack(t)], want)) for t in (texts, changed))
    first = len(texts[0].tokens)
    moved, others = a.logprobs_T != b.logprobs_T, slice(first, None)
    assert moved[:first].any()
    if family in DENSE:
        assert torch.equal(a.logprobs_T[others], b.logprobs_T[others])
    else:  # grouped expert matrices change shape with the routes of every token
        assert torch.allclose(a.logprobs_T[others], b.logprobs_T[others], atol=1e-5)


@pytest.mark.parametrize("family", DENSE)
def test_a_masked_neighbour_never_moves_a_gradient(factory: Factory, family: str) -> None:
    """A47: a sequence that counts for nothing leaves the gradient unchanged to the bit, whatever its tokens."""
    texts = sequences(4, seed=5)[1:]
    silent = replace(texts[0], mask=np.zeros_like(texts[0].mask), weights=np.zeros_like(texts[0].weights))
    other = replace(silent, tokens=(silent.tokens + 11) % 90 + 3)
    a = gradient(factory(family, torch.float32, DEFAULT), [pack([silent, *texts[1:]])], Scaled())
    b = gradient(factory(family, torch.float32, DEFAULT), [pack([other, *texts[1:]])], Scaled())
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(bool(t.any()) for t in a.values())


def shared_prefix_batch() -> tuple[Batch[Tensor], Batch[Tensor]]:
    """The same two attempts at one prompt, with the prompt shared and with it repeated."""
    rng = np.random.default_rng(2)
    prompt, replies = rng.integers(3, 96, 6), [rng.integers(3, 96, 4), rng.integers(3, 96, 7)]
    texts = []
    for reply in replies:
        n = 6 + len(reply)
        mask = (np.arange(n) >= 5) & (np.arange(n) < n - 1)
        texts.append(Sequence(np.append(prompt, reply), mask, mask * 0.25, np.arange(n) / 7.0))
    pieces = [Sequence(prompt[:5], np.zeros(5, bool), np.zeros(5), np.zeros(5))]
    pieces += [Sequence(t.tokens[5:], t.mask[5:], t.weights[5:], t.constants[5:]) for t in texts]
    shared = pack(pieces)
    targets = shared.targets_T.clone()
    targets[4] = int(prompt[5])  # a prefix goes on in its branches
    return replace(shared, targets_T=targets, layout=Layout(shared.layout.lengths, (-1, 0, 0))), pack(texts)


@pytest.mark.parametrize("family", [*DENSE, "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_shared_prompt_equals_a_repeated_one(factory: Factory, family: str, dtype: torch.dtype) -> None:
    if not factory(family, dtype, DEFAULT).capabilities.shared_prefix:
        pytest.skip("this backend does not share prefixes, and says so")
    shared, repeated = shared_prefix_batch()
    engine = factory(family, dtype, DEFAULT)
    (a,), (b,) = (asyncio.run(engine.forward([batch])) for batch in (shared, repeated))
    close = 1e-10 if dtype == torch.float64 and family not in ("gpt_oss", "deepseek_v3") else 1e-5
    assert torch.allclose(a.logprobs_T[shared.mask_T], b.logprobs_T[repeated.mask_T], rtol=0, atol=close)
    grads = [gradient(factory(family, dtype, DEFAULT), [batch], Scaled()) for batch in (shared, repeated)]
    assert_close(grads[0], grads[1], TOLERANCE[dtype])


def test_outputs_are_aligned_to_targets_and_follow_the_mask(factory: Factory) -> None:
    engine = factory("qwen3", torch.float32, DEFAULT)
    batch = pack(sequences(4))
    every, masked = (
        asyncio.run(engine.forward([batch], Want(every_row=e, entropy=True, top_k=96)))[0] for e in (True, False)
    )
    assert torch.allclose(every.logprobs_T[batch.mask_T], masked.logprobs_T[batch.mask_T], rtol=0, atol=1e-5)
    assert (masked.logprobs_T[~batch.mask_T] == 0).all()
    assert (every.logprobs_T[batch.targets_T < 0] == 0).all()
    assert every.top_k_ids_TK is not None and every.top_k_logprobs_TK is not None and every.entropy_T is not None
    hit = every.top_k_ids_TK == batch.targets_T[:, None]
    assert hit.any()
    assert torch.allclose(every.top_k_logprobs_TK[hit], every.logprobs_T[hit.any(-1)], atol=1e-6)
    assert ((every.entropy_T >= 0) & (every.entropy_T <= math.log(96) + 1e-4)).all()


def test_forward_and_forward_backward_give_the_same_outputs_in_order(factory: Factory) -> None:
    batches = [pack([t]) for t in sequences(5)[1:]]
    engine = factory("qwen3", torch.float32, DEFAULT)
    scored = asyncio.run(engine.forward(batches))
    learned = asyncio.run(engine.forward_backward(batches, Scaled()))
    assert len(scored) == len(learned.outputs) == len(batches)
    for a, b in zip(scored, learned.outputs, strict=True):
        assert torch.equal(a.logprobs_T, b.logprobs_T)
        assert not b.logprobs_T.requires_grad
    metric = learned.metrics["loss/scaled"]
    assert metric.reduction is Reduction.MEAN
    assert float(metric.count) == sum(int(b.mask_T.sum()) for b in batches)


def test_temperature_divides_the_logits(factory: Factory) -> None:
    """A41: half the temperature is twice the logits, not twice the logprob."""
    text = sequences(3)[1:2]
    engine = factory("qwen3", torch.float64, DEFAULT)
    want = Want(every_row=True, top_k=96)
    (plain,), (sharp,) = (asyncio.run(engine.forward([pack(text, t)], want)) for t in (None, 0.5))
    assert plain.top_k_logprobs_TK is not None and plain.top_k_ids_TK is not None
    rows = pack(text).targets_T >= 0
    twice = (2 * plain.top_k_logprobs_TK[rows]).log_softmax(-1)
    place = plain.top_k_ids_TK[rows] == pack(text).targets_T[rows][:, None]
    assert torch.allclose(twice[place], sharp.logprobs_T[rows], atol=1e-5)


def test_forward_leaves_accumulated_gradients_alone(factory: Factory) -> None:
    texts = sequences()
    expected = gradient(factory("qwen3", torch.float32, DEFAULT), [pack(texts)], Scaled())
    engine = factory("qwen3", torch.float32, DEFAULT)
    before = weights_of(engine)

    async def run() -> None:
        await engine.forward_backward([pack(texts)], Scaled())
        await engine.forward([pack(texts[:3])], Want(every_row=True))
        await engine.optim_step(READ)

    asyncio.run(run())
    after = weights_of(engine)
    assert all(torch.equal(before[n] - after[n], expected[n]) for n in before)


def test_zero_grad_and_a_step_clear_gradients(factory: Factory) -> None:
    engine = factory("qwen3", torch.float32, DEFAULT)
    batch = pack(sequences())

    async def run() -> None:
        await engine.forward_backward([batch], Scaled())
        await engine.zero_grad()
        nothing = await engine.optim_step(READ)
        assert nothing.skipped and nothing.reason is SkipReason.NO_GRADIENT and not nothing.applied
        await engine.forward_backward([batch], Scaled())
        assert not (await engine.optim_step(READ)).skipped
        assert (await engine.optim_step(READ)).reason is SkipReason.NO_GRADIENT

    asyncio.run(run())


def test_hyper_parameters_come_by_value_on_each_call(factory: Factory) -> None:
    """Twice the rate moves twice as far, and nothing of an earlier call is left in a later one."""
    batch = pack(sequences())
    moved = []
    for lr in (1e-3, 2e-3):
        engine = factory("qwen3", torch.float64, DEFAULT)
        before = weights_of(engine)
        asyncio.run(engine.forward_backward([batch], Scaled()))
        outcome = asyncio.run(engine.optim_step(OptimParams(lr=lr, max_grad_norm=math.inf)))
        assert {applied.lr for applied in outcome.applied.values()} == {lr}
        moved.append({n: before[n] - t for n, t in weights_of(engine).items()})
    assert_close({n: 2e3 * t for n, t in moved[0].items()}, {n: 1e3 * t for n, t in moved[1].items()}, 1e-9)


def test_decay_reaches_matrices_only(factory: Factory) -> None:
    engine = factory("qwen2", torch.float64, DEFAULT)
    before = weights_of(engine)
    silent = [replace(t, weights=np.zeros_like(t.weights)) for t in sequences()]
    asyncio.run(engine.forward_backward([pack(silent)], Scaled()))
    asyncio.run(engine.optim_step(OptimParams(lr=0.1, weight_decay=0.5)))
    for name, tensor in weights_of(engine).items():
        kept = 1.0 if before[name].ndim < 2 else 1.0 - 0.1 * 0.5
        assert torch.allclose(tensor, kept * before[name], rtol=1e-12), name


def test_clipping_is_by_the_global_norm(factory: Factory) -> None:
    texts = sequences()
    full = gradient(factory("qwen3", torch.float64, DEFAULT), [pack(texts)], Scaled())
    norm = math.sqrt(sum(float((g**2).sum()) for g in full.values()))
    engine = factory("qwen3", torch.float64, DEFAULT)
    before = weights_of(engine)
    asyncio.run(engine.forward_backward([pack(texts)], Scaled()))
    outcome = asyncio.run(engine.optim_step(replace(READ, max_grad_norm=norm / 4)))
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
    clipped = {n: before[n] - t for n, t in weights_of(engine).items()}
    assert_close({n: g / 4 for n, g in full.items()}, clipped, 1e-5)


@dataclass(frozen=True, slots=True)
class Exploding:
    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        return outputs.logprobs_T * math.inf, {}


def test_a_non_finite_gradient_is_a_typed_skip(factory: Factory, tmp_path: Path) -> None:
    """Parameters and moments stay as they were to the bit; the next step is the step that would have been."""
    batch, step = pack(sequences()), OptimParams(lr=1e-3)
    ends = []
    for explode in (False, True):
        engine = factory("qwen3", torch.float32, DEFAULT)
        asyncio.run(engine.forward_backward([batch], Scaled()))
        asyncio.run(engine.optim_step(step))
        if explode:
            asyncio.run(engine.forward_backward([batch], Exploding()))
            outcome = asyncio.run(engine.optim_step(step))
            assert outcome.skipped and outcome.reason is SkipReason.NON_FINITE_GRADIENT
            assert not math.isfinite(outcome.grad_norm)
        asyncio.run(engine.forward_backward([batch], Scaled()))
        asyncio.run(engine.optim_step(step))
        ends.append(weights_of(engine))
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_save_load_step_equals_step(factory: Factory, tmp_path: Path, optimizer: str) -> None:
    """D06: moments and step counts come back; the next update is bitwise the same."""
    config = EngineConfig.model_validate({"optimizer": optimizer})
    batch, step = pack(sequences()), OptimParams(lr=1e-2, weight_decay=0.1)

    def learn(engine: Engine) -> None:
        asyncio.run(engine.forward_backward([batch], Scaled()))
        asyncio.run(engine.optim_step(step))

    engine = factory("qwen3", torch.float32, config)
    learn(engine)
    learn(engine)
    asyncio.run(engine.save(tmp_path))
    learn(engine)
    expected = weights_of(engine)
    other = factory("qwen3", torch.float32, config)
    asyncio.run(other.load(tmp_path))
    learn(other)
    got = weights_of(other)
    assert all(torch.equal(expected[n], got[n]) for n in expected)


def test_load_refuses_what_is_not_its_own(factory: Factory, tmp_path: Path) -> None:
    engine = factory("qwen3", torch.float32, DEFAULT)
    with pytest.raises(StropError, match=r"model\.safetensors"):
        asyncio.run(engine.load(tmp_path))
    asyncio.run(factory("llama", torch.float32, DEFAULT).save(tmp_path))
    before = weights_of(engine)
    with pytest.raises(StropError, match="do not fit"):
        asyncio.run(engine.load(tmp_path))
    assert all(torch.equal(before[n], t) for n, t in weights_of(engine).items())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_weights_are_copies_under_hugging_face_names(factory: Factory, family: str) -> None:
    """E06, E07: bitwise, buffers included, a tied head once; training afterwards does not write to them."""
    engine = factory(family, torch.float32, DEFAULT)
    published = dict(engine.weights())
    expected = tiny_model(family).module.state_dict()
    tied = family == "llama"
    assert published.keys() == expected.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(published[n], expected[n]) for n in published)
    frozen = {n: t.clone() for n, t in published.items()}
    asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
    asyncio.run(engine.optim_step(OptimParams(lr=0.1)))
    assert all(torch.equal(published[n], frozen[n]) for n in published)
    assert any(not torch.equal(t, frozen[n]) for n, t in engine.weights())


ACTIVATIONS: dict[str, dict[str, object]] = {
    "checkpointed": {"checkpoint_every": 1},
    "every other layer": {"checkpoint_every": 2},
    "a part of each layer": {"checkpoint_modules": ["**.mlp"]},
    "offloaded": {"offload": True, "offload_min_kib": 0},
    "a part offloaded": {"offload": True, "offload_min_kib": 0, "offload_modules": ["**.self_attn", "**.mlp"]},
    "both": {"checkpoint_every": 1, "offload": True, "offload_min_kib": 0, "offload_idle_mib": 0},
}


@pytest.mark.parametrize("how", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_where_activations_wait_changes_no_bit(factory: Factory, family: str, how: dict[str, object]) -> None:
    config, loss = EngineConfig.model_validate({"activations": how}), Scaled(entropy=0.2)
    batches = [pack(sequences(seed=seed)) for seed in (0, 1)]
    a = gradient(factory(family, torch.float32, DEFAULT), batches, loss)
    b = gradient(factory(family, torch.float32, config), batches, loss)
    assert all(torch.equal(a[name], b[name]) for name in a) and any(bool(t.any()) for t in a.values())


@pytest.mark.parametrize("key", ["checkpoint_modules", "offload_modules"])
def test_a_pattern_that_matches_no_module_is_refused(factory: Factory, key: str) -> None:
    how = {key: ["model.layers.*", "model.layer.*.mlp"]} | ({"offload": True} if "offload" in key else {})
    config = EngineConfig.model_validate({"activations": how})
    with pytest.raises(
        StropError, match=rf"engine.activations.{key}: 'model.layer.\*.mlp' matches nothing; .*model.layers"
    ):
        factory("qwen3", torch.float32, config)


def test_a_head_that_keeps_its_logits_changes_no_number(factory: Factory) -> None:
    loss = Scaled(entropy=0.2)
    a = gradient(factory("qwen3", torch.float32, DEFAULT), [pack(sequences())], loss)
    b = gradient(factory("qwen3", torch.float32, EngineConfig(head="plain")), [pack(sequences())], loss)
    assert_close(a, b, 1e-5)


def test_an_all_masked_batch_adds_nothing(factory: Factory) -> None:
    """G09: no rows, no graph, no NaN; the step after it is skipped as having no gradient."""
    silent = [replace(t, mask=np.zeros_like(t.mask), weights=np.zeros_like(t.weights)) for t in sequences()]
    engine = factory("qwen3", torch.float32, DEFAULT)
    learned = asyncio.run(engine.forward_backward([pack(silent)], CrossEntropy()))  # pyright: ignore[reportArgumentType]
    assert learned.metrics["loss/nll"].count == 0
    assert (learned.outputs[0].logprobs_T == 0).all()
    outcome = asyncio.run(engine.optim_step(OptimParams(lr=0.1)))
    assert outcome.skipped or outcome.grad_norm == 0.0


def test_poison_where_the_mask_is_off_changes_nothing(factory: Factory) -> None:
    texts = sequences()
    poisoned = [replace(t, constants=np.where(t.mask, t.constants, np.nan)) for t in texts]
    a = gradient(factory("qwen3", torch.float32, DEFAULT), [pack(texts)], Scaled())
    b = gradient(factory("qwen3", torch.float32, DEFAULT), [pack(poisoned)], Scaled())
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_muon_moves_hidden_matrices_by_orthogonal_steps(factory: Factory) -> None:
    engine = factory("qwen3", torch.float32, EngineConfig(optimizer="muon"))
    before = weights_of(engine)
    asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
    asyncio.run(engine.optim_step(OptimParams(lr=1e-2)))
    moved = {n: before[n] - t for n, t in weights_of(engine).items()}
    hidden = torch.linalg.svdvals(moved["model.layers.0.mlp.up_proj.weight"])
    assert hidden[8] > 0.6 * hidden[0]  # Newton-Schulz brings singular values near one another
    embedding = moved["model.embed_tokens.weight"].abs()
    assert torch.allclose(embedding[embedding > 1e-6], torch.tensor(1e-2).double(), rtol=1e-2)  # AdamW's first step: lr


def test_what_a_backend_cannot_do_is_an_error(factory: Factory) -> None:
    engine = factory("qwen3", torch.float32, DEFAULT)
    if not engine.capabilities.lora:
        with pytest.raises(StropError, match="adapter"):
            engine.adapter("a", AdapterConfig(rank=2))
    if not engine.capabilities.value_head:
        with pytest.raises(StropError, match="values"):
            asyncio.run(engine.forward([pack(sequences())], Want(values=True)))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_bfloat16_is_float32_to_its_own_precision(factory: Factory, family: str) -> None:
    norms, logprobs = [], []
    for dtype in (torch.bfloat16, torch.float32):
        engine = factory(family, dtype, DEFAULT)
        learned = asyncio.run(engine.forward_backward([pack(sequences())], Scaled()))
        logprobs.append(learned.outputs[0].logprobs_T)
        norms.append(asyncio.run(engine.optim_step(OptimParams(lr=1e-3))).grad_norm)
        assert all(tensor.dtype == dtype for _, tensor in engine.weights() if tensor.is_floating_point())
    assert torch.allclose(*logprobs, atol=0.05) and not torch.equal(*logprobs)
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
