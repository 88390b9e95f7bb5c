"""A trained model to a Hugging Face folder that any library loads."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from strop.errors import CheckpointError
from strop.models.loading import LanguageModel


def export_model(model: LanguageModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, weights (safetensors, ties kept) and tokenizer into `folder`, whole or not at all.

    Raises CheckpointError when `folder` exists and is not an earlier export.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds something that is not an exported model: give another folder")
    partial = folder.with_name(f".partial-{folder.name}")
    partial.mkdir(parents=True, exist_ok=True)
    model.module.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(partial.iterdir()):
        file.replace(folder / file.name)
    partial.rmdir()
