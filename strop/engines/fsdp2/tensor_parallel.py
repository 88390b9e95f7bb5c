"""Tensor parallelism: matrices of attention and of dense feed-forward parts, cut by heads and by inner channels.

A model's own plan says which: `colwise` matrices give each rank some of the outputs, `rowwise` ones take those and
their results are summed (Megatron-LM, arXiv 1909.08053). What the plan names beside these (experts, linear attention,
the embedding and the output matrix) stays whole on each rank and is computed alike by all.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from strop.errors import ConfigError
from strop.models.loading import LanguageModel
from strop.models.patterns import matches


def split_heads(model: LanguageModel, mesh: DeviceMesh) -> list[str]:
    """Cut the model's matrices over the ranks of `mesh`; returns parameters whose gradients each rank has a part of.

    Those are used with a rank's own heads alone, like norms of queries. ConfigError when the model has no plan, or its
    heads cannot be dealt to the ranks.
    """
    module, size = model.module, mesh.size()
    plan: dict[str, str] = dict(module._tp_plan or {})  # pyright: ignore[reportPrivateUsage] - transformers' own
    styles: dict[str, ParallelStyle] = {}
    partial: list[str] = []
    for name, part in module.named_modules():
        style = next((style for pattern, style in plan.items() if matches(pattern, name)), None)
        if style in ("colwise", "rowwise") and isinstance(part, nn.Linear):
            styles[name] = ColwiseParallel() if style == "colwise" else RowwiseParallel()
        elif style == "replicated_with_grad_allreduce":
            partial += [f"{name}.{own}" for own, _ in part.named_parameters()]
    if not styles:
        raise ConfigError(
            f"engine.parallel.tensor is {size}, but {type(module).__name__} has no plan for it: set it to 1, and take "
            "more data or sequence ranks"
        )
    heads = model.cache_shape.num_kv_heads
    if heads % size:
        raise ConfigError(f"engine.parallel.tensor is {size}: it must divide the model's {heads} key-value heads")
    parallelize_module(module, mesh, styles)
    return partial
