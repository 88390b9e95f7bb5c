"""A trained model to a Hugging Face folder that any library loads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from strop.errors import CheckpointError
from strop.models.experts import Form
from strop.models.loading import LanguageModel
from strop.models.saved import export_weights

SHARD_BYTES = 4 << 30
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export_model(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config, weights (safetensors, ties kept) and tokenizer into `folder`, whole or not at all.

    The weights' names and bytes are those that `save_pretrained` writes; at most `shard_bytes` of them are held beside
    the model, and a tensor. `weights` stand for the model's own, as an engine's `weights()` yields them: an adapter's
    merged ones. One that has an output matrix of its own where the model ties it to the embedding is exported as it is.
    The model does not change. A value model becomes a folder of `AutoModelForSequenceClassification`, whose one logit
    is the value at a text's last token. Raises CheckpointError when `folder` exists and is not an earlier export.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds something that is not an exported model: give another folder")
    if weights is None:
        weights = export_weights(model.module, model.state(), Form.SAVED)
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        names = _write_shards(weights, partial, shard_bytes)
        _describe(model, names, partial)
        if model.value_head is not None:
            _name_classifier(model, tokenizer, partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
            old.unlink(missing_ok=True)  # an earlier export may have had more of them
        for file in sorted(partial.iterdir()):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> list[str]:
    """One file, or several and an index of them. Returns the names of the weights."""
    held: list[list[str]] = []
    total = 0
    for shard in _shards(weights, shard_bytes):
        held.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, folder / f"{len(held)}", metadata={"format": "pt"})
    count = len(held)
    files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)] if count > 1 else [SINGLE]
    for n, file in enumerate(files, 1):
        (folder / f"{n}").rename(folder / file)
    if count > 1:
        places = {name: file for names, file in zip(held, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return [name for names in held for name in names]


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors each with memory of its own, which is what a file of them can hold."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    yield shard


def _describe(model: LanguageModel, names: list[str], folder: Path) -> None:
    """config.json, and how it generates, as `save_pretrained` has them; untied where there is an output matrix."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model.module).__name__]
    head = {f"{name}.weight" for name, part in model.module.named_modules() if part is model.head}
    if model.value_head is None and head & set(names):
        for level in (config, config.get_text_config()):  # what is nested may say it too
            level.tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.module.can_generate():
        model.module.generation_config.save_pretrained(folder)


def _name_classifier(model: LanguageModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Say in config.json which class reads the folder, and which token pads.

    A classifier reads its logit at the last token that is not padding. Where the padding token is also the one that
    ends a reply, that would be a token too early, so the folder then has none, and takes one text at a time.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    if type(model.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        classifier = cast("type[PreTrainedModel]", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(model.config)])
        config["architectures"] = [classifier.__name__]
    if tokenizer is not None:
        pads = tokenizer.pad_token_id != tokenizer.eos_token_id
        config["pad_token_id"] = tokenizer.pad_token_id if pads else None
    file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
