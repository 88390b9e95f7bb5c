"""The loops of a recipe, one after the other: each gets the parts that it takes, and those that only it needs.

A loop that a resumed run had finished is left out. A frozen engine that a loop needs holds what the loop began from,
before a resume and after it.
"""

from __future__ import annotations

from strop.checkpoint.beside import Beside
from strop.config.imitation import BestOfNConfig, DistillConfig
from strop.config.loops import LoopConfig, SFTConfig
from strop.config.model import ModelConfig
from strop.config.policy import AsyncGRPOConfig, GRPOConfig
from strop.config.ppo import PPOConfig
from strop.config.preferences import DPOConfig, RewardModelConfig
from strop.critic import build_critic
from strop.data.stream import TaskStream
from strop.engines.base import Engine
from strop.errors import EngineError
from strop.loops import async_grpo, best_of_n, distill, dpo, grpo, ppo, reward_model, sft
from strop.models.loading import LanguageModel, load_model
from strop.models.tokenizer import load_tokenizer, same_tokens
from strop.parts import Parts, new_engine
from strop.track.run import Run


async def run_loops(parts: Parts, run: Run) -> None:
    """Every loop that the recipe has, in order."""
    for name, cfg in parts.recipe.loops().items():
        match cfg:
            case SFTConfig():
                await _sft(cfg, parts, run)
            case DPOConfig():
                await _dpo(cfg, parts, run)
            case RewardModelConfig():
                await _reward_model(cfg, parts, run)
            case AsyncGRPOConfig():
                await _async_grpo(cfg, parts, run)
            case GRPOConfig():
                await _grpo(cfg, parts, run)
            case PPOConfig():
                await _ppo(cfg, parts, run)
            case DistillConfig():
                await _distill(cfg, parts, run)
            case BestOfNConfig():
                await _best_of_n(cfg, parts, run)
            case _:
                raise EngineError(f"no loop runs the section {name}")  # a test runs every loop


async def _sft(cfg: SFTConfig, parts: Parts, run: Run) -> None:
    tasks = TaskStream(parts.train_tasks, seed=parts.recipe.seed)
    if not await run.begin("sft", parts.engine, tasks):
        return
    await sft.train(
        cfg,
        tasks=tasks,
        renderer=parts.renderer,
        engine=parts.engine,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=parts.recipe.engine,
        too_long=parts.recipe.tasks.too_long,
    )


async def _dpo(cfg: DPOConfig, parts: Parts, run: Run) -> None:
    tasks = TaskStream(parts.train_tasks, seed=parts.recipe.seed)
    start = _copy(cfg, parts)  # before `begin`, which may load a later state
    if not await run.begin("dpo", parts.engine, tasks):
        return
    await dpo.train(
        cfg,
        tasks=tasks,
        renderer=parts.renderer,
        engine=parts.engine,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=parts.recipe.engine,
        too_long=parts.recipe.tasks.too_long,
        reference=await _reference(cfg, start, "dpo", parts, run),
    )


async def _reward_model(cfg: RewardModelConfig, parts: Parts, run: Run) -> None:
    tasks = TaskStream(parts.train_tasks, seed=parts.recipe.seed)
    if not await run.begin("reward_model", parts.engine, tasks):
        return
    await reward_model.train(
        cfg,
        tasks=tasks,
        judge=parts.judge(),
        held_out=parts.held_out,
        evaluate=parts.recipe.evaluate,
        run=run,
    )


async def _grpo(cfg: GRPOConfig, parts: Parts, run: Run) -> None:
    recipe = parts.recipe
    tasks = TaskStream(parts.train_tasks, seed=recipe.seed)
    start = _copy(cfg, parts)  # before `begin`, which may load a later state
    if not await run.begin("grpo", parts.engine, tasks):
        return
    await grpo.train(
        cfg,
        tasks=tasks,
        player=parts.player(recipe.seed),
        params=parts.params,
        engine=parts.engine,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=recipe.engine,
        too_long=recipe.tasks.too_long,
        max_gap=recipe.sampler.max_gap,
        reference=await _reference(cfg, start, "grpo", parts, run),
    )


async def _async_grpo(cfg: AsyncGRPOConfig, parts: Parts, run: Run) -> None:
    recipe = parts.recipe
    tasks = TaskStream(parts.train_tasks, seed=recipe.seed)
    start = _copy(cfg, parts)  # before `begin`, which may load a later state
    if not await run.begin("async_grpo", parts.engine, tasks):
        return
    await async_grpo.train(
        cfg,
        tasks=tasks,
        player=parts.player(recipe.seed),
        params=parts.params,
        engine=parts.engine,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=recipe.engine,
        too_long=recipe.tasks.too_long,
        max_gap=recipe.sampler.max_gap,
        reference=await _reference(cfg, start, "async_grpo", parts, run),
    )


async def _ppo(cfg: PPOConfig, parts: Parts, run: Run) -> None:
    recipe = parts.recipe
    tasks = TaskStream(parts.train_tasks, seed=recipe.seed)
    start = _copy(cfg, parts)  # before `begin`, which may load a later state
    critic = build_critic(cfg.critic, parts, run.start_of("ppo"))
    if not await run.begin("ppo", Beside(parts.engine, {"critic": critic}), tasks):
        return
    await ppo.train(
        cfg,
        tasks=tasks,
        player=parts.player(recipe.seed),
        params=parts.params,
        policy=parts.engine,
        critic=critic,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=recipe.engine,
        too_long=recipe.tasks.too_long,
        max_gap=recipe.sampler.max_gap,
        reference=await _reference(cfg, start, "ppo", parts, run),
    )


async def _distill(cfg: DistillConfig, parts: Parts, run: Run) -> None:
    recipe = parts.recipe
    tasks = TaskStream(parts.train_tasks, seed=recipe.seed)
    if not await run.begin("distill", parts.engine, tasks):
        return
    await distill.train(
        cfg,
        tasks=tasks,
        player=parts.player(recipe.seed),
        params=parts.params,
        engine=parts.engine,
        teachers=[_teacher(m, teacher.model, parts) for m, teacher in enumerate(cfg.teachers)],
        vocab_size=parts.model.vocab_size,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=recipe.engine,
        too_long=recipe.tasks.too_long,
        max_gap=recipe.sampler.max_gap,
    )


def _teacher(m: int, config: ModelConfig, parts: Parts) -> Engine:
    """A frozen engine over a model of its own, which speaks of the same tokens."""
    same_tokens(parts.tokenizer, load_tokenizer(config), key=f"distill.teachers.{m}.model")
    model = load_model(config, vocab_size=len(parts.tokenizer), seed=parts.recipe.seed)
    return new_engine(parts.recipe, model, len(parts.tokenizer), parts.ends, trainable=False, config=config)


async def _best_of_n(cfg: BestOfNConfig, parts: Parts, run: Run) -> None:
    tasks = TaskStream(parts.train_tasks, seed=parts.recipe.seed)
    if not await run.begin("best_of_n", parts.engine, tasks):
        return
    await best_of_n.train(
        cfg,
        tasks=tasks,
        player=parts.player(parts.recipe.seed),
        params=parts.params,
        engine=parts.engine,
        sampler=parts.sampler,
        evaluator=parts.evaluator(),
        run=run,
        packing=parts.recipe.engine,
        too_long=parts.recipe.tasks.too_long,
    )


def _copy(cfg: LoopConfig, parts: Parts) -> LanguageModel | None:
    """The model as it is now, where a loop needs a reference that nothing else keeps."""
    if not cfg.needs_reference or parts.base is not None:
        return None
    return parts.model.clone() if parts.recipe.engine.parallel.ranks == 1 else parts.model  # ranks load their own


async def _reference(cfg: LoopConfig, start: LanguageModel | None, stage: str, parts: Parts, run: Run) -> Engine | None:
    """A frozen engine with the weights that `stage` began from, also after a resume; None when it needs none.

    Under an adapter that is the model without it, or with the adapter of the stage before.
    """
    if not cfg.needs_reference:
        return None
    begun = run.start_of(stage)
    if start is not None:
        engine = new_engine(parts.recipe, start, len(parts.tokenizer), parts.ends, trainable=False)
    elif parts.base is not None and begun is None:
        return parts.base
    else:
        assert parts.base is not None
        engine = parts.base.adapter(f"start-of-{stage}", parts.recipe.engine.adapter, trainable=False)
    if begun is not None:
        await engine.load(begun)
    return engine
