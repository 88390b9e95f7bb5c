"""Which experts can be dealt to which ranks: everything else is said before a rank starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.build import build_engine
from strop.engines.fsdp2.expert_parallel import check_experts
from strop.errors import ConfigError
from strop.models.loading import CacheShape, LanguageModel
from strop.ops.select import Impl
from tests.tiny_models import COMMON, EXPERT_MODELS, EXPERTS, FAMILIES


def skeleton(family: str, **more: Any) -> nn.Module:
    """The model as a plan sees it: on no device."""
    with torch.device("meta"):
        fields = {**FAMILIES.get(family, COMMON), **more}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_experts_of_every_family_are_dealt(family: str) -> None:
    module, four = skeleton(family), 4
    for parallel in (ParallelConfig(data=4, experts=four), ParallelConfig(data=2, sequence=2, experts=four)):
        check_experts(module, parallel)


@pytest.mark.parametrize(
    ("family", "sizes", "ranks", "problem"),
    [
        ("qwen3_moe", {"data": 3}, 3, "experts is 3: it must divide the 4 experts of Qwen3MoeForCausalLM"),
        ("qwen3_moe", {"data": 2}, 4, "experts is 4: it must divide the 2 ranks of data 2 x sequence 1"),
        ("qwen3_moe", {"replicas": 2}, 2, "experts is 2: it must divide the 1 ranks of data 1 x sequence 1"),
        ("qwen3_moe", {"data": 2, "tensor": 2}, 2, "experts is 2 and tensor 2"),
        ("qwen3", {"data": 2}, 2, "experts is 2, but Qwen3ForCausalLM has no experts: set it to 1"),
        ("qwen2_moe", {"data": 2}, 2, "cannot deal Qwen2MoeExperts of Qwen2MoeForCausalLM to ranks"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_its_values(
    family: str, sizes: dict[str, int], ranks: int, problem: str
) -> None:
    more = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16} if family == "qwen2_moe" else {}
    module = skeleton(family, **more)
    with pytest.raises(ConfigError) as caught:
        check_experts(module, ParallelConfig.model_validate({**sizes, "experts": ranks}))
    assert [problem in said for said in caught.value.problems] == [True]


def test_a_plan_hears_of_it() -> None:
    """An engine over a model without weights, which is what a plan builds."""
    shape = CacheShape(layers=(0, 1), num_kv_heads=2, key_channels=8, value_channels=8)
    config = EngineConfig(parallel=ParallelConfig(data=2, experts=2))
    for family in ("qwen3_moe", "qwen3"):
        module: Any = skeleton(family)
        model = LanguageModel(module=module, impl=Impl.TORCH, cache_shape=shape)
        if family == "qwen3_moe":
            assert build_engine(config, model, trainable=False).capabilities.expert_parallel
            continue
        assert not build_engine(EngineConfig(), model, trainable=False).capabilities.expert_parallel
        with pytest.raises(ConfigError, match=r"engine\.parallel\.experts is 2"):
            build_engine(config, model, trainable=False)
