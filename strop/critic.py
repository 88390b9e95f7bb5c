"""A recipe's critic: an engine over a value model for the run; its shape, memory and mistakes for the plan."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import PreTrainedModel

from strop import estimate
from strop.config.ppo import CriticConfig
from strop.config.recipe import EngineConfig, Recipe
from strop.engines.base import Capabilities, Engine
from strop.engines.build import build_engine, standing_values
from strop.errors import ConfigError
from strop.loops.schedule import optim_params
from strop.models.experts import Form
from strop.models.heads import ValueHead, load_value_head, make_value_model
from strop.models.loading import CacheShape, LanguageModel, load_model
from strop.models.tokenizer import load_tokenizer, same_tokens
from strop.ops.select import Impl
from strop.parts import Parts


def build_critic(cfg: CriticConfig, parts: Parts, start: Path | None) -> Engine:
    """An engine over a value model: of its own, or a copy of the policy as it is now.

    `start` is the engine folder that the policy's stage began from; None: it began from the recipe's own model.
    """
    recipe, vocab_size = parts.recipe, len(parts.tokenizer)
    if cfg.model is not None:
        same_tokens(parts.tokenizer, load_tokenizer(cfg.model), key="ppo.critic.model")
    named, head = (recipe.model, ValueHead.FRESH) if cfg.model is None else (cfg.model, ValueHead(cfg.head))
    if recipe.engine.parallel.ranks > 1:
        from strop.runtime.start import RankModel, start_engine

        weights = start if cfg.model is None else None
        of = RankModel(model=named, vocab_size=vocab_size, seed=recipe.seed, value_head=head, weights=weights)
        engine = start_engine(engine_config(recipe), of)
        parts.ends.callback(engine.close)
        return engine
    if cfg.model is None and parts.base is None:
        model = parts.model.clone()
        make_value_model(model.module)
    else:
        model = load_model(named, vocab_size=vocab_size, seed=recipe.seed, value_head=head)
    if cfg.model is None and parts.base is not None:  # the critic is trained whole: the policy's adapter goes into it
        own = dict(model.state())
        model.load_state((own | {name: t for name, t in parts.engine.weights(Form.PACKED) if name in own}).items())
    return build_engine(engine_config(recipe), model)


def engine_config(recipe: Recipe) -> EngineConfig:
    """The policy's, without the groups that name its parameters."""
    return recipe.engine.model_copy(update={"param_groups": {}})


def plan_critic(recipe: Recipe, cfg: CriticConfig, skeleton: PreTrainedModel, folder: Path | None) -> tuple[int, int]:
    """Bytes of the critic in memory and in a checkpoint, from its model without weights and, if it has one, its folder.

    Raises ConfigError for a head that is not there, groups of parameters that the critic has not, and an engine that
    trains no value models.
    """
    if cfg.head == "loaded" and folder is not None:
        load_value_head(folder)
    module = copy.deepcopy(skeleton)
    make_value_model(module)
    ends = {*module.get_input_embeddings().parameters()}
    numbers = {parameter: parameter.numel() for parameter in module.parameters()}
    shape = estimate.shape_of(
        module.config,
        parameters=sum(numbers.values()),
        matrices=sum(n for p, n in numbers.items() if p.ndim == 2 and p.shape[0] > 1 and p not in ends),
    )
    cache = CacheShape(layers=(), num_kv_heads=0, key_channels=0, value_channels=0)
    model = LanguageModel(module=module, impl=Impl.TORCH, cache_shape=cache)
    config = engine_config(recipe)
    try:
        standing_values(config, model).resolve(optim_params(cfg.schedule, 0, 1))
    except ConfigError as error:
        raise ConfigError(*(f"ppo.critic.schedule: {problem}" for problem in error.problems)) from error
    if build_engine(config, model, trainable=False).capabilities.missing(Capabilities(value_head=True)):
        raise ConfigError(f"engine.kind {config.kind} trains no value models, which ppo needs as its critic")
    return estimate.critic_bytes(shape, recipe, (cfg.model or recipe.model).dtype)
