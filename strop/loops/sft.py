"""Supervised fine-tuning, complete. One step, left to right:

tasks with answers -> tokens and which of them are trained -> packed batches -> gradients -> weights
"""

from __future__ import annotations

from strop.algos import losses
from strop.config.loops import SFTConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import Example, pack_examples
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.engines.base import Engine
from strop.loops.evaluate import Evaluator
from strop.loops.schedule import optim_params
from strop.rollout.base import Sampler
from strop.tokens.base import Renderer
from strop.tokens.example import encode_example
from strop.track.run import Run
from strop.types import Metric, Reduction
from strop.weights.publish import publish


async def train(
    cfg: SFTConfig,
    *,
    tasks: TaskStream,
    renderer: Renderer,
    engine: Engine,
    sampler: Sampler,
    evaluator: Evaluator,
    run: Run,
    packing: EngineConfig,
    too_long: TooLong,
) -> None:
    """Train `engine` to give the tasks' own answers for `cfg.steps` steps, or until held-out accuracy is enough.

    The sampler only measures: it gets the weights when an evaluation is due.
    """
    await publish(engine, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("sft", 0))

    for step in range(run.step, cfg.steps):
        # 1. Tasks and their answers become tokens; only the answer's are trained.
        with run.span("pack"):
            examples = [example_of(renderer, task) for task in tasks.take(cfg.tasks_per_step)]
            packed = pack_examples(
                examples, max_tokens=packing.pack_tokens, data_parallel=engine.data_parallel, too_long=too_long
            )

        # 2. Learn.
        with run.span("learn"):
            learned = await engine.forward_backward(packed.batches, losses.CrossEntropy())
            run.count_outcome(await engine.optim_step(optim_params(cfg.schedule, run.updates, cfg.steps)))

        # 3. Measure, record, save.
        last, enough = step + 1 == cfg.steps, False
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                await publish(engine, sampler, version=step + 1)
                evaluation = await evaluator.measure("sft", step + 1)
            run.record_evaluation(evaluation)
            enough = cfg.stop_at_accuracy is not None and evaluation.sampled_accuracy >= cfg.stop_at_accuracy
        metrics = learned.metrics | {"data/dropped": Metric(Reduction.SUM, packed.dropped)}
        await run.end_step(step + 1, metrics, engine, tasks, last=last or enough)
        if enough:
            break


def example_of(renderer: Renderer, task: Task) -> Example:
    """A task and its own answer as a text to imitate."""
    tokens, trained = encode_example(renderer, task.messages, task.answer)
    return Example(tokens, trained, task.id)
