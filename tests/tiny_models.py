"""Tiny random models of the real architectures, for every test that needs a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from strop.models.attention import NAME
from strop.models.loading import LanguageModel, prepare
from strop.ops.select import Impl

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "tie_word_embeddings": True},
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 16},
    "mistral": {**COMMON, "sliding_window": 3},
    "phi3": COMMON,
    "olmo2": COMMON,
    "smollm3": COMMON,
    "gemma2": {**COMMON, "head_dim": 16, "sliding_window": 3},
    "gemma3_text": {
        **COMMON, "head_dim": 16, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {
        "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3_moe": {**COMMON, **EXPERTS, "head_dim": 16, "num_experts": 4},
    "mixtral": {**COMMON, "num_local_experts": 4},
    "gpt_oss": {
        **COMMON, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        **COMMON, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "glm4_moe": {
        **COMMON, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "minimax_m2": {
        **COMMON, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16,
    },
    "qwen3_next": {**COMMON, **EXPERTS, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**COMMON, **LINEAR},
    "qwen3_5_moe_text": {**COMMON, **EXPERTS, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
}  # fmt: skip
DENSE = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "gemma2", "gemma3_text", "gpt2", "qwen3_5_text",
)  # fmt: skip
EXPERT_MODELS = (
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe_text",
)  # fmt: skip
LINEAR_MODELS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
REFUSED: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {**COMMON, "layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": COMMON,
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "t5": {"vocab_size": 96, "d_model": 32},
}


def tiny_config(family: str) -> PretrainedConfig:
    fields = FAMILIES[family] if family in FAMILIES else REFUSED[family]
    return AutoConfig.for_model(family, **fields)


def tiny_module(family: str, attention: str = NAME, seed: int = 0) -> PreTrainedModel:
    """Weights large enough that every sublayer matters: initial ones are so small that a leak would hide in
    rounding."""
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "A_log" in name:
                parameter.uniform_(-3.0, -1.0)  # states that last: a leak of what has faded would not be seen
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 0.5 if "conv1d" in name else 0.2)
            elif "norm" not in name and "sinks" not in name:
                parameter.normal_(0.0, 0.05)
    return module


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, impl: Impl = Impl.TORCH, seed: int = 0
) -> LanguageModel:
    module = tiny_module(family, seed=seed)
    nn.Module.to(module, dtype)
    return prepare(module, impl)
