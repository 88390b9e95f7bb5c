"""Check a whole run before its first token: a recipe goes in; a `Plan` of what it would do, or every problem comes out.

Everything that needs no weights is really built: tokenizer, renderer, tasks, environment, configuration, the model's
shape. Nothing is written, save compiled kernels in strop's cache; a model that must be fetched or converted first is
left to the run, which checks again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from strop import estimate
from strop.config.adapter import AdapterConfig
from strop.config.recipe import ModelConfig, Recipe, RendererConfig, TooLong
from strop.critic import plan_critic
from strop.data.pairs import Fit, pack_alone, preference_of
from strop.data.tasks import Task, load_tasks
from strop.data.teaching import teacher_weights
from strop.engines.base import Capabilities
from strop.engines.build import build_engine, check_parallel, standing_values
from strop.envs.build import make_env
from strop.errors import ConfigError
from strop.loops.schedule import optim_params
from strop.models.gguf import ARCHITECTURES
from strop.models.gguf_file import GGUFFile
from strop.models.loading import DTYPES, CacheShape, LanguageModel, fresh_config, model_folder, refuse_unpackable
from strop.models.package import cached_package
from strop.models.tokenizer import end_tokens, load_tokenizer, same_tokens
from strop.ops.logprobs import HeadImpl, require
from strop.ops.select import Impl, resolve
from strop.planned import Facts, Plan, rows_of
from strop.tokens.base import Renderer
from strop.tokens.build import build_renderer
from strop.track.rows import RECIPE
from strop.track.sinks import build_sinks

T = TypeVar("T")
LONGEST = 200  # prompts, the longest by letters, that are turned into tokens to find the longest by tokens


def plan(recipe: Recipe, recipe_path: Path, *, resume: bool = False, may_fetch: bool = False) -> Plan:
    """Check everything that needs no weights. Raises one ConfigError with all problems found.

    `may_fetch` lets a package be downloaded and a GGUF file be converted first, so that they are checked too.
    """
    facts = Facts()
    with _no_bytecode():
        _check_model(recipe, facts, may_fetch)
        _check_tasks(recipe, recipe_path.absolute().parent, facts)
        _check_lengths(recipe, facts)
        _check_preferences(recipe, facts)
        _check_teachers(recipe, facts, may_fetch)
        _check_critic(recipe, facts, may_fetch)
        _check_engine(recipe, facts)
        _check_memory(recipe, facts)
        _check_folder(recipe, facts, resume)
        facts.attempt(lambda: build_sinks(recipe, Path(recipe.run.folder)))
    facts.problems += recipe.conflicts()
    if facts.problems:
        raise ConfigError(*dict.fromkeys(facts.problems))
    rows = tuple(rows_of(recipe, recipe_path, facts))
    return Plan(rows=rows, memory=_memory(recipe, facts), machine=estimate.machine(), notes=tuple(facts.notes))


@contextmanager
def _no_bytecode() -> Generator[None]:
    """Importing a user's file leaves no __pycache__ beside it."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


# Model ----------------------------------------------------------------------------------------------------------------


def _check_model(recipe: Recipe, facts: Facts, may_fetch: bool) -> None:
    """Folder, tokenizer, renderer, configuration and shape of the model."""
    model = recipe.model
    here = facts.attempt(lambda: _locate(model, facts, may_fetch))
    dtype = DTYPES[model.dtype]
    facts.impl = facts.attempt(lambda: resolve(model.kernels.value, dtype=dtype, device=torch.device("cpu")))
    if here or model.tokenizer is not None:
        facts.tokenizer = facts.attempt(lambda: load_tokenizer(model))
    if here and facts.tokenizer is not None:
        tokenizer = facts.tokenizer
        facts.renderer = facts.attempt(lambda: build_renderer(recipe.renderer, tokenizer, end_tokens(model, tokenizer)))
    if here:
        facts.config = facts.attempt(lambda: _configuration(model, facts))
    if facts.config is not None:
        config = facts.config
        facts.skeleton = facts.attempt(lambda: _skeleton(config))
    if facts.skeleton is not None:
        skeleton = facts.skeleton
        facts.shape = facts.attempt(lambda: _measure(skeleton, recipe.engine.adapter))
    if facts.shape is not None and facts.tokenizer is not None and len(facts.tokenizer) > facts.shape.vocabulary:
        facts.problems.append(
            f"the tokenizer has {len(facts.tokenizer)} tokens and the model {facts.shape.vocabulary}: give the model's "
            "own tokenizer, or leave model.fresh.vocab_size out"
        )


def _locate(model: ModelConfig, facts: Facts, may_fetch: bool) -> bool:
    """Whether the model's files are here; notes where they come from when they are not."""
    if model.fresh is not None:
        return True
    path = Path(model.path) if model.path is not None else None
    if path is not None and not path.exists():
        raise ConfigError(f"model.path {path} does not exist: give a Hugging Face folder or a .gguf file")
    if path is not None and path.suffix == ".gguf":
        GGUFFile.read(path, supported=tuple(ARCHITECTURES))
        waiting = None if path.with_suffix(".hf").is_dir() else f"{path.name} is converted when the run starts"
    elif model.package is not None:
        waiting = None if cached_package(model.package).is_dir() else f"{model.package} is fetched when the run starts"
    else:
        waiting = None
    if waiting is not None and not may_fetch:
        facts.notes.append(f"{waiting}; its tokenizer, lengths and sizes are checked then")
        return False
    facts.folder = model_folder(model)
    _check_files(facts.folder)
    return True


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"model.path {folder} is not a folder: give a Hugging Face folder or a .gguf file")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        raise ConfigError(
            f"model.path {folder} has no {' and no '.join(missing)}: it is not a Hugging Face model folder"
        )


def _configuration(model: ModelConfig, facts: Facts) -> PretrainedConfig:
    """The model's configuration, of a kind that strop can pack."""
    if facts.folder is not None:
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(facts.folder)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{facts.folder}/config.json is no configuration that transformers knows: {_first_line(error)}"
            ) from error
    else:
        fields = model.fresh or {}
        vocab_size = 1 if facts.tokenizer is None else len(facts.tokenizer)
        config = fresh_config(fields, vocab_size)
        known = _settings(type(config))
        if unknown := [key for key in fields if key not in known]:
            raise ConfigError(*(f"unknown key model.fresh.{key}: {_near(key, known)}" for key in unknown))
    refuse_unpackable(config)
    return config


def _settings(kind: type[PretrainedConfig]) -> set[str]:
    """The names that a configuration takes. transformers itself keeps any other name and never reads it."""
    names = {*kind().to_dict(), *kind.attribute_map, *signature(kind.__init__).parameters}
    return names | {"rope_theta", "rope_scaling"} if "rope_parameters" in names else names


def _measure(module: PreTrainedModel, adapter: AdapterConfig) -> estimate.Shape:
    """Parameters counted, tied ones once, and sizes. ConfigError for an adapter of what is not there."""
    ends = {*module.get_input_embeddings().parameters(), *_parameters(module.get_output_embeddings())}
    sizes = {parameter: parameter.numel() for parameter in module.parameters()}
    matrices = sum(size for parameter, size in sizes.items() if parameter.ndim == 2 and parameter not in ends)
    stacked = sum(parameter.numel() for name, parameter in module.named_parameters() if "experts" in name.split("."))
    added = 0
    if adapter.rank:
        from strop.models.lora import count_matrices

        added = count_matrices(module, adapter)
    return estimate.shape_of(
        module.config, parameters=sum(sizes.values()), matrices=matrices, adapter=added, stacked=stacked
    )


def _parameters(head: torch.nn.Module | None) -> list[torch.nn.Parameter]:
    return [] if head is None else list(head.parameters())


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device, where it takes no memory and has no weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ConfigError(
            f"no {config.model_type} can be made from this configuration: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    """Libraries explain at length; the first line says what is wrong."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _near(key: str, known: Iterable[str]) -> str:
    near = get_close_matches(key, list(known), n=1)
    return f"did you mean {near[0]}?" if near else "this architecture does not have it"


# Tasks ----------------------------------------------------------------------------------------------------------------


def _check_tasks(recipe: Recipe, base: Path, facts: Facts) -> None:
    """Tasks, their environment and reward, and the longest prompt."""
    facts.attempt(lambda: make_env(recipe.tasks, base))
    facts.tasks = facts.attempt(lambda: load_tasks(recipe.tasks, base))
    if facts.tasks is None:
        return
    wants = {
        "evaluate.every": recipe.evaluate.every,
        "sft.stop_at_accuracy": recipe.sft and recipe.sft.stop_at_accuracy,
    }
    if not facts.tasks.held_out:
        facts.problems += [
            f"{key} is {value} but tasks.holdout is 0: hold tasks out to measure accuracy on, or remove the key"
            for key, value in wants.items()
            if value
        ]
        facts.notes.append("no tasks are held out: accuracy is not measured, and no checkpoint is the best")
    for name, loop in recipe.loops().items():
        if 0 < len(facts.tasks.train) < loop.tasks_per_step:
            facts.notes.append(
                f"{name}.tasks_per_step {loop.tasks_per_step} is more than the {len(facts.tasks.train)} tasks to train "
                "on: a step holds some of them twice"
            )
    if not facts.tasks.train:
        facts.problems.append("no tasks are left to train on: lower tasks.holdout, or raise tasks.limit")
    if facts.renderer is not None:
        renderer, tasks = facts.renderer, [*facts.tasks.train, *facts.tasks.held_out]
        facts.longest = facts.attempt(lambda: _longest(renderer, tasks))


def _longest(renderer: Renderer, tasks: list[Task]) -> tuple[int, str]:
    by_letters = sorted(tasks, key=lambda task: sum(len(str(m)) for m in task.messages), reverse=True)[:LONGEST]
    return max((len(renderer.start(task.messages)), task.id) for task in by_letters)


def _check_lengths(recipe: Recipe, facts: Facts) -> None:
    """The longest prompt with the longest reply must fit wherever it goes."""
    if facts.longest is None or recipe.reward_model is not None:  # a reward model only reads
        return
    (prompt, task), reply, cache = facts.longest, recipe.draw.max_tokens, recipe.sampler.cache_tokens
    whole = prompt + reply
    said = f"the longest prompt ({prompt} tokens, task {task}) and draw.max_tokens {reply} make {whole} tokens"
    if facts.shape is not None and whole > facts.shape.context:
        facts.problems.append(f"{said}, more than the model's context of {facts.shape.context}: lower draw.max_tokens")
    if whole > recipe.engine.pack_tokens:
        sentence = f"{said}, more than engine.pack_tokens {recipe.engine.pack_tokens}: raise it"
        if recipe.tasks.too_long is TooLong.ERROR:
            facts.problems.append(sentence)
        else:
            facts.notes.append(f"{said}, more than engine.pack_tokens {recipe.engine.pack_tokens}: such are dropped")
    if recipe.sampler.kind == "sglang":
        return  # its cache is its own, and its size is not known before it is asked
    attempts = max((loop.attempts_per_task for loop in recipe.loops().values() if loop.plays), default=None)
    if attempts is None:
        if facts.tasks is not None and facts.tasks.held_out and whole > cache:
            facts.problems.append(f"{said}, more than sampler.cache_tokens {cache}: raise it")
        return
    group = prompt + attempts * reply
    if group > cache:
        facts.problems.append(
            f"sampler.cache_tokens {cache} cannot hold one group, a prompt of {prompt} tokens and "
            f"{attempts} replies of {reply}: raise it to {group} or more"
        )
    elif recipe.sampler.max_running * whole > cache:
        fit = cache // whole
        facts.notes.append(
            f"sampler.cache_tokens {cache} holds {fit} of the longest attempts, and sampler.max_running is "
            f"{recipe.sampler.max_running}: some may wait, or be computed again"
        )


def _check_preferences(recipe: Recipe, facts: Facts) -> None:
    """The longest given replies must fit the context, and a pair of them one batch."""
    if facts.tasks is None or facts.renderer is None or not (recipe.tasks.has_pairs or recipe.tasks.has_labels):
        return
    renderer, engine = facts.renderer, recipe.engine
    tasks = [*facts.tasks.train, *facts.tasks.held_out]
    tasks.sort(key=lambda task: len(str(task.messages)) + len(task.chosen or "") + len(task.rejected or ""))
    fit = Fit(
        max_tokens=engine.pack_tokens,
        share_prefixes=engine.share_prefixes,
        data_parallel=1,
        too_long=recipe.tasks.too_long,
    )
    preferences = facts.attempt(lambda: [preference_of(renderer, task) for task in tasks[-LONGEST:]])
    packed = None if preferences is None else facts.attempt(lambda: pack_alone(preferences, fit))
    if preferences is None or packed is None:
        return
    longest = max((len(example.tokens) for p in preferences for example, _ in p.examples), default=0)
    if facts.shape is not None and longest > facts.shape.context:
        facts.problems.append(
            f"the longest given reply makes a text of {longest} tokens, more than the model's context of "
            f"{facts.shape.context}: take its row out, or take a model with a longer context"
        )
    if packed.dropped:
        more = " or more" if packed.dropped == len(preferences) else ""
        facts.notes.append(f"{packed.dropped}{more} tasks are dropped: their replies do not fit engine.pack_tokens")


# Teachers -------------------------------------------------------------------------------------------------------------


def _check_teachers(recipe: Recipe, facts: Facts, may_fetch: bool) -> None:
    """Every teacher is here and speaks of the student's tokens, and every task has one."""
    if recipe.distill is None:
        return
    teachers = recipe.distill.teachers
    for m, teacher in enumerate(teachers):
        key = f"distill.teachers.{m}"
        own = _check_other(key, teacher.model, recipe, facts, may_fetch)
        if own.shape is not None:
            facts.teachers.append((teacher.model, own.shape))
            facts.problems += _teacher_misfits(key, own.shape, recipe, facts)
    if facts.tasks is not None:
        tasks = facts.tasks.train
        facts.attempt(lambda: teacher_weights(teachers, tasks))


def _check_other(key: str, model: ModelConfig, recipe: Recipe, facts: Facts, may_fetch: bool) -> Facts:
    """What is known of another model of the recipe, which must speak of the same tokens."""
    own = Facts()  # it reads tokens that the first one's renderer made
    _check_model(recipe.model_copy(update={"model": model, "renderer": RendererConfig(kind="plain")}), own, may_fetch)
    if (module := own.skeleton) is not None:
        own.attempt(lambda: check_parallel(recipe.engine.parallel, module))
    facts.problems += [f"{key}: {problem}" for problem in own.problems]
    facts.notes += [f"{key}: {note}" for note in own.notes]
    ours, theirs = facts.tokenizer, own.tokenizer
    if ours is not None and theirs is not None:
        facts.attempt(lambda: same_tokens(ours, theirs, key=f"{key}.model"))
    return own


def _check_critic(recipe: Recipe, facts: Facts, may_fetch: bool) -> None:
    """The critic is here, speaks of the policy's tokens, and can be trained."""
    if recipe.ppo is None:
        return
    cfg = recipe.ppo.critic
    own = facts if cfg.model is None else _check_other("ppo.critic", cfg.model, recipe, facts, may_fetch)
    if (skeleton := own.skeleton) is not None:
        facts.critic = facts.attempt(lambda: plan_critic(recipe, cfg, skeleton, own.folder)) or (0, 0)


def _teacher_misfits(key: str, shape: estimate.Shape, recipe: Recipe, facts: Facts) -> Iterator[str]:
    """What a teacher's sizes and the student's do not allow together."""
    top_k = None if recipe.distill is None else recipe.distill.objective.top_k  # None: rewards need no candidates
    own = shape.vocabulary if facts.shape is None else facts.shape.vocabulary
    if top_k == 0 and shape.vocabulary != own:
        yield (
            f"{key} gives {shape.vocabulary} probabilities and the model {own}: whole distributions do not compare, "
            "so set distill.objective.top_k, or take kind reward"
        )
    if top_k is not None and top_k > min(own, shape.vocabulary):
        yield f"distill.objective.top_k {top_k} is more than {min(own, shape.vocabulary)} tokens: lower it"
    whole = None if facts.longest is None else facts.longest[0] + recipe.draw.max_tokens
    if whole is not None and whole > shape.context:
        yield f"{key} has a context of {shape.context} tokens, and the longest attempt may have {whole}: take another"


# Engine, memory, disk, folder -----------------------------------------------------------------------------------------


def _check_engine(recipe: Recipe, facts: Facts) -> None:
    """The engine can do what the recipe needs."""
    if facts.skeleton is None or facts.shape is None:
        return
    shape, engine = facts.shape, recipe.engine
    cache = CacheShape(
        layers=tuple(range(shape.layers)),
        num_kv_heads=shape.kv_heads,
        key_channels=shape.channels,
        value_channels=shape.channels,
    )
    skeleton = LanguageModel(module=facts.skeleton, impl=Impl.TORCH, cache_shape=cache)
    facts.attempt(
        lambda: require(
            HeadImpl(engine.head),
            device=torch.device("cpu"),
            dtype=DTYPES[recipe.model.dtype],
            softcap=skeleton.softcap,
            bias="bias" in dict(skeleton.head.named_parameters()),
        )
    )
    _check_schedules(recipe, skeleton, facts)
    built = facts.attempt(lambda: build_engine(engine, skeleton, trainable=False))
    if built is None:
        return
    lacks = built.capabilities.missing(Capabilities(shared_prefix=engine.share_prefixes))
    if lacks:
        facts.problems.append(
            f"engine.kind {engine.kind} cannot do {', '.join(lacks)}, which the recipe needs: set "
            "engine.share_prefixes to false"
        )
    facts.problems += _router_problems(recipe, facts.skeleton, built.capabilities)


def _router_problems(recipe: Recipe, skeleton: PreTrainedModel, can: Capabilities) -> Iterator[str]:
    """What loops ask of routers, and neither this model, this engine nor this sampler gives."""
    for name, loop in recipe.loops().items():
        if loop.needs_routers and not can.router_replay:
            yield (
                f"{name}.router_replay and {name}.router are for mixtures of experts; engine.kind {recipe.engine.kind} "
                f"finds no routers that it knows in {type(skeleton).__name__}: leave both at their defaults"
            )
        if loop.needs_sampled_routes and recipe.sampler.kind == "sglang":
            yield (
                f"{name}.router_replay rollout needs routes, which sampler.kind sglang has not: set it to recompute "
                f"with {name}.ratio_to trainer, or sampler.kind to builtin or vllm"
            )


def _check_schedules(recipe: Recipe, skeleton: LanguageModel, facts: Facts) -> None:
    """The groups of parameters that the engine and the schedules name are there, and have what they are told."""
    standing = facts.attempt(lambda: standing_values(recipe.engine, skeleton))
    if standing is None:
        return
    for name, loop in recipe.loops().items():
        try:
            standing.resolve(optim_params(loop.schedule, 0, 1))
        except ConfigError as error:
            facts.problems.extend(f"{name}.schedule: {problem}" for problem in error.problems)


def _check_memory(recipe: Recipe, facts: Facts) -> None:
    """What surely does not fit this machine is a problem; what may not fit is a note."""
    memory, machine = _memory(recipe, facts), estimate.machine()
    if memory is None:
        return
    if recipe.engine.runtime.address is not None and memory.ranks > 1:
        facts.notes.append(
            f"the {memory.ranks} ranks are on the cluster at {recipe.engine.runtime.address}: each may need "
            f"{sum(memory.of_rank().values()):,.0f} MiB, which is not checked here"
        )
        return
    sure = memory.total - memory.ranks * (memory.activations + memory.logits)
    if sure > machine:
        facts.problems.append(
            f"weights, gradients, optimizer and cache need {sure:,.0f} MiB and this machine has {machine:,.0f}: take a "
            "smaller model, model.dtype bfloat16, or lower sampler.cache_tokens"
        )
    elif memory.total > machine:
        facts.notes.append(
            f"a full pack may need {memory.total:,.0f} MiB in all and this machine has {machine:,.0f}: lower "
            "engine.pack_tokens, or set engine.activations.checkpoint_every to 1"
        )


def _memory(recipe: Recipe, facts: Facts) -> estimate.Memory | None:
    if facts.shape is None:
        return None
    impl = facts.impl or Impl.TORCH
    teachers = estimate.teacher_memory(facts.teachers, recipe, step_tokens=_step_tokens(recipe, facts))
    tokens, critic = _step_tokens(recipe, facts), facts.critic[0] / estimate.MIB
    return estimate.memory(facts.shape, recipe, step_tokens=tokens, impl=impl, teachers=teachers, critic=critic)


def _step_tokens(recipe: Recipe, facts: Facts) -> int:
    """Tokens that a step trains on at the most, no prompt shared; a full pack when the prompts are not known."""
    if facts.longest is None:
        return recipe.engine.pack_tokens
    attempts = max(loop.tasks_per_step * loop.attempts_per_task for loop in recipe.loops().values())
    return attempts * recipe.tasks.max_turns * (facts.longest[0] + recipe.draw.max_tokens)


def _check_folder(recipe: Recipe, facts: Facts, resume: bool) -> None:
    """The run folder is new, or holds the run to resume; its disk has room."""
    folder = Path(recipe.run.folder)
    if folder.exists() and not folder.is_dir():
        facts.problems.append(f"run.folder {folder} is a file: give another folder")
        return
    used = folder.is_dir() and any(folder.iterdir())
    if used and not resume:
        facts.problems.append(
            f"run.folder {folder} holds a run already: go on with --resume, give another run.folder, or remove it"
        )
    if resume and not (folder / RECIPE).is_file():
        facts.problems.append(f"--resume: run.folder {folder} holds no run: it has no {RECIPE}")
    parent = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(parent, os.W_OK):
        facts.problems.append(f"run.folder {folder} cannot be made: {parent} is not writable")
    elif facts.shape is not None and not resume:
        needed, free = estimate.disk_bytes(facts.shape, recipe, facts.critic[1]), shutil.disk_usage(parent).free
        if needed > free:
            facts.problems.append(
                f"checkpoints and the exported model need up to {needed / 1e9:.2g} GB and the disk of {folder} has "
                f"{free / 1e9:.2g} GB free: lower run.keep, or give another run.folder"
            )
