"""Which sampler a recipe means, built. Samplers are imported only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable

from strop.config.adapter import AdapterConfig
from strop.config.recipe import SamplerConfig
from strop.config.sglang import SglangConfig
from strop.config.vllm import VllmConfig
from strop.errors import ConfigError
from strop.models.loading import LanguageModel
from strop.rollout.base import Sampler


def build_sampler(
    config: SamplerConfig,
    model: LanguageModel,
    decode: Callable[[list[int]], str],
    adapter: AdapterConfig | None = None,
) -> Sampler:
    """The sampler of `config.kind` over a model of its own; `decode` turns ids into text, for stop strings.

    With an `adapter` the model may be the trainer's: the sampler adds an adapter of its own to it. vLLM is given the
    model's architecture and weights, sglang the weights, and the model is free again.
    """
    if adapter is not None and config.kind != "builtin":
        raise ConfigError(
            f"sampler.kind {config.kind} serves no adapter of its own: leave it out, and send the engine's merged "
            "weights"
        )
    if config.kind == "sglang":
        from strop.rollout.sglang import SglangSampler

        return SglangSampler.start(
            model,
            config.sglang or SglangConfig(),
            max_running=config.max_running,
            decode=decode,
            casts=config.dtype != "model",
        )
    if config.kind == "vllm":
        from strop.rollout.vllm import VllmSampler

        return VllmSampler.start(
            model,
            config.vllm or VllmConfig(),
            max_running=config.max_running,
            cache_tokens=config.cache_tokens,
            decode=decode,
            casts=config.dtype != "model",
            deltas=config.publish == "delta" and not config.actors,  # what actors are sent is theirs to compare
        )
    from strop.rollout.builtin.sampler import BuiltinSampler

    served = None
    if adapter is not None:
        from strop.models.lora import add_adapter

        served = add_adapter(model, "sampled", adapter)
    return BuiltinSampler(
        model,
        max_running=config.max_running,
        cache_tokens=config.cache_tokens,
        decode=decode,
        adapter=served,
        casts=config.dtype != "model",
    )
