"""The tokenizer that a recipe names: a folder's own, another folder's, or what a user's function makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from strop.config.recipe import ModelConfig
from strop.data.user_code import load_object
from strop.errors import ConfigError
from strop.models.loading import model_folder


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises ConfigError when a fresh model names no tokenizer, or when the named one does not load."""
    if config.tokenizer is None:
        if config.fresh is not None:
            raise ConfigError(
                "model.tokenizer is missing: fresh weights come without one; give a folder or file.py:function"
            )
        return _from_folder(model_folder(config))
    if ".py:" in config.tokenizer:
        made = load_object(config.tokenizer, Path())()
        if not isinstance(made, PreTrainedTokenizerBase):
            raise ConfigError(
                f"model.tokenizer={config.tokenizer} returned a {type(made).__name__}; "
                "it must return a transformers tokenizer"
            )
        return made
    return _from_folder(Path(config.tokenizer))


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.tokenizer: no tokenizer can be loaded from {folder}: {error}") from error


def same_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, *, key: str) -> None:
    """Raises ConfigError when two models do not mean the same by the same ids; `key` names the other one's."""
    own, other = ours.get_vocab(), theirs.get_vocab()
    if own == other:
        return
    names = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
    shown = ", ".join(f"{name!r} is {own.get(name, 'none')} and {other.get(name, 'none')}" for name in names[:3])
    raise ConfigError(
        f"{key} has another tokenizer than model: the ids of {len(names)} tokens differ ({shown}); two models can only "
        "be compared over the same tokens, so take one of the same family"
    )


def end_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a text: the tokenizer's, and all that the model's generation config lists."""
    own = tokenizer.eos_token_id
    ids: list[int] = [own] if isinstance(own, int) else []
    if config.fresh is None:
        folder = model_folder(config)
        if (folder / "generation_config.json").is_file():
            listed = GenerationConfig.from_pretrained(folder).eos_token_id
            ids += listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not ids:
        raise ConfigError("the tokenizer has no eos token and the model lists none: replies would never end")
    return tuple(dict.fromkeys(ids))


def decode_with(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Ids to text as they are: special tokens shown, spaces untouched."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode
