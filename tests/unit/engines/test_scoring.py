"""The engine's head: every form gives the same outputs and the same gradient, and fused fuses what it may."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algos import losses, sequence_losses
from strop.algos.losses import ClippedSurrogate, CrossEntropy, PolicyInputs, PolicyLoss
from strop.algos.sequence_losses import GSPO
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.fsdp2 import scoring
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.errors import ConfigError
from strop.ops.select import Impl
from strop.types import Layout, Metrics, Outputs, Want
from tests.tiny_models import tiny_model

HEADS = ["chunked", "fused", *(["triton"] if find_spec("triton") is not None else [])]
LENGTHS = (7, 5, 9)
TOTAL = sum(LENGTHS)
POLICY = ClippedSurrogate(clip_low=0.1, clip_high=0.1, entropy_coefficient=0.05)
SEQUENCE = GSPO(clip_low=0.1, clip_high=0.1, entropy_coefficient=0.05)


def batch(seed: int = 0, *, ids: bool = False) -> Batch[PolicyInputs]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 96, (TOTAL,), generator=g)
    last = torch.tensor(np.cumsum(LENGTHS) - 1)
    mask = (torch.rand(TOTAL, generator=g) < 0.6).index_fill(0, last, False)
    return Batch(
        tokens_T=tokens,
        targets_T=tokens.roll(-1).index_fill(0, last, -1),
        mask_T=mask,
        weights_T=torch.where(mask, torch.randn(TOTAL, generator=g), 0.0),
        layout=Layout(LENGTHS),
        inputs=PolicyInputs(
            behavior_logprobs_T=torch.full((TOTAL,), -4.6) + 0.2 * torch.randn(TOTAL, generator=g),
            advantages_T=torch.randn(TOTAL, generator=g),
        ),
        temperature_T=torch.full((TOTAL,), 0.8),
        ids_TK=torch.randint(0, 96, (TOTAL, 3), generator=g) if ids else None,
    )


def learned(
    head: str,
    loss: PolicyLoss,
    batches: list[Batch[PolicyInputs]],
    *,
    family: str = "qwen3",
    want: Want = Want(),  # noqa: B008
) -> tuple[list[Outputs], Metrics, dict[str, Tensor]]:
    engine = Fsdp2Engine(tiny_model(family, torch.float64, Impl.TORCH), EngineConfig(head=head, head_rows=4))  # type: ignore[arg-type]
    done = asyncio.run(engine.forward_backward(batches, loss, want))
    grads = {name: p.grad for name, p in engine.model.module.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return done.outputs, done.metrics, {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", [POLICY, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # a free head; a tied one with a soft cap
def test_every_head_learns_the_same(head: str, loss: PolicyLoss, family: str) -> None:
    batches = [batch(0), batch(1)]
    want = Want(top_k=2, square_sums=True)
    outputs, metrics, grads = learned(head, loss, batches, family=family, want=want)
    plain_outputs, plain_metrics, plain_grads = learned("plain", loss, batches, family=family, want=want)
    for a, b in zip(outputs, plain_outputs, strict=True):
        for name in ("logprobs_T", "entropy_T", "square_sums_T", "top_k_ids_TK", "top_k_logprobs_TK"):
            one, other = getattr(a, name), getattr(b, name)
            assert torch.allclose(one, other, rtol=0, atol=1e-10) and not one.requires_grad
            assert one.any()
    assert metrics.keys() == plain_metrics.keys()
    for name, metric in metrics.items():
        assert metric.result == pytest.approx(plain_metrics[name].result, abs=1e-9)
    for name, grad in grads.items():
        assert torch.allclose(grad, plain_grads[name], rtol=0, atol=1e-10), name
    assert max(float(grad.abs().max()) for grad in grads.values()) > 1e-2


@pytest.mark.parametrize("head", HEADS)
def test_logprobs_at_a_batchs_ids(head: str) -> None:
    class AtIds(PolicyLoss):
        per_row = True

        def surrogate(self, at: losses.Scored, layout: Layout) -> tuple[Tensor, Metrics]:
            raise NotImplementedError

        def __call__(self, outputs: Outputs, inputs: Any, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
            assert outputs.ids_logprobs_TK is not None
            return (outputs.ids_logprobs_TK * torch.tensor([1.0, -2.0, 0.5])).sum(-1), {}

    outputs, _, grads = learned(head, AtIds(), [batch(ids=True)])
    plain_outputs, _, plain = learned("plain", AtIds(), [batch(ids=True)])
    (a,), (b,) = outputs, plain_outputs
    assert a.ids_logprobs_TK is not None and b.ids_logprobs_TK is not None
    assert a.ids_logprobs_TK.shape == (TOTAL, 3) and torch.allclose(a.ids_logprobs_TK, b.ids_logprobs_TK, atol=1e-10)
    assert all(torch.allclose(grads[name], plain[name], rtol=0, atol=1e-10) for name in plain)


def test_fused_learns_in_one_pass_what_looks_at_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    for name in ("learn_targets", "score_targets"):
        original = getattr(scoring, name)

        def watched(*args: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            passes.append(name)
            return original(*args, **named)

        monkeypatch.setattr(scoring, name, watched)
    learned("fused", POLICY, [batch()])
    learned("fused", SEQUENCE, [batch()])
    learned("chunked", POLICY, [batch()])
    assert passes == ["learn_targets", "score_targets", "score_targets"]


def test_a_second_batch_adds_to_the_gradient_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    original = scoring.score_targets

    def watched(*args: Any, **named: Any) -> Any:
        given.append(named["weight_grad_VD"] is not None)
        return original(*args, **named)

    monkeypatch.setattr(scoring, "score_targets", watched)
    learned("chunked", POLICY, [batch(0), batch(1), batch(2)])
    learned("plain", POLICY, [batch(0), batch(1)])
    assert given == [False, True, True, False, False]


def losses_of_rows() -> list[PolicyLoss]:
    """Every policy loss that says its tokens stand alone."""
    bounds: dict[str, dict[str, Any]] = {
        "ClippedSurrogate": {"clip_low": 0.2, "clip_high": 0.2},
        "ClipCov": {"clip_low": 0.2, "clip_high": 0.2},
        "CISPO": {"ratio_max": 2.0},
        "DRO": {"beta": 0.05},
        "DPPOTotalVariation": {"low": 0.01, "high": 0.01},
        "DPPOKullbackLeibler": {"low": 0.01, "high": 0.01},
    }
    kinds = [k for module in (losses, sequence_losses) for k in vars(module).values() if isinstance(k, type)]
    named = {k.__name__: k for k in kinds if issubclass(k, PolicyLoss) and k.per_row and not k.__abstractmethods__}
    return [kind(**bounds.get(name, {})) for name, kind in named.items()]


@pytest.mark.parametrize("loss", losses_of_rows(), ids=lambda loss: type(loss).__name__)
def test_a_loss_that_says_its_rows_stand_alone_is_right(loss: PolicyLoss) -> None:
    """Another row's logprob, advantage or mask changes nothing at this one."""
    of = batch()
    inputs = replace(of.inputs, selected_T=torch.arange(TOTAL) % 2 == 0)
    here = int(of.mask_T.nonzero()[1])
    logprobs_T = torch.linspace(-6.0, -0.1, TOTAL)
    whole, _ = loss(Outputs(logprobs_T=logprobs_T), inputs, of.layout, of.mask_T)
    alone = torch.arange(TOTAL) == here
    other, _ = loss(
        Outputs(logprobs_T=torch.where(alone, logprobs_T, -1.0)),
        replace(inputs, advantages_T=torch.where(alone, inputs.advantages_T, 9.0)),
        of.layout,
        of.mask_T & alone,
    )
    assert whole[here] == other[here]


def test_losses_of_sequences_do_not_say_so() -> None:
    assert {type(loss).__name__ for loss in losses_of_rows()} >= {"ClippedSurrogate", "CISPO", "SAPO", "KLCov"}
    assert not SEQUENCE.want.per_row and POLICY.want.per_row and CrossEntropy().want.per_row
    assert not (Want() | CrossEntropy().want).per_row, "it is said of one loss, and not handed on"


def test_a_head_that_cannot_be_had_is_refused_when_the_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.ops.logprobs.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        Fsdp2Engine(tiny_model("qwen3", torch.float32, Impl.TORCH), EngineConfig(head="liger"))
