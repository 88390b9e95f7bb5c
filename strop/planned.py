"""What a plan found out about a run, and how it reads: facts in, rows of text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from strop import estimate
from strop.config.loops import LoopConfig, ScheduleConfig
from strop.config.model import ModelConfig
from strop.config.recipe import Recipe
from strop.data.tasks import TaskSet
from strop.errors import ConfigError, DataError
from strop.ops.select import Impl
from strop.tokens.base import Renderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The run that a recipe describes, found to be possible. `str()` of it is what `strop plan` prints."""

    rows: tuple[tuple[str, str], ...]
    memory: estimate.Memory | None  # None while the model is not here yet
    machine: float  # MiB of memory that this machine has
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"{name:<{width}}  {text}" for name, text in self.rows]
        if self.memory is not None:
            parts, ranks = self.memory.parts(), self.memory.ranks
            wide = max(map(len, [*parts, "together", "of each rank"]))

            def line(name: str, size: float) -> str:
                return f"  {name:<{wide}}  {size:>10,.1f}"

            lines += ["", f"memory at the most, MiB (this machine has {self.machine:,.0f})"]
            if ranks == 1:
                lines += [line(name, size) for name, size in parts.items()]
            else:
                of_rank = self.memory.of_rank()
                lines += [line(name, size) for name, size in of_rank.items()]
                lines += [line("of each rank", sum(of_rank.values())), f"  times {ranks} ranks, and beside them"]
                lines += [line(name, size) for name, size in self.memory.elsewhere().items()]
            lines.append(line("together", self.memory.total))
        return "\n".join([*lines, *(["", *(f"note: {note}" for note in self.notes)] if self.notes else [])])


@dataclass(slots=True, kw_only=True)
class Facts:
    """What checking has built so far; None where it could not."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    renderer: Renderer | None = None
    config: PretrainedConfig | None = None
    skeleton: PreTrainedModel | None = None  # the model without weights, on the meta device
    shape: estimate.Shape | None = None
    tasks: TaskSet | None = None
    impl: Impl | None = None
    longest: tuple[int, str] | None = None  # tokens of the longest prompt, and its task
    teachers: list[tuple[ModelConfig, estimate.Shape]] = field(default_factory=list)  # those whose shape is known
    critic: tuple[int, int] = (0, 0)  # bytes in memory, and in a checkpoint

    def attempt(self, build: Callable[[], T]) -> T | None:
        """What `build` gives; None, and its problems kept, when the recipe is at fault."""
        try:
            return build()
        except ConfigError as error:
            self.problems.extend(" ".join(problem.split()) for problem in error.problems)
        except DataError as error:
            self.problems.extend(str(error).splitlines())
        return None


def rows_of(recipe: Recipe, recipe_path: Path, facts: Facts) -> Iterator[tuple[str, str]]:
    model, engine, sampler = recipe.model, recipe.engine, recipe.sampler
    yield "recipe", str(recipe_path)
    origin = model.path or model.package or f"fresh weights, seed {recipe.seed}"
    yield "model", origin if facts.config is None else f"{origin}: {facts.config.model_type}, {model.dtype}"
    if facts.shape is not None:
        yield (
            "parameters",
            f"{facts.shape.parameters:,} in {facts.shape.layers} layers, context {facts.shape.context:,}",
        )
    if facts.tokenizer is not None:
        yield "tokenizer", f"{len(facts.tokenizer):,} tokens, {recipe.renderer.kind} renderer"
    yield "kernels", f"{facts.impl} (model.kernels: {model.kernels.value})"
    if facts.tasks is not None:
        longest = "" if facts.longest is None else f", longest prompt {facts.longest[0]:,} tokens"
        source = f"{recipe.tasks.source} {recipe.tasks.path}"
        yield (
            "tasks",
            f"{len(facts.tasks.train):,} to train on, {len(facts.tasks.held_out):,} held out{longest}; {source}",
        )
    yield "reward", recipe.tasks.reward if recipe.tasks.env == "single_turn" else f"of {recipe.tasks.env}"
    for name, loop in recipe.loops().items():
        yield name, _loop(loop, recipe)
        yield "", _schedule(loop.schedule, engine.optimizer)
    if facts.shape is not None and facts.shape.adapter:
        adapter = engine.adapter
        yield (
            "adapter",
            f"rank {adapter.rank} on {', '.join(adapter.targets)}: {facts.shape.adapter:,} numbers are trained",
        )
    yield "engine", f"{engine.kind}, packs of {engine.pack_tokens:,} tokens, {engine.head} head"
    if sampler.sglang is not None:
        yield "sampler", f"sglang at {sampler.sglang.address}, not asked yet; {sampler.max_running:,} requests at once"
    else:
        yield "sampler", f"{sampler.kind}, {sampler.max_running:,} running, cache of {sampler.cache_tokens:,} tokens"
    yield "evaluation", _evaluation(recipe, facts)
    yield "results", recipe.run.folder


def _loop(loop: LoopConfig, recipe: Recipe) -> str:
    tasks, attempts = f"{loop.steps:,} steps of {loop.tasks_per_step:,} tasks", loop.attempts_per_task
    if not loop.plays:
        return tasks
    total = loop.tasks_per_step * attempts
    return (
        f"{tasks} x {attempts} attempts = {total:,}, at most {total * recipe.draw.max_tokens:,} sampled tokens a step; "
        f"updates a step: {loop.updates_each_step}"
    )


def _schedule(schedule: ScheduleConfig, optimizer: str) -> str:
    after = schedule.kind if schedule.kind == "constant" else f"{schedule.kind} to {schedule.final_fraction:g} of it"
    after += f" over the last {schedule.decay_fraction:.0%}" if schedule.kind == "wsd" else ""
    return f"{optimizer}, lr {schedule.lr:g} after {schedule.warmup_steps} steps of warm-up, then {after}"


def _evaluation(recipe: Recipe, facts: Facts) -> str:
    held_out = None if facts.tasks is None else len(facts.tasks.held_out)
    if not held_out:
        return "none"
    config = recipe.evaluate
    when = f"every {config.every} steps, before and after" if config.every else "before and after"
    greedy = " and one greedy" if config.greedy else ""
    return f"{when}: {held_out:,} tasks x {config.attempts} attempts at temperature {config.temperature:g}{greedy}"
