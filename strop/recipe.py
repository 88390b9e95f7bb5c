"""Run a recipe: build the parts that it names, run its loops in order, and say what came of it.

recipe -> tasks, tokenizer, model -> engine, sampler -> sft, then grpo -> checkpoints, exported model, report
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from strop.config.recipe import Recipe
from strop.parts import POLICY, Parts, build_parts
from strop.runtime.ranks import RankError
from strop.stages import run_loops
from strop.track import rows
from strop.track.live import live_view
from strop.track.report import write_report
from strop.track.run import Run, Watch
from strop.track.sinks import build_sinks
from strop.track.summary import print_summary
from strop.weights.export import export_model
from strop.weights.publish import publish

# A step makes hundreds of thousands of objects that live until its end. Looking through them for cycles as often as
# Python does by default costs a quarter of the controller's time.
COLLECT = (100_000, 20, 20)


def train(recipe: Recipe, recipe_path: Path, *, resume: bool) -> int:
    """Run the recipe's loops, export the best model, write the report, print what changed. Returns the exit code."""
    console = Console()
    gc.set_threshold(*COLLECT)
    begun = Path(recipe.run.folder) / rows.RECIPE
    used = begun.exists() and not resume  # by another run, which a restart must not take for this one
    for left in range(recipe.run.restarts, -1, -1):
        try:
            asyncio.run(_train(recipe, recipe_path, console, resume=resume))
        except RankError as error:
            if not left:
                raise
            resume = begun.exists() and not used  # else the ranks were lost before the run began
            where = "from the newest checkpoint on" if resume else "from the beginning"
            why = escape(str(error))  # it may quote what looks like markup: [rank0], [/tmp/file:12]
            console.print(f"[bold]{where}[/bold], restarts left: {left - 1}; {why}")
        else:
            break
    return 0


async def _train(recipe: Recipe, recipe_path: Path, console: Console, *, resume: bool) -> None:
    folder = Path(recipe.run.folder)
    parts = build_parts(recipe, recipe_path.parent)
    with parts.ends:
        console.print(
            f"[bold]{recipe_path.stem}[/bold]: {parts.model.num_parameters() / 1e6:.1f} M parameters, "
            f"{len(parts.train_tasks)} tasks, {len(parts.held_out)} held out, kernels {parts.model.impl}, "
            f"{torch.get_num_threads()} threads -> {folder}"
        )
        watch = Watch(view=live_view(recipe, console), sinks=build_sinks(recipe, folder))
        opened = Run.resume if resume else Run.start
        with opened(folder, recipe, decode=parts.decode, watch=watch) as run:
            await run_loops(parts, run)
            best = run.store.pinned("best") or run.store.latest()
        if best is not None:
            await parts.engine.load(best.engine)
            _export(parts, folder / "export")
    print_summary(folder, write_report(folder), console)


def evaluate(recipe: Recipe, recipe_path: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Held-out accuracy of the recipe's model, or of a checkpoint's engine folder. Returns the numbers by name."""
    parts = build_parts(recipe, recipe_path.parent)
    with parts.ends:
        return asyncio.run(_evaluate(parts, checkpoint))


async def _evaluate(parts: Parts, checkpoint: Path | None) -> dict[str, Any]:
    if checkpoint is not None:
        await parts.engine.load(checkpoint)
    if parts.recipe.reward_model is not None:
        pairs = await parts.judge().measure(parts.held_out, "evaluate", 0)
        return {"pair_accuracy": pairs.sampled_accuracy, "mean_margin": pairs.mean_reward}
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
    with parts.ends:
        asyncio.run(parts.engine.load(checkpoint))
        _export(parts, target)
    return target


def _export(parts: Parts, folder: Path) -> None:
    """A Hugging Face folder, with the adapter merged in where one was trained, and beside it the adapter alone."""
    elsewhere = parts.base is not None or parts.recipe.engine.parallel.ranks > 1
    merged = parts.engine.weights() if elsewhere else None
    export_model(parts.model, parts.tokenizer, folder, merged)
    if parts.base is not None:
        from strop.models.lora import add_adapter, find_adapter

        if POLICY not in parts.model.adapters:  # ranks have it
            add_adapter(parts.model, POLICY, parts.recipe.engine.adapter)
        adapter = find_adapter(parts.model, POLICY)
        adapter.load(dict(parts.engine.adapter_weights()))
        adapter.save(folder / "adapter")
