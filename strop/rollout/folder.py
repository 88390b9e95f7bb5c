"""One version of a policy's weights as a folder, for samplers that read them from disk.

    (name, tensor) ... -> checked against the policy -> model-00001.safetensors, ..., an index, config.json

A folder is written beside its place and moved there when it is whole. Any library that reads Hugging Face folders reads
it, and nothing in it is ever executed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from strop.errors import EngineError
from strop.models.experts import Form
from strop.models.saved import export_weights, import_weights
from strop.rollout.transfer import shards

if TYPE_CHECKING:
    from torch import Tensor

    from strop.models.loading import LanguageModel

SHARD_BYTES = 1 << 30
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model that is served: the shapes and formats of its weights under Hugging Face names, and its architecture.
    `module` holds no memory, and knows how checkpoints hold the weights. `casts`: floating-point weights may come in
    another format."""

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    module: PreTrainedModel
    max_length: int
    vocab_size: int
    casts: bool = False

    @classmethod
    def of(cls, model: LanguageModel, casts: bool = False) -> Policy:
        with torch.device("meta"):
            module = type(model.module)(model.config)
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state()}
        return cls(shapes=shapes, module=module, max_length=model.max_length, vocab_size=model.vocab_size, casts=casts)

    @property
    def architecture(self) -> str:
        return type(self.module).__name__

    async def write(self, weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """One version, under the names that checkpoints of the architecture have. EngineError, and nothing is left
        behind, when the weights are not all of this policy's, or not only.

        They are taken one by one, in this thread; a shard of them is held at once, and the event loop runs while it is
        written.
        """
        partial = folder.with_name(f".partial-{folder.name}")
        partial.mkdir(parents=True)
        try:
            places: dict[str, str] = {}
            size = 0
            for number, shard in enumerate(shards(self._published(weights), shard_bytes), 1):
                name = f"model-{number:05}.safetensors"
                await asyncio.to_thread(save_file, shard, partial / name, metadata={"format": "pt"})
                places.update(dict.fromkeys(shard, name))
                size += sum(tensor.nbytes for tensor in shard.values())
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (partial / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
            described = {**json.loads(self.module.config.to_json_string()), "architectures": [self.architecture]}
            (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n", "utf-8")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # moved away when all went well

    def _published(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """As checkpoints hold them: experts one by one."""
        return export_weights(self.module, self._every(weights), Form.SAVED)

    def _every(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        missing = set(self.shapes)
        for name, tensor in import_weights(self.module, weights):
            yield name, self._fitting(name, tensor)
            missing.discard(name)
        if missing:
            raise EngineError(f"these weights are not the sampler's model: missing {', '.join(sorted(missing)[:5])}")

    def _fitting(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.shapes:
            raise EngineError(f"these weights are not the sampler's model: unknown {name}")
        shape, dtype = self.shapes[name]
        if self.casts and tensor.is_floating_point() and dtype.is_floating_point:
            tensor = tensor.to(dtype)
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise EngineError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the sampler's is {shape} {dtype}")
        return tensor
