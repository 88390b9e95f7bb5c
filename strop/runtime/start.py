"""An engine over new ranks: each loads the model by itself, and they keep their shards of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from strop.config.model import ModelConfig
from strop.config.recipe import EngineConfig, Recipe
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.engines.fsdp2.engine import read_weights
from strop.models.heads import ValueHead
from strop.models.loading import DTYPES, load_model
from strop.models.shards import share_of
from strop.models.tokenizer import decode_with, load_tokenizer
from strop.models.twin import empty_twin, everything, facts_of
from strop.rollout.base import Sampler
from strop.rollout.build import build_sampler
from strop.rollout.router import Router
from strop.rollout.transfer import Outbox
from strop.runtime.processes import ProcessRanks
from strop.runtime.ranks import Ranks
from strop.runtime.remote_engine import RemoteEngine
from strop.weights.broadcast import Broadcast
from strop.weights.disk import Disk

if TYPE_CHECKING:
    from strop.rollout.ray import RaySampler

StartedT = TypeVar("StartedT", bound="RaySampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What a rank needs to know to load the model of an engine."""

    model: ModelConfig
    vocab_size: int
    seed: int
    value_head: ValueHead | None = None
    weights: Path | None = None  # an engine's folder: what it holds of the model's weights stands for them


def rank_engine(config: EngineConfig, of: RankModel, trainable: bool) -> Engine:
    """This rank's share of the engine; every rank calls this, inside their process group.

    The first rank reads the model and sends it, one tensor at a time; none of the others ever holds the whole.
    """
    first = dist.get_rank() == 0
    if first:
        model = load_model(of.model, vocab_size=of.vocab_size, seed=of.seed, value_head=of.value_head)
        if of.weights is not None:
            read_weights(model, of.weights)
        _tell(facts_of(model))
    else:
        model = empty_twin(of.model, of.vocab_size, _told())
    whole = dict(everything(model)) if first else {}
    engine = build_engine(config, model, trainable=trainable)
    with torch.no_grad():
        for name, own in everything(model):
            sent = whole.pop(name).contiguous() if first else torch.empty(own.shape, dtype=own.dtype)
            dist.broadcast(sent, 0)
            own.copy_(share_of(sent, own))
    return engine


def _tell(text: str) -> None:
    """Send a text to every other rank."""
    letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(letters)]), 0)
    dist.broadcast(letters, 0)


def _told() -> str:
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0)
    letters = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(letters, 0)
    return bytes(letters.tolist()).decode()


def host_sampler(recipe: Recipe) -> Sampler:
    """The recipe's sampler with a model of its own, in its own number format; called in the process that hosts it."""
    tokenizer = load_tokenizer(recipe.model)
    model = load_model(recipe.sampler.model(recipe.model), vocab_size=len(tokenizer), seed=recipe.seed)
    if recipe.engine.adapter.rank:
        from strop.models.lora import untie

        untie(model, recipe.engine.adapter)
    return build_sampler(recipe.sampler, model, decode_with(tokenizer))


def start_samplers(recipe: Recipe, ends: ExitStack) -> Sampler:
    """As many samplers as `sampler.actors` says, behind one router, and weights on the way that `sampler.publish` says.

    `ends` ends them. Raises RolloutError when one does not start in time.
    """
    from strop.rollout.ray import RaySampler
    from strop.runtime.ray import connect
    from strop.weights.actors import ListeningSampler, ReadingSampler

    connect(recipe.engine.runtime)
    cpus, timeout_s = recipe.engine.runtime.cpus_per_rank, recipe.engine.runtime.timeout_s
    make = partial(host_sampler, recipe)
    dtype = DTYPES[recipe.sampler.model(recipe.model).dtype]

    def start(kind: type[StartedT], deltas: bool = False) -> list[StartedT]:
        samplers: list[StartedT] = []
        for _ in range(recipe.sampler.actors):
            samplers.append(kind(make, cpus=cpus, deltas=deltas, timeout_s=timeout_s))
            ends.callback(samplers[-1].close)
        return [sampler.started() for sampler in samplers]

    match recipe.sampler.publish:
        case "broadcast":
            listening = start(ListeningSampler)
            return Router(listening, courier=Broadcast(listening, timeout_s=timeout_s, dtype=dtype))
        case "disk":
            reading = start(ReadingSampler)
            folder = Path(recipe.run.folder).resolve() / "weights"
            return Router(reading, courier=Disk(reading, folder, dtype))
        case "full" | "delta" as kind:
            deltas = kind == "delta"
            return Router(start(RaySampler, deltas), Outbox(deltas=deltas, dtype=dtype))


def start_engine(config: EngineConfig, of: RankModel, *, trainable: bool = True) -> RemoteEngine:
    """Start the ranks that `config.parallel` asks for, where `config.runtime` says, and an engine over them."""
    makes = [partial(rank_engine, config, of, trainable)] * config.parallel.ranks
    if config.runtime.kind == "ray":
        from strop.runtime.ray import RayRanks

        ranks: Ranks = RayRanks(makes, config.runtime)
    else:
        ranks = ProcessRanks(makes, timeout_s=config.runtime.timeout_s)
    return RemoteEngine(ranks, config.parallel)
