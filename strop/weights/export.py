"""A trained model to a Hugging Face folder that any library loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from strop.errors import CheckpointError
from strop.models.loading import LanguageModel


def export_model(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write config, weights (safetensors, ties kept) and tokenizer into `folder`, whole or not at all.

    `weights` stand for the model's own, under Hugging Face names: an adapter's merged ones. One that has an output
    matrix of its own where the model ties it to the embedding is exported as it is. The model does not change. A value
    model becomes a folder of `AutoModelForSequenceClassification`, whose one logit is the value at a text's last token.
    Raises CheckpointError when `folder` exists and is not an earlier export.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds something that is not an exported model: give another folder")
    state = None if weights is None else dict(weights)
    partial = folder.with_name(f".partial-{folder.name}")
    partial.mkdir(parents=True, exist_ok=True)
    if state is None:
        model.module.save_pretrained(partial)
    else:
        _save(model, state, partial)
    if model.value_head is not None:
        _name_classifier(model, tokenizer, partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(partial.iterdir()):
        file.replace(folder / file.name)
    partial.rmdir()


def _save(model: LanguageModel, state: dict[str, Tensor], folder: Path) -> None:
    """The architecture of `model` with other weights, through a module of its own on the meta device."""
    config = copy.deepcopy(model.config)
    if "lm_head.weight" in state and config.tie_word_embeddings:
        config.tie_word_embeddings = False
    with torch.device("meta"):
        module = type(model.module)(config)
    module.save_pretrained(folder, state_dict=state)


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
