"""Run a recipe: build the parts that it names, run its loops in order, and say what came of it.

recipe -> tasks, tokenizer, model -> engine, sampler -> sft, then grpo -> checkpoints, exported model, report
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from strop.config.recipe import Recipe
from strop.data.stream import TaskStream
from strop.data.tasks import Task, load_tasks
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.envs.base import Env
from strop.envs.build import make_env
from strop.loops import grpo, sft
from strop.loops.evaluate import Evaluator
from strop.models.loading import LanguageModel, load_model
from strop.models.tokenizer import end_tokens, load_tokenizer
from strop.rollout.base import Sampler
from strop.rollout.build import build_sampler
from strop.rollout.groups import Player, sampling_params
from strop.tokens.base import Renderer
from strop.tokens.build import build_renderer
from strop.track.live import live_view
from strop.track.report import write_report
from strop.track.run import Run, Watch
from strop.track.sinks import build_sinks
from strop.track.summary import print_summary
from strop.types import Int32s, SamplingParams
from strop.weights.export import export_model
from strop.weights.publish import publish

EVALUATION_SEED = 0x5EED  # held-out attempts are drawn alike in every run, so that runs can be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loops of a recipe run on."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    train_tasks: list[Task]
    held_out: list[Task]
    new_env: Callable[[Task], Env]
    model: LanguageModel
    engine: Engine
    sampler: Sampler
    params: SamplingParams

    def player(self, seed: int) -> Player:
        return Player(self.sampler, self.renderer, self.new_env, seed=seed, max_turns=self.recipe.tasks.max_turns)

    def evaluator(self) -> Evaluator:
        return Evaluator(
            cfg=self.recipe.evaluate,
            tasks=self.held_out,
            player=self.player(EVALUATION_SEED),
            renderer=self.renderer,
            params=self.params,
        )

    def decode(self, tokens: Int32s) -> str:
        return decode_with(self.tokenizer)(tokens.tolist())


def decode_with(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Ids to text as they are: special tokens shown, spaces untouched."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def build_parts(recipe: Recipe, base: Path) -> Parts:
    """Load and build everything that a recipe names; files of the user's own code are taken from `base`."""
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    disable_progress_bar()  # of transformers: it would draw over ours
    tasks = load_tasks(recipe.tasks, base)
    tokenizer = load_tokenizer(recipe.model)
    renderer = build_renderer(recipe.renderer, tokenizer, end_tokens(recipe.model, tokenizer))
    model = load_model(recipe.model, vocab_size=len(tokenizer), seed=recipe.seed)
    return Parts(
        recipe=recipe,
        tokenizer=tokenizer,
        renderer=renderer,
        train_tasks=tasks.train,
        held_out=tasks.held_out,
        new_env=make_env(recipe.tasks, base),
        model=model,
        sampler=build_sampler(recipe.sampler, model.clone(), decode_with(tokenizer)),
        engine=build_engine(recipe.engine, model),
        params=sampling_params(recipe.draw, renderer),
    )


def train(recipe: Recipe, recipe_path: Path, *, resume: bool) -> int:
    """Run the recipe's loops, export the best model, write the report, print what changed. Returns the exit code."""
    asyncio.run(_train(recipe, recipe_path, resume=resume))
    return 0


async def _train(recipe: Recipe, recipe_path: Path, *, resume: bool) -> None:
    console = Console()
    folder = Path(recipe.run.folder)
    parts = build_parts(recipe, recipe_path.parent)
    console.print(
        f"[bold]{recipe_path.stem}[/bold]: {parts.model.num_parameters() / 1e6:.1f} M parameters, "
        f"{len(parts.train_tasks)} tasks, {len(parts.held_out)} held out, kernels {parts.model.impl}, "
        f"{torch.get_num_threads()} threads -> {folder}"
    )
    with ExitStack() as stack:
        watch = Watch(view=live_view(recipe, console), sinks=build_sinks(recipe, folder))
        opened = Run.resume if resume else Run.start
        run = stack.enter_context(opened(folder, recipe, decode=parts.decode, watch=watch))
        await _loops(parts, run)
        best = run.store.pinned("best") or run.store.latest()
    if best is not None:
        await parts.engine.load(best.engine)
        export_model(parts.model, parts.tokenizer, folder / "export")
    print_summary(folder, write_report(folder), console)


async def _loops(parts: Parts, run: Run) -> None:
    """The stages in their order; one that a resumed run had finished is left out."""
    recipe = parts.recipe
    evaluator = parts.evaluator()
    if recipe.sft is not None:
        tasks = TaskStream(parts.train_tasks, seed=recipe.seed)
        if await run.begin("sft", parts.engine, tasks):
            await sft.train(
                recipe.sft,
                tasks=tasks,
                renderer=parts.renderer,
                engine=parts.engine,
                sampler=parts.sampler,
                evaluator=evaluator,
                run=run,
                packing=recipe.engine,
                too_long=recipe.tasks.too_long,
            )
    if recipe.grpo is not None:
        tasks = TaskStream(parts.train_tasks, seed=recipe.seed)
        before = parts.model.clone() if recipe.grpo.kl_coefficient > 0 else None
        if await run.begin("grpo", parts.engine, tasks):
            await grpo.train(
                recipe.grpo,
                tasks=tasks,
                player=parts.player(recipe.seed),
                params=parts.params,
                engine=parts.engine,
                sampler=parts.sampler,
                evaluator=evaluator,
                run=run,
                packing=recipe.engine,
                too_long=recipe.tasks.too_long,
                max_gap=recipe.sampler.max_gap,
                reference=None if before is None else await _reference(before, run, parts),
            )


async def _reference(model: LanguageModel, run: Run, parts: Parts) -> Engine:
    """A frozen engine with the weights that this stage began from, also after a resume."""
    engine = build_engine(parts.recipe.engine, model, trainable=False)
    start = run.start_of("grpo")
    if start is not None:
        await engine.load(start)
    return engine


def evaluate(recipe: Recipe, recipe_path: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Held-out accuracy of the recipe's model, or of a checkpoint's engine folder. Returns the numbers by name."""
    return asyncio.run(_evaluate(recipe, recipe_path, checkpoint))


async def _evaluate(recipe: Recipe, recipe_path: Path, checkpoint: Path | None) -> dict[str, Any]:
    parts = build_parts(recipe, recipe_path.parent)
    if checkpoint is not None:
        await parts.engine.load(checkpoint)
    await publish(parts.engine, parts.sampler, version=0)
    found = await parts.evaluator().measure("evaluate", 0)
    return {
        "sampled_accuracy": found.sampled_accuracy,
        "greedy_accuracy": found.greedy_accuracy,
        **{f"pass@{k}": value for k, value in found.pass_at_k.items()},
        "mean_reward": found.mean_reward,
        "mean_tokens": found.mean_tokens,
    }


def export(recipe: Recipe, recipe_path: Path, checkpoint: Path, target: Path) -> Path:
    """Write a checkpoint as a Hugging Face folder."""
    parts = build_parts(recipe, recipe_path.parent)
    asyncio.run(parts.engine.load(checkpoint))
    export_model(parts.model, parts.tokenizer, target)
    return target
