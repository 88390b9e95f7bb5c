"""Models that do not move during a step say what they think of its tokens: the reference, and the trainer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.config.policy import PolicyLoopConfig
from strop.data.load import Load, sampled_load, unreplayed, with_fractions
from strop.data.packing import unrouted, with_inputs
from strop.data.scored import Scored, Update
from strop.engines.base import Engine
from strop.errors import EngineError
from strop.track.run import Run
from strop.types import Want


async def score(
    cfg: PolicyLoopConfig, updates: Sequence[Update], *, engine: Engine, reference: Engine | None, run: Run
) -> list[Scored]:
    """Let the frozen reference, and where something needs it the trainer, score the step's tokens."""
    scored: list[Scored] = []
    for packed in updates:
        batches, outputs = packed.batches, None
        if cfg.router_replay == "rollout" and any(batch.routes is None for batch in batches):
            raise EngineError("router_replay is rollout, but the sampler returned no routes with its completions")
        if reference is not None:
            found = await reference.forward(unrouted(batches))  # it chooses experts itself
            batches = with_inputs(batches, reference_logprobs=[output.logprobs_T for output in found])
        if cfg.needs_scores:
            want = Want(
                entropy=cfg.top_entropy < 1,
                square_sums=cfg.needs_square_sums,
                routes=cfg.router_replay == "recompute" or cfg.router.balance_coefficient > 0,
            )
            outputs = await engine.forward(batches, want)
            if cfg.ratio_to == "trainer":
                batches = with_inputs(batches, proximal_logprobs=[output.logprobs_T for output in outputs])
            if cfg.router_replay == "recompute":
                batches = [replace(b, routes=output.routes) for b, output in zip(batches, outputs, strict=True)]
            if cfg.router.balance_coefficient > 0:
                batches = with_fractions(batches, outputs)
        scored.append(Scored(packed=replace(packed, batches=batches), outputs=outputs))
    every = cfg.router.measure_every
    return await _measured(cfg, scored, engine, run) if every and (run.step + 1) % every == 0 else scored


async def _measured(cfg: PolicyLoopConfig, scored: list[Scored], engine: Engine, run: Run) -> list[Scored]:
    """The step's load on the experts, and what it would have been without replay. One pass of the trainer."""
    loads: list[Load] = []
    for n, part in enumerate(scored):
        batches = part.packed.batches
        free = await engine.forward(unrouted(batches), Want(routes=True))
        if cfg.router_replay != "off":
            scored[n] = replace(part, metrics=unreplayed(batches, free))
        if load := sampled_load(batches, free):
            loads.append(load)
    if loads:
        whole = sum(loads[1:], loads[0])
        run.expert_load(run.step + 1, whole.layers, whole.counts_LE)
        scored[0] = replace(scored[0], metrics=scored[0].metrics | whole.metrics())
    return scored
