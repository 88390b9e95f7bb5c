"""Student, teachers, packer and loss at once: the same gradient however a step is packed, and the right number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from strop.algos.distill_losses import Distillation, Divergence, Tail
from strop.algos.losses import ImportanceSampling, PolicyInputs
from strop.config.recipe import EngineConfig
from strop.data.packing import Packed
from strop.data.teaching import spread_weights
from strop.engines.base import Engine, ForwardBackward
from strop.engines.build import build_engine
from strop.loops.teach import compared, rewarded
from strop.ops.select import Impl
from strop.types import Group, Metrics, Trajectory, Want, merge_metrics
from tests.tiny_models import tiny_model
from tests.unit.data.groups import attempt, pack, segment

V = 96
PACKINGS = [(False, 200, 1), (True, 200, 1), (False, 17, 1), (True, 17, 1), (True, 40, 4)]
Learn = Callable[[Packed[PolicyInputs], list[Engine], Engine], Metrics]


def groups() -> list[Group]:
    """Two tasks of three attempts: a failed one, and one with a second segment."""
    rng = np.random.default_rng(0)

    def drawn(n: int) -> list[int]:
        return rng.integers(3, V, n).tolist()

    made: list[Group] = []
    for p, prompt in enumerate((drawn(9), drawn(2))):
        replies = [drawn(n) for n in (5, 1, 8)]
        made.append(Group(f"t{p}", [attempt(prompt, r, (-4.0 - rng.random(len(r))).tolist()) for r in replies]))
    made[1].trajectories[2] = Trajectory(segments=[segment(drawn(4), drawn(3)), segment(drawn(6), drawn(2))])
    return made


ADVANTAGES = [[0.0, 0.0, 0.0], [0.0, np.nan, 0.0]]
WEIGHTS_NM = np.array([[0.25, 0.75]] * 3 + [[0.0, 1.0]] * 2)  # the first task has both teachers, the second one


def teachers() -> list[Engine]:
    return [
        build_engine(EngineConfig(), tiny_model("qwen3", torch.float64, Impl.TORCH, seed=s), trainable=False)
        for s in (1, 2)
    ]


def by_divergence(kind: Divergence, top_k: int, tail: Tail) -> Learn:
    def learn(packed: Packed[PolicyInputs], said: list[Engine], student: Engine) -> Metrics:
        loss, weights = Distillation(divergence=kind, tail=tail, beta=0.3), spread_weights(WEIGHTS_NM, packed.trained)

        async def one(b: int) -> ForwardBackward:
            few = slice(b, b + 1)
            lessons = await compared(packed.batches[few], weights[few], said, top_k=top_k, vocab_size=V)
            return await student.forward_backward(lessons, loss)

        return merge_metrics([asyncio.run(one(b)).metrics for b in range(len(packed.batches))])

    return learn


def by_reward(packed: Packed[PolicyInputs], said: list[Engine], student: Engine) -> Metrics:
    async def learn() -> Metrics:
        lessons, measured = await rewarded(packed, WEIGHTS_NM, said, discount=0.7)
        return (await student.forward_backward(lessons, ImportanceSampling())).metrics | measured

    return asyncio.run(learn())


LEARN: dict[str, Learn] = {
    "forward": by_divergence(Divergence.FORWARD_KL, V, Tail.DROPPED),
    "top-k": by_divergence(Divergence.REVERSE_KL, 5, Tail.BUCKET),
    "jensen-shannon": by_divergence(Divergence.JENSEN_SHANNON, 5, Tail.RENORMALISED),
    "reward": by_reward,
}


@pytest.mark.parametrize("objective", list(LEARN))
def test_the_gradient_does_not_depend_on_the_packing(objective: str) -> None:
    """A01: shared or repeated prompts, one pack or many, each pack taught by itself; float64, two teachers."""
    found: list[dict[str, torch.Tensor]] = []
    measured: list[float] = []
    for share_prefixes, max_tokens, data_parallel in PACKINGS:
        model = tiny_model("qwen3", torch.float64, Impl.TORCH)
        packed = pack(
            groups(), ADVANTAGES, max_tokens=max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel
        )
        metrics = LEARN[objective](packed, teachers(), build_engine(EngineConfig(), model))
        assert int(metrics["distill/divergence"].count) == 5 + 1 + 8 + 5 + 5
        measured.append(metrics["distill/divergence"].result)
        found.append({n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None})
    scale = max(float(g.abs().max()) for g in found[0].values())
    assert scale > 1e-3 and measured == pytest.approx([measured[0]] * len(measured), rel=1e-6)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, grad in found[0].items():
            assert torch.allclose(grad, other[name], rtol=0, atol=1e-6 * scale), name


def test_the_whole_forward_kl_is_the_sum_of_its_tokens() -> None:
    """Against the two models' full distributions, taken text by text without the packer's help; the teacher's are
    compared at each token with the weight of its attempt."""
    student, said = build_engine(EngineConfig(), tiny_model("qwen3", torch.float64, Impl.TORCH)), teachers()
    packed = pack(groups(), ADVANTAGES, max_tokens=40, share_prefixes=True)
    metrics = LEARN["forward"](packed, said, student)
    expected = 0.0
    alone = [t for g, group in enumerate(groups()) for a, t in enumerate(group) if ADVANTAGES[g][a] == 0.0]
    for weights_M, trajectory in zip(WEIGHTS_NM, alone, strict=True):
        (batch, *more) = pack([Group("x", [trajectory])]).batches
        assert not more
        p_MTV = [distribution(engine, batch) for engine in said]
        q_TV = distribution(student, batch)
        for t in batch.mask_T.nonzero().flatten().tolist():
            for weight, p_TV in zip(weights_M, p_MTV, strict=True):
                expected += weight * float((p_TV[t] * (p_TV[t] / q_TV[t]).log()).sum())
    assert metrics["distill/divergence"].result == pytest.approx(expected / 24, rel=1e-9)


def distribution(engine: Engine, batch: object) -> torch.Tensor:
    """Probabilities [T, V]."""
    (output,) = asyncio.run(engine.forward([batch], Want(top_k=V)))  # pyright: ignore[reportArgumentType]
    assert output.top_k_ids_TK is not None and output.top_k_logprobs_TK is not None
    return torch.zeros(output.top_k_ids_TK.shape, dtype=torch.float64).scatter(
        -1, output.top_k_ids_TK, output.top_k_logprobs_TK.exp()
    )


def test_rewards_are_each_tokens_own_and_what_follows_discounted() -> None:
    """A_t = r_t + 0.7 A_{t+1} along an attempt and its segments, r = sum of weight (teacher's - student's logprob)."""
    said = teachers()
    packed = pack(groups(), ADVANTAGES, max_tokens=30, share_prefixes=True)
    lessons, measured = asyncio.run(rewarded(packed, WEIGHTS_NM, said, discount=0.7))
    found_M = packed.trained.gather([batch.inputs.advantages_T for batch in lessons])
    expected: list[float] = []
    rewards: list[float] = []
    alone = [t for g, group in enumerate(groups()) for a, t in enumerate(group) if ADVANTAGES[g][a] == 0.0]
    for weights_M, trajectory in zip(WEIGHTS_NM, alone, strict=True):
        own: list[float] = []
        for part in trajectory.segments:
            (batch,) = pack([Group("x", [Trajectory(segments=[part])])]).batches
            scores = [asyncio.run(engine.forward([batch]))[0].logprobs_T for engine in said]
            for t in batch.mask_T.nonzero().flatten().tolist():
                student = float(batch.inputs.behavior_logprobs_T[t])
                own.append(sum(w * (float(s[t]) - student) for w, s in zip(weights_M, scores, strict=True)))
        rewards += own
        expected += [sum(0.7 ** (s - t) * own[s] for s in range(t, len(own))) for t in range(len(own))]
    np.testing.assert_allclose(found_M, expected, rtol=1e-5, atol=1e-6)
    assert measured["distill/divergence"].result == pytest.approx(-np.mean(rewards), rel=1e-6)
