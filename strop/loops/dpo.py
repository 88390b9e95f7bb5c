"""Learning from preferences, complete: DPO and its kin, KTO among them. One step, left to right:

    tasks with a better and a worse reply -> pairs of texts -> packed batches -> the reference's logprobs
          -> gradients -> weights

Which of them it is, is the loss alone. Nothing is sampled: the sampler only measures. The reference is a frozen Engine
with the weights that the loop began from; SimPO and ORPO have none.

    P tasks per step   T packed tokens   M trained tokens
"""

from __future__ import annotations

import numpy as np

from strop.algos import preference_losses as losses
from strop.config.preferences import DPOConfig, PreferenceLossConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import pack_examples
from strop.data.pairs import Fit, elsewhere, pack_alone, pack_pairs, preference_of, with_reference_logprobs
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.engines.base import Engine, Loss
from strop.loops.evaluate import Evaluator
from strop.loops.schedule import optim_params
from strop.rollout.base import Sampler
from strop.tokens.base import Renderer
from strop.track.run import Run
from strop.types import Metric, Reduction
from strop.weights.publish import publish


async def train(
    cfg: DPOConfig,
    *,
    tasks: TaskStream,
    renderer: Renderer,
    engine: Engine,
    sampler: Sampler,
    evaluator: Evaluator,
    run: Run,
    packing: EngineConfig,
    too_long: TooLong,
    reference: Engine | None = None,
) -> None:
    """Train `engine` to prefer the tasks' chosen replies for `cfg.steps` steps, from where `run` stands.

    `reference` is needed when cfg.needs_reference. Raises DataError for a task without the replies that the loss needs,
    EngineError after `packing.max_skipped_steps` skipped optimizer steps.
    """
    fit = Fit(
        max_tokens=packing.pack_tokens,
        share_prefixes=packing.share_prefixes,
        data_parallel=engine.data_parallel,
        too_long=too_long,
    )
    await publish(engine, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("dpo", 0))

    for step in range(run.step, cfg.steps):
        # 1. Tasks and their replies become pairs of texts; KTO takes every text for itself.
        with run.span("pack"):
            taken = tasks.take(cfg.tasks_per_step)
            preferences = [preference_of(renderer, task) for task in taken]
            packed = pack_alone(preferences, fit) if cfg.loss.kind == "kto" else pack_pairs(preferences, fit)
        batches, baseline = packed.batches, 0.0
        metrics = {"data/dropped": Metric(Reduction.SUM, packed.dropped)}

        # 2. Score them with the reference; KTO also measures how far the policy has gone from it.
        if reference is not None and batches:
            with run.span("reference"):
                scored = await reference.forward(batches)
                batches = with_reference_logprobs(batches, [output.logprobs_T for output in scored])
                if cfg.loss.kind == "kto":
                    baseline = await kto_baseline(taken, renderer, engine, reference, fit)
                    metrics["preference/baseline"] = Metric(Reduction.MEAN, baseline)

        # 3. Learn.
        with run.span("learn"):
            learned = await engine.forward_backward(batches, loss_of(cfg.loss, baseline))
            run.count_outcome(await engine.optim_step(optim_params(cfg.schedule, run.updates, cfg.steps)))

        # 4. Measure, record, save.
        last = step + 1 == cfg.steps
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                await publish(engine, sampler, version=step + 1)
                run.record_evaluation(await evaluator.measure("dpo", step + 1))
        await run.end_step(step + 1, metrics | learned.metrics, engine, tasks, last=last)


def loss_of(cfg: PreferenceLossConfig, baseline: float) -> Loss[losses.PairInputs]:
    """The loss that the recipe names; `baseline` is KTO's, for this step."""
    beta, per_token = given(cfg.beta), bool(cfg.per_token)
    match cfg.kind:
        case "dpo":
            return losses.DPO(beta=beta, per_token=per_token, label_smoothing=given(cfg.label_smoothing))
        case "robust":
            return losses.RobustDPO(beta=beta, per_token=per_token, label_smoothing=given(cfg.label_smoothing))
        case "hinge":
            return losses.Hinge(beta=beta, per_token=per_token)
        case "ipo":
            return losses.IPO(beta=beta, per_token=per_token)
        case "kto":
            desirable, undesirable = given(cfg.desirable), given(cfg.undesirable)
            return losses.KTO(beta=beta, baseline=baseline, desirable=desirable, undesirable=undesirable)
        case "simpo":
            return losses.SimPO(beta=beta, target_margin=given(cfg.target_margin))
        case "orpo":
            return losses.ORPO(beta=beta)


def given(value: float | None) -> float:
    """A knob that its kind has: the section has filled it in."""
    assert value is not None
    return value


async def kto_baseline(tasks: list[Task], renderer: Renderer, engine: Engine, reference: Engine, fit: Fit) -> float:
    """The step's estimate of KL(policy, reference), from every reply at another task's prompt; 0 when none fits."""
    packed = pack_examples(
        elsewhere(renderer, tasks),
        max_tokens=fit.max_tokens,
        data_parallel=fit.data_parallel,
        too_long=fit.too_long,
    )
    trained = packed.trained
    policy_M, reference_M = [
        trained.gather([output.logprobs_T for output in await scorer.forward(packed.batches)])
        for scorer in (engine, reference)
    ]
    texts = int(np.count_nonzero(trained.counts_N))
    return losses.kto_baseline(float((policy_M - reference_M).sum()), texts) if texts else 0.0
