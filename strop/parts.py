"""What a recipe names, built: tasks, tokenizer, renderer, model, engine, sampler. The loops run on these parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from strop.config.model import ModelConfig
from strop.config.recipe import Recipe
from strop.data.pairs import Fit
from strop.data.tasks import Task, load_tasks
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.environment import keep_memory
from strop.envs.base import Env
from strop.envs.build import make_env
from strop.errors import ConfigError
from strop.loops.evaluate import Evaluator
from strop.loops.reward_model import Judge
from strop.models.heads import ValueHead
from strop.models.loading import LanguageModel, load_model
from strop.models.tokenizer import decode_with, end_tokens, load_tokenizer
from strop.rollout.base import Sampler
from strop.rollout.build import build_sampler
from strop.rollout.groups import Player, sampling_params
from strop.tokens.base import Renderer
from strop.tokens.build import build_renderer
from strop.types import Int32s, SamplingParams

POLICY = "policy"  # the name of the adapter that a recipe trains
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
    base: Engine | None  # what an adapter stands on: the model without it
    sampler: Sampler
    params: SamplingParams
    ends: ExitStack
    """Closed when the run is over, it ends what was started elsewhere."""

    def player(self, seed: int) -> Player:
        cfg = self.recipe.tasks
        return Player(
            self.sampler,
            self.renderer,
            self.new_env,
            seed=seed,
            max_turns=cfg.max_turns,
            timeout_s=cfg.episode_timeout_s,
        )

    def evaluator(self) -> Evaluator:
        return Evaluator(
            cfg=self.recipe.evaluate,
            tasks=self.held_out,
            player=self.player(EVALUATION_SEED),
            renderer=self.renderer,
            params=self.params,
        )

    def judge(self) -> Judge:
        """Scores pairs of replies; only for an engine over a value model."""
        fit = Fit(
            max_tokens=self.recipe.engine.pack_tokens,
            share_prefixes=self.recipe.engine.share_prefixes,
            data_parallel=self.engine.data_parallel,
            too_long=self.recipe.tasks.too_long,
        )
        return Judge(engine=self.engine, renderer=self.renderer, fit=fit)

    def decode(self, tokens: Int32s) -> str:
        return decode_with(self.tokenizer)(tokens.tolist())


def new_engine(
    recipe: Recipe,
    model: LanguageModel,
    vocab_size: int,
    ends: ExitStack,
    *,
    trainable: bool = True,
    config: ModelConfig | None = None,
    value_head: ValueHead | None = None,
) -> Engine:
    """An engine over `model` in this process; or over ranks, which load what `config` (else the recipe) names, and
    which `ends` ends."""
    if recipe.engine.parallel.ranks == 1:
        return build_engine(recipe.engine, model, trainable=trainable)
    from strop.runtime.start import RankModel, start_engine

    of = RankModel(model=config or recipe.model, vocab_size=vocab_size, seed=recipe.seed, value_head=value_head)
    engine = start_engine(recipe.engine, of, trainable=trainable)
    ends.callback(engine.close)
    return engine


def build_parts(recipe: Recipe, base: Path) -> Parts:
    """Load and build everything that a recipe names; files of the user's own code are taken from `base`.

    For a reward model it is a value model that is trained, and the sampler is there for nobody. Sets torch's threads in
    this process, and lets it keep the memory that it frees. Raises ConfigError for loops that ask for what the recipe
    does not give.
    """
    if problems := recipe.conflicts():
        raise ConfigError(*problems)
    with ExitStack() as ends:  # what was started ends also where a later part cannot be built
        return _build(recipe, base, ends)


def _build(recipe: Recipe, base: Path, ends: ExitStack) -> Parts:
    keep_memory()
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    disable_progress_bar()  # of transformers: it would draw over ours
    tasks = load_tasks(recipe.tasks, base)
    tokenizer = load_tokenizer(recipe.model)
    renderer = build_renderer(recipe.renderer, tokenizer, end_tokens(recipe.model, tokenizer))
    head = None if recipe.reward_model is None else ValueHead(recipe.reward_model.head)
    model = load_model(recipe.model, vocab_size=len(tokenizer), seed=recipe.seed, value_head=head)
    adapter = recipe.engine.adapter if recipe.engine.adapter.rank else None
    if adapter is not None and recipe.sampler.serves_adapter:  # nobody changes the model itself: both may have it
        sampler = build_sampler(recipe.sampler, model, decode_with(tokenizer), adapter)
    elif recipe.sampler.actors:
        from strop.runtime.start import start_samplers

        sampler = start_samplers(recipe, ends)
    else:
        own = _sampler_model(recipe, model, len(tokenizer))
        sampler = build_sampler(recipe.sampler, own, decode_with(tokenizer))
        ends.callback(sampler.close)
    if adapter is None:
        frozen, engine = None, new_engine(recipe, model, len(tokenizer), ends, value_head=head)
    else:  # what it stands on is the reference too
        frozen = new_engine(recipe, model, len(tokenizer), ends, trainable=False)
        engine = frozen.adapter(POLICY, adapter)
    return Parts(
        recipe=recipe,
        tokenizer=tokenizer,
        renderer=renderer,
        train_tasks=tasks.train,
        held_out=tasks.held_out,
        new_env=make_env(recipe.tasks, base),
        model=model,
        sampler=sampler,
        engine=engine,
        base=frozen,
        params=sampling_params(recipe.draw, renderer),
        ends=ends.pop_all(),
    )


def _sampler_model(recipe: Recipe, model: LanguageModel, vocab_size: int) -> LanguageModel:
    """What a sampler that is sent whole models begins with, in its own number format. ConfigError where sglang would
    ignore a part of it."""
    if recipe.sampler.dtype not in ("model", recipe.model.dtype):
        own = load_model(recipe.sampler.model(recipe.model), vocab_size=vocab_size, seed=recipe.seed)
    else:
        own = model.clone() if model.value_head is None and recipe.engine.parallel.ranks == 1 else model
    if recipe.engine.adapter.rank:
        from strop.models.lora import untie

        if untie(own, recipe.engine.adapter) and recipe.sampler.kind == "sglang":
            raise ConfigError(
                "engine.adapter.targets has unembedding, and the model ties its output matrix to the embedding: an "
                "sglang server reads the embedding for both, so take unembedding out, or set sampler.kind to vllm"
            )
    return own
