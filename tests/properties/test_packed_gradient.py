"""The same step gives the same gradient however it is packed: through the packer, a model and a policy loss at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from strop.algos.losses import ClippedSurrogate
from strop.config.recipe import EngineConfig
from strop.engines.build import build_engine
from strop.ops.select import Impl
from strop.types import Group, Trajectory, merge_metrics
from tests.tiny_models import tiny_model
from tests.unit.data.groups import attempt, pack, segment


def groups() -> tuple[list[Group], list[list[float]]]:
    """Three groups of four: long and short prompts, a failed attempt, an empty reply, and a second segment."""
    rng = np.random.default_rng(0)

    def drawn(n: int) -> list[int]:
        return rng.integers(3, 96, n).tolist()

    made: list[Group] = []
    for p, prompt in enumerate((drawn(9), drawn(2), drawn(1))):
        replies = [drawn(n) for n in (5, 1, 8, 3)]
        attempts = [attempt(prompt, reply, (-4.0 - rng.random(len(reply))).tolist()) for reply in replies]
        made.append(Group(f"t{p}", attempts))
    made[0].trajectories[1] = attempt(drawn(3), [])
    made[1].trajectories[2] = Trajectory(segments=[segment(drawn(4), drawn(3)), segment(drawn(6), drawn(2))])
    advantages = rng.normal(size=(3, 4))
    advantages[2, 3] = np.nan
    return made, advantages.tolist()


@pytest.mark.parametrize("weighting", ["token_mean", "sequence_mean_token_mean"])
def test_the_gradient_does_not_depend_on_the_packing(weighting: str) -> None:
    """A01, A05, G04: shared or repeated prompts, one batch or many, one rank's batches or four's, float64."""
    made, advantages_PG = groups()
    loss = ClippedSurrogate(clip_low=0.2, clip_high=0.28)
    alive = ~np.isnan(np.array(advantages_PG))
    sampled = sum(t.num_sampled for p, group in enumerate(made) for g, t in enumerate(group) if alive[p, g])
    found: list[dict[str, torch.Tensor]] = []
    for share_prefixes, max_tokens, data_parallel in (
        (False, 200, 1),
        (True, 200, 1),
        (False, 17, 1),
        (True, 17, 1),
        (True, 40, 4),
        (True, 200, 16),
    ):
        model = tiny_model("qwen3", torch.float64, Impl.TORCH)
        engine = build_engine(EngineConfig(), model)
        packed = pack(
            made,
            advantages_PG,
            max_tokens=max_tokens,
            weighting=weighting,
            share_prefixes=share_prefixes,
            data_parallel=data_parallel,
        )
        assert len(packed.batches) % data_parallel == 0
        ranks = [packed.batches[r::data_parallel] for r in range(data_parallel)]
        learned = merge_metrics([asyncio.run(engine.forward_backward(batches, loss)).metrics for batches in ranks])
        assert int(learned["policy/ratio_mean"].count) == sampled
        found.append({n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None})
    scale = max(float(g.abs().max()) for g in found[0].values())
    assert scale > 1e-3
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, grad in found[0].items():
            assert torch.allclose(grad, other[name], rtol=0, atol=1e-7 * scale), name
