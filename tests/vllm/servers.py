"""vLLM engines that tests share: one takes half a minute to start, and any weights of its family afterwards."""

from __future__ import annotations

import os
from typing import Any

from strop.config.vllm import VllmConfig
from strop.rollout.vllm import VllmSampler
from tests import tiny_models
from tests.conformance.test_sampler import Limits, decode
from tests.tiny_models import tiny_model

PYTHON = os.environ.get("VLLM_PYTHON", "")
AT_ONCE = 2  # a test may ask for two; each takes 3 GB
WIDER: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}
"""What vLLM's kernels for processors need at least; the suite's own models have heads of 8 and 16 channels."""
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Each takes a start of vLLM; tied weights, biases, norms of queries and keys, and experts are among them."""


def wider(family: str) -> dict[str, Any]:
    """The suite's model of this family, as small as vLLM can run it."""
    own = tiny_models.FAMILIES[family]
    return {**own, **{key: size for key, size in WIDER.items() if key in own}}


def start(family: str, seed: int, limits: Limits) -> VllmSampler:
    return VllmSampler.start(
        tiny_model(family, seed=seed),
        VllmConfig(python=PYTHON, start_timeout_s=1800),
        max_running=limits.max_running,
        cache_tokens=limits.cache_tokens,
        decode=decode,
    )
