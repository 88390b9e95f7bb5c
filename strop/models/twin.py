"""A model's empty twin: the same modules and the same fused forms, in memory that nobody has written to yet.

One rank loads a model, checks it, and says what it found; the others make a twin of it, keep their shards, and are sent
the weights one tensor at a time. Pages of an empty tensor that are never written take no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from strop.config.model import ModelConfig
from strop.models import attention, linear_attention
from strop.models.fuse import fuse
from strop.models.heads import make_value_model
from strop.models.loading import DTYPES, CacheShape, LanguageModel, StateShape, fresh_config, model_folder
from strop.ops.select import Impl


def facts_of(model: LanguageModel) -> str:
    """What checking a model has found, as JSON: all that a twin needs beside the configuration."""
    found = {"impl": model.impl.value, "fused": model.fused, "cache": asdict(model.cache_shape)}
    return json.dumps(found | {"values": model.value_head is not None})


def empty_twin(config: ModelConfig, vocab_size: int, facts: str) -> LanguageModel:
    """The model that `config` names, as `facts_of` another rank's described it; its weights hold anything."""
    known: dict[str, Any] = json.loads(facts)
    if config.fresh is not None:
        hf_config = fresh_config(config.fresh, vocab_size)
    else:
        hf_config = AutoConfig.from_pretrained(model_folder(config))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention.NAME)
    nn.Module.to(module, dtype=DTYPES[config.dtype])
    module.to_empty(device="cpu")
    module.tie_weights()
    module.eval()
    if module.dtype == torch.float64 and module._can_set_experts_implementation():  # pyright: ignore[reportPrivateUsage]
        module.set_experts_implementation("eager")
    impl = Impl(known["impl"])
    linear_attention.hook(module, impl, compare=False)
    fuse(module, impl, agreed=frozenset(known["fused"]))
    cache = _tuples(known["cache"])
    cache["states"] = None if cache["states"] is None else StateShape(**_tuples(cache["states"]))
    shape = CacheShape(**cache)
    model = LanguageModel(module=module, impl=impl, cache_shape=shape, fused=known["fused"])
    if known["values"]:
        make_value_model(module)
    return model


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def everything(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers, those too that no checkpoint has, each once; the same names in the same order in a twin."""
    named = set()
    for name, tensor in model.state():
        named.add(name)
        yield name, tensor
    for name, buffer in model.module.named_buffers():
        if name not in named:
            yield name, buffer
