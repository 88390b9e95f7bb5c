"""Routes recorded and replayed by an engine, for every family of mixture-of-experts models: tiny random models of the
real architectures, packed with a shared prefix, with checkpointing and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from strop.algos.losses import masked_mean
from strop.config.adapter import AdapterConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import EngineError
from strop.models.attention import NAME
from strop.models.loading import prepare
from strop.models.moe import Router, find_routers
from strop.ops.select import Impl
from strop.types import Layout, Metrics, Outputs, Routes, Want, results
from tests.tiny_models import EXPERT_MODELS, FAMILIES

CONFIGS = {
    "plain": EngineConfig(),
    "checkpointed": EngineConfig.model_validate({"activations": {"checkpoint_every": 1}}),
    "offloaded": EngineConfig.model_validate({"activations": {"offload": True, "offload_min_kib": 0}}),
}
LAYOUT = Layout((5, 4, 6, 9), (-1, 0, 0, -1))
TOP_1 = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "minimax_m2")


def tiny(family: str, seed: int, attention: str = NAME, **fields: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(FAMILIES[family] | fields))
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.ndim >= 2:
                tensor.normal_(0.0, 0.2)
            elif "e_score_correction_bias" in name:
                tensor.normal_(0.0, 0.3)
    return module.eval()


def engine(
    family: str,
    seed: int = 0,
    config: EngineConfig = CONFIGS["plain"],
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Fsdp2Engine:
    module = tiny(family, seed, **fields)
    nn.Module.to(module, dtype)
    return Fsdp2Engine(prepare(module, Impl.TORCH), config)


def batch(layout: Layout = LAYOUT, seed: int = 0, routes: Routes | None = None) -> Batch[Tensor]:
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(3, 96, layout.num_tokens)
    targets_T = rng.integers(3, 96, layout.num_tokens)
    last_S = layout.starts_S + layout.lengths_S - 1
    targets_T[last_S] = -1
    mask_T = targets_T >= 0
    return Batch(
        tokens_T=torch.from_numpy(tokens_T),
        targets_T=torch.from_numpy(targets_T),
        mask_T=torch.from_numpy(mask_T),
        weights_T=torch.from_numpy(np.where(mask_T, rng.normal(size=len(mask_T)), 0.0).astype(np.float32)),
        layout=layout,
        inputs=torch.from_numpy(rng.normal(size=len(mask_T)).astype(np.float32)),
        routes=routes,
    )


@dataclass(frozen=True, slots=True)
class Scaled:
    """A loss of logprobs and a constant for each token. `during` is called while the engine is at it."""

    wants: Want = Want()  # noqa: RUF009
    during: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def want(self) -> Want:
        return self.wants

    def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        for call in self.during:
            call()
        loss_T = -inputs * torch.exp(outputs.logprobs_T.clamp(min=-8.0) * 0.5)
        return loss_T, {"loss": masked_mean(loss_T, mask_T)}


NOTHING, PLAIN = Want(), Scaled()


def learn(
    at: Fsdp2Engine,
    batches: list[Batch[Tensor]],
    want: Want = NOTHING,
    loss: Scaled = PLAIN,
) -> tuple[list[Outputs], dict[str, Tensor], dict[str, float]]:
    """(outputs, gradients, metrics) of one call."""
    at.model.module.zero_grad()
    done = asyncio.run(at.forward_backward(batches, loss, want))
    gradients = {name: p.grad.clone() for name, p in at.model.module.named_parameters() if p.grad is not None}
    return done.outputs, gradients, results(done.metrics)


def taken(at: Fsdp2Engine, of: Batch[Tensor]) -> Routes:
    routes = asyncio.run(at.forward([of], Want(routes=True)))[0].routes
    assert routes is not None
    return routes


def routers(at: Fsdp2Engine) -> tuple[Router, ...]:
    return find_routers(at.model.module)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_replay_of_a_models_own_routes_changes_no_bit(family: str, config: EngineConfig) -> None:
    of, at = batch(), engine(family, config=config)
    plain, expected, _ = learn(at, [of])
    recorded, gradients, _ = learn(at, [of], Want(routes=True))
    routes = recorded[0].routes
    assert routes is not None and routes.experts_TLK.dtype == np.int16
    assert routes.experts_TLK.shape == (len(of), len(routers(at)), routers(at)[0].top_k)
    replayed, again, metrics = learn(at, [replace(of, routes=routes)])
    assert torch.equal(plain[0].logprobs_T, recorded[0].logprobs_T)
    assert torch.equal(plain[0].logprobs_T, replayed[0].logprobs_T)
    for name, gradient in expected.items():
        assert torch.equal(gradient, gradients[name]), f"{name} changes when routes are recorded"
        assert torch.equal(gradient, again[name]), f"{name} changes when routes are replayed"
    assert (metrics["router/replayed"], metrics["router/disagreement"]) == (1.0, 0.0)
    assert np.array_equal(routes.experts_TLK, taken(at, of).experts_TLK)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_replay_of_own_routes_changes_no_bit_in_other_formats(family: str, dtype: torch.dtype) -> None:
    of, at = batch(), engine(family, dtype=dtype)
    plain, expected, _ = learn(at, [of])
    replayed, again, _ = learn(at, [replace(of, routes=taken(at, of))])
    assert torch.equal(plain[0].logprobs_T, replayed[0].logprobs_T)
    assert all(torch.equal(gradient, again[name]) for name, gradient in expected.items())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_replay_of_other_weights_routes_takes_them_in_every_row(family: str, config: EngineConfig) -> None:
    of, at = batch(), engine(family, config=config)
    other, own = taken(engine(family, seed=1), of), taken(at, of)
    differ_TL = (np.sort(other.experts_TLK, -1) != np.sort(own.experts_TLK, -1)).any(-1)
    assert differ_TL.mean() > 0.3, "the two models route alike: this test would see nothing"
    given = replace(of, routes=other)
    outputs, gradients, metrics = learn(at, [given], Want(routes=True))
    assert outputs[0].routes is not None
    assert np.array_equal(outputs[0].routes.experts_TLK, other.experts_TLK)
    assert metrics["router/replayed"] == 1.0
    assert metrics["router/disagreement"] > 0.3
    first = Routes(other.layers, other.experts_TLK.copy())
    first.experts_TLK[:, 1:] = -1  # what later layers would choose depends on what was replayed before them
    metrics = learn(at, [replace(of, routes=first)])[2]
    assert metrics["router/disagreement"] == pytest.approx(differ_TL[:, 0].mean())
    assert metrics["router/replayed"] == pytest.approx(1 / len(other.layers))
    assert not torch.equal(outputs[0].logprobs_T, asyncio.run(at.forward([of]))[0].logprobs_T)
    # nothing stays behind: the next batch without routes is routed by the model
    assert np.array_equal(taken(at, of).experts_TLK, own.experts_TLK)
    plain = learn(engine(family), [given])[1]
    assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients.items())


def reference_weights(family: str, config: PretrainedConfig, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Each family's formula, as its paper has it, from the scores of all experts and a mask of the chosen ones."""
    picked_TKE = F.one_hot(ids_TK, logits_TE.shape[1]).to(logits_TE.dtype)
    if family == "gpt_oss":
        chosen_TE = picked_TKE.sum(1) > 0
        scores_TE = torch.softmax(logits_TE.masked_fill(~chosen_TE, -torch.inf), -1)
        return torch.einsum("te,tke->tk", scores_TE, picked_TKE)
    sigmoid = family in ("deepseek_v3", "glm4_moe", "minimax_m2")
    scores_TE = 1 / (1 + torch.exp(-logits_TE)) if sigmoid else torch.exp(logits_TE - logits_TE.logsumexp(-1, True))
    weights_TK = torch.einsum("te,tke->tk", scores_TE, picked_TKE)
    always = family in ("mixtral", "qwen3_5_moe_text", "minimax_m2")
    if always or config.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK * config.routed_scaling_factor if family in ("deepseek_v3", "glm4_moe") else weights_TK


class ReferenceRouter(nn.Module):
    """A router that takes the routes it was made with, written anew."""

    def __init__(self, family: str, router: Router, config: PretrainedConfig, ids_TK: Tensor) -> None:
        super().__init__()
        self.family, self.config, self.ids_TK = family, config, ids_TK
        self.weight = router.module.get_parameter("weight")
        self.bias = router.module.get_parameter("bias") if family == "gpt_oss" else None

    def forward(self, hidden_states: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = F.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight, self.bias)
        return logits_TE, reference_weights(self.family, self.config, logits_TE, self.ids_TK), self.ids_TK


def reference_gradients(family: str, of: Batch[Tensor], routes: Routes) -> dict[str, Tensor]:
    """Of a plain transformers model, one whole text at a time, with routers of this file."""
    module = tiny(family, 0, attention="eager")
    module.set_experts_implementation("eager")
    found = find_routers(module)
    names = {id(part): name for name, part in module.named_modules()}
    layout, starts_S = of.layout, of.layout.starts_S
    for s, length in enumerate(layout.lengths):
        own = np.arange(starts_S[s], starts_S[s] + length)
        prefix = layout.parents[s]
        before = np.arange(layout.lengths[prefix]) + starts_S[prefix] if prefix >= 0 else own[:0]
        rows = torch.from_numpy(np.concatenate([before, own]))
        for n, router in enumerate(found):
            ids_TK = torch.from_numpy(routes.experts_TLK[rows.numpy(), n]).long()
            module.set_submodule(names[id(router.module)], ReferenceRouter(family, router, module.config, ids_TK))
        logprobs_TV = module(of.tokens_T[rows][None], use_cache=False).logits[0].log_softmax(-1)
        scored = rows[len(before) :]
        target_T = of.targets_T[scored].clamp(min=0)
        logprobs_T = logprobs_TV[len(before) :].gather(1, target_T[:, None])[:, 0]
        loss_T = -of.inputs[scored] * torch.exp(logprobs_T.clamp(min=-8.0) * 0.5)
        (loss_T * of.weights_T[scored]).sum().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_gradients_under_replay_are_those_of_an_independent_reference(family: str) -> None:
    """H08: the weights come from the current scores at the replayed experts, and the router learns through them."""
    of = batch()
    routes = taken(engine(family, seed=1), of)
    expected = reference_gradients(family, of, routes)
    for config in (CONFIGS["plain"], CONFIGS["checkpointed"]):
        at = engine(family, config=config)
        gradients = learn(at, [replace(of, routes=routes)])[1]
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        gates = [name for name in expected if name.endswith(("mlp.gate.weight", "router.weight", "router.bias"))]
        assert len(gates) == len(routers(at)) * (2 if family == "gpt_oss" else 1)
        for name in gates:
            assert float(expected[name].abs().max()) > 1e-4 * scale, f"{name}: no gradient to compare"
        for name, gradient in expected.items():
            worst = float((gradients[name] - gradient).abs().max())
            assert worst <= 2e-5 * scale, f"{name}: {worst:.1e} apart at scale {scale:.1e}"


@pytest.mark.parametrize("family", TOP_1)
def test_one_expert_a_token(family: str) -> None:
    of, at = batch(), engine(family, num_experts_per_tok=1)
    plain, expected, _ = learn(at, [of])
    own = taken(at, of)
    replayed, gradients, _ = learn(at, [replace(of, routes=own)])
    assert own.experts_TLK.shape[2] == 1
    assert torch.equal(plain[0].logprobs_T, replayed[0].logprobs_T)
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in expected.items())
    moved = Routes(own.layers, ((own.experts_TLK + 1) % 4).astype(np.int16))
    outputs, _, metrics = learn(at, [replace(of, routes=moved)], Want(routes=True))
    assert outputs[0].routes is not None and np.array_equal(outputs[0].routes.experts_TLK, moved.experts_TLK)
    assert metrics["router/disagreement"] >= 1 / len(own.layers)  # all of the first layer's


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_rows_without_a_route_are_routed_by_the_model_and_counted(family: str) -> None:
    of, at = batch(), engine(family)
    own, other = taken(at, of), taken(engine(family, seed=1), of)
    # an all-unknown first text: its tokens meet nobody else's, so they are routed as without replay
    first = slice(15, 24)  # the last text of the layout
    other.experts_TLK[first] = -1
    outputs, _, metrics = learn(at, [replace(of, routes=other)], Want(routes=True))
    routes = outputs[0].routes
    assert routes is not None
    assert np.array_equal(routes.experts_TLK[first], own.experts_TLK[first])
    assert np.array_equal(routes.experts_TLK[:15], other.experts_TLK[:15])
    assert metrics["router/replayed"] == pytest.approx(15 / 24)
    nothing = Routes(own.layers, np.full_like(own.experts_TLK, -1))
    outputs, _, metrics = learn(at, [replace(of, routes=nothing)])
    assert torch.equal(outputs[0].logprobs_T, asyncio.run(at.forward([of]))[0].logprobs_T)
    assert metrics["router/replayed"] == 0.0 and "router/disagreement" not in metrics


def test_the_order_of_batches_does_not_matter() -> None:
    parts = [batch(), batch(Layout((7, 3)), seed=1), batch(Layout((11,)), seed=2)]
    other, at = engine("qwen3_moe", seed=1), engine("qwen3_moe", config=CONFIGS["checkpointed"])
    given = [replace(of, routes=taken(other, of)) for of in parts]
    forth, _, _ = learn(at, given)
    back, _, _ = learn(at, given[::-1])
    for one, two in zip(forth, back[::-1], strict=True):
        assert torch.equal(one.logprobs_T, two.logprobs_T)
    one, two = learn(at, given)[1], learn(at, given[::-1])[1]
    scale = max(float(gradient.abs().max()) for gradient in one.values())
    assert all(torch.allclose(one[name], two[name], atol=1e-6 * scale) for name in one)


def test_two_models_in_one_process_do_not_see_each_other() -> None:
    """H02's class: nothing is kept beside the model. One engine records and replays while another is between its
    forward and its backward pass, which runs its layers again."""
    of = batch()
    policy, reference = engine("qwen3_moe", config=CONFIGS["checkpointed"]), engine("qwen3_moe", seed=1)
    third = taken(engine("qwen3_moe", seed=2), of)
    expected, gradients, _ = learn(policy, [replace(of, routes=third)], Want(routes=True))
    own = taken(reference, of)
    seen: list[Outputs] = []

    def meanwhile() -> None:
        with torch.no_grad():
            seen.append(reference._score(replace(of, routes=None), Want(routes=True)))  # pyright: ignore

    outputs, again, _ = learn(policy, [replace(of, routes=third)], Want(routes=True), Scaled(during=[meanwhile]))
    assert seen[0].routes is not None and np.array_equal(seen[0].routes.experts_TLK, own.experts_TLK)
    assert torch.equal(outputs[0].logprobs_T, expected[0].logprobs_T)
    assert all(torch.equal(gradient, again[name]) for name, gradient in gradients.items())


def test_nothing_is_installed_unless_routes_are_wanted_or_given() -> None:
    of, at = batch(), engine("qwen3_moe", config=CONFIGS["checkpointed"])
    found, during = routers(at), list[bool]()
    loss = Scaled(during=[lambda: during.append(any("forward" in vars(router.module) for router in found))])
    learn(at, [of], loss=loss)
    learn(at, [replace(of, routes=taken(at, of))], loss=loss)
    assert during == [False, True]
    assert not any("forward" in vars(router.module) or router.module._forward_hooks for router in found)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    of, at = batch(), engine("qwen3_moe")

    def fail() -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        learn(at, [of], Want(routes=True), Scaled(during=[fail]))
    assert not any("forward" in vars(router.module) for router in routers(at))
    learn(at, [of], Want(routes=True))


def test_columns_find_their_layer_by_number_and_others_are_not_used() -> None:
    """A sampler that reports dense layers too, or in another order, shifts nothing."""
    of, at = batch(), engine("deepseek_v3", num_hidden_layers=3)
    other = taken(engine("deepseek_v3", seed=1, num_hidden_layers=3), of)
    assert other.layers == (1, 2)
    dense = np.zeros_like(other.experts_TLK[:, :1])
    wide = Routes((2, 0, 1), np.concatenate([other.experts_TLK[:, 1:], dense, other.experts_TLK[:, :1]], 1))
    assert np.array_equal(taken(at, replace(of, routes=wide)).experts_TLK, other.experts_TLK)


def with_row(routes: Routes, *row: int) -> Routes:
    experts = routes.experts_TLK.copy()
    experts[3, 1] = row
    return Routes(routes.layers, experts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: Routes(r.layers, r.experts_TLK[:-1]), "routes of 23 tokens were given with a batch of 24"),
        (lambda r: Routes((0,), r.experts_TLK[:, :1]), r"those of layers \[1\] are missing"),
        (lambda r: Routes(r.layers, r.experts_TLK[:, :, :1]), "name 1 experts for each token, its router chooses 2"),
        (lambda r: with_row(r, 1, 4), r"routes of layer 1 name experts \[.*4\]; there are 4"),
        (lambda r: with_row(r, 1, -2), r"routes of layer 1 name experts \[-2"),
        (lambda r: with_row(r, 1, -1), r"the route of token 3 in layer 1 is \[1, -1\]"),
        (lambda r: with_row(r, 0, 0), r"the route of token 3 in layer 1 is \[0, 0\]: no router chooses that"),
    ],
)  # fmt: skip
def test_routes_that_do_not_fit_are_refused(change: Callable[[Routes], Routes], says: str) -> None:
    """H06: -1 never indexes, and zeros that only pad are told from a choice by what they are, not guessed at."""
    of, at = batch(), engine("qwen3_moe")
    with pytest.raises(EngineError, match=says):
        learn(at, [replace(of, routes=change(taken(at, of)))])


def test_a_model_without_routers_refuses_both() -> None:
    of, at = batch(), engine("qwen3")
    assert not at.capabilities.router_replay and engine("qwen3_moe").capabilities.router_replay
    with pytest.raises(EngineError, match="Qwen3ForCausalLM has no routers"):
        learn(at, [of], Want(routes=True))
    with pytest.raises(EngineError, match="has no routers"):
        learn(at, [replace(of, routes=Routes((0,), np.zeros((24, 1, 2), np.int16)))])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_router_logits_come_with_their_graph(family: str, config: EngineConfig) -> None:
    """H09: what the outputs hold are logits, not probabilities; and a loss on them reaches the routers' weights."""

    @dataclass(frozen=True)
    class Squares:
        want: Want = Want(router_logits=True)  # noqa: RUF009

        def __call__(self, outputs: Outputs, inputs: Tensor, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
            assert outputs.router_logits_TLE is not None
            return (outputs.router_logits_TLE**2).sum((1, 2)), {}

    of, at = batch(), engine(family, config=config)
    scored = asyncio.run(at.forward([of], Want(router_logits=True)))[0].router_logits_TLE
    assert scored is not None and bool((scored < 0).any())
    at.model.module.zero_grad()
    asyncio.run(at.forward_backward([of], Squares()))
    plain = engine(family)
    asyncio.run(plain.forward_backward([of], Squares()))
    for one, two in zip(routers(at), routers(plain), strict=True):
        gradient, expected = one.module.get_parameter("weight").grad, two.module.get_parameter("weight").grad
        assert gradient is not None and expected is not None
        assert float(expected.abs().max()) > 0 and torch.equal(gradient, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_routes_of_one_format_are_replayed_in_another(family: str) -> None:
    """H07: the same rows in bfloat16, float32 and float64; no format takes a path of its own."""
    of = batch()
    given = taken(engine(family, dtype=torch.bfloat16), of)
    for dtype in (torch.float32, torch.float64):
        assert np.array_equal(
            taken(engine(family, dtype=dtype), replace(of, routes=given)).experts_TLK, given.experts_TLK
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_adapter_replays_over_a_base_that_chooses_for_itself(family: str) -> None:
    """The reference is the same module without the adapter: its pass neither takes nor leaves routes."""
    of = batch()
    base = Fsdp2Engine(prepare(tiny(family, 0), Impl.TORCH), CONFIGS["checkpointed"], trainable=False)
    kinds = {"rank": 4, "targets": ["attention", "experts"]}
    at = base.adapter("a", AdapterConfig.model_validate(kinds))
    with torch.no_grad():
        for name, parameter in at.model.module.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    own, bare = taken(at, of), taken(base, of)
    assert not np.array_equal(own.experts_TLK, bare.experts_TLK)
    plain, gradients, _ = learn(at, [of])
    replayed, again, metrics = learn(at, [replace(of, routes=own)])
    assert torch.equal(plain[0].logprobs_T, replayed[0].logprobs_T) and metrics["router/disagreement"] == 0.0
    assert gradients.keys() == again.keys() and all("lora_" in name for name in gradients)
    assert all(torch.equal(gradient, again[name]) for name, gradient in gradients.items())
    foreign = learn(at, [replace(of, routes=bare)], Want(routes=True))[0][0].routes
    assert foreign is not None and np.array_equal(foreign.experts_TLK, bare.experts_TLK)
    assert np.array_equal(taken(base, of).experts_TLK, bare.experts_TLK)
