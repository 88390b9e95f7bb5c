"""Value models: a transformer whose hidden states go through a head of one number instead of an output matrix.

    tokens -> hidden [T, D] -> value [T]            critics and reward models alike

A language model becomes one by losing its output matrix (which is tied to the embedding, so that it costs nothing and
is never saved) and getting a head, fresh or read from a folder. The head is called `score`, as in transformers' own
classifiers: what strop saves and exports are folders that `AutoModelForSequenceClassification` reads.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.errors import ConfigError

VALUE_HEAD = "score"
SAVED_AS = ("score", "classifier", "v_head.summary")
"""What folders call the head: transformers' classifiers of sequences and of tokens, and TRL's value-head wrapper."""
PICKLES = ("pytorch_model.bin", "value_head.bin")


class ValueHead(StrEnum):
    """Where a value model's head comes from."""

    FRESH = "fresh"  # zeros: every value is 0 before the first step
    LOADED = "loaded"  # from the model's folder, which must have one


def make_value_model(module: PreTrainedModel, head: nn.Linear | None = None) -> None:
    """Turn a causal language model into a value model, in place. A head left out is fresh: zeros, without a bias."""
    embedding = cast("nn.Embedding", module.get_input_embeddings())
    output = cast("nn.Linear", module.get_output_embeddings())
    if head is None:
        head = nn.Linear(embedding.weight.shape[-1], 1, bias=False)
        nn.init.zeros_(head.weight)
    output.weight = embedding.weight
    module.config.tie_word_embeddings = True
    module.config.num_labels = 1
    module.add_module(VALUE_HEAD, head.to(device=output.weight.device, dtype=output.weight.dtype))


def value_head_of(module: PreTrainedModel) -> nn.Linear | None:
    """The head of a value model; None for a language model."""
    head = dict(module.named_children()).get(VALUE_HEAD)
    assert head is None or isinstance(head, nn.Linear)
    return head


def values(head: nn.Linear, hidden_TD: Tensor) -> Tensor:
    """[T] float32 (float64 for float64 hidden states) of hidden states [T, D]. No temperature ever divides them."""
    kind = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
    bias = None if head.bias is None else head.bias.to(kind)  # pyright: ignore[reportUnnecessaryComparison] - may be
    return nn.functional.linear(hidden_TD.to(kind), head.weight.to(kind), bias)[:, 0]


def load_value_head(folder: Path) -> nn.Linear:
    """The head in the safetensors files of a Hugging Face folder, float32.

    It may be a folder of `AutoModelForTokenClassification` or `AutoModelForSequenceClassification` with num_labels=1,
    or a language model that TRL's value-head wrapper saved. Raises ConfigError when it has no head, more than one, or
    one that gives more than one number.
    """
    files = {name: path for path in sorted(folder.glob("*.safetensors")) for name in _names(path)}
    found = [prefix for prefix in SAVED_AS if f"{prefix}.weight" in files]
    if len(found) != 1:
        raise ConfigError(_no_head(folder, found))
    with safe_open(files[f"{found[0]}.weight"], "pt") as file:
        weight_1D = file.get_tensor(f"{found[0]}.weight").float()
    if weight_1D.ndim != 2 or len(weight_1D) != 1:
        raise ConfigError(
            f"{folder}: {found[0]}.weight has shape {tuple(weight_1D.shape)}; a value head gives one number (a "
            "classifier with num_labels=1), so its shape is (1, hidden size)"
        )
    bias_name = f"{found[0]}.bias"
    head = nn.Linear(weight_1D.shape[1], 1, bias=bias_name in files)
    with torch.no_grad():
        head.weight.copy_(weight_1D)
        if bias_name in files:
            with safe_open(files[bias_name], "pt") as file:
                head.bias.copy_(file.get_tensor(bias_name).reshape(1))
    return head


def refuse_missing(module: PreTrainedModel, folder: Path, missing: Collection[str], *, value_model: bool) -> None:
    """ConfigError naming the weights that a folder lacks; a value model needs no output matrix.

    transformers only warns of missing weights, and trains on with random ones.
    """
    output = module.get_output_embeddings()
    spare = {name for name, child in module.named_modules() if child is output} if value_model else set[str]()
    wanting = sorted(name for name in missing if name.rpartition(".")[0] not in spare)
    if wanting:
        more = f" and {len(wanting) - 5} more" if len(wanting) > 5 else ""
        raise ConfigError(
            f"{folder} has not all weights of a {type(module).__name__}: missing {', '.join(wanting[:5])}{more}. Give "
            "a folder whose safetensors files are complete"
        )


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _no_head(folder: Path, found: list[str]) -> str:
    if found:
        return f"{folder} has more than one head ({', '.join(found)}): keep the one that is meant"
    names = " or ".join(f"{prefix}.weight" for prefix in SAVED_AS)
    pickles = [name for name in PICKLES if (folder / name).is_file()]
    if pickles:
        return (
            f"{folder}: no safetensors file has {names}. Its {pickles[0]} is a pickle, from which strop reads no head: "
            "load it with the library that wrote it and save it again as safetensors"
        )
    return f"{folder} has no value head: missing {names}. For a head that starts from zeros, set head: fresh"
