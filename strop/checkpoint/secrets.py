"""Keeps keys and passwords out of everything a run writes: recipe -> the same recipe with secret values hidden."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from strop.config.recipe import Recipe
from strop.errors import ConfigError

HIDDEN = "<hidden>"
_SECRET_KEY = re.compile(
    r"(?i)(^|_|-)(api_?key|private_?key|secret|password|passwd|passphrase|credentials?|authorization|token)$"
)
_SECRET_VALUE = re.compile(r"^(sk-|hf_|ghp_|github_pat_|xox[abp]-|AKIA|Bearer )")


def hide_secrets(recipe: Recipe) -> Recipe:
    """The recipe as it may be written down.

    A text is hidden when its key is named like a secret (`api_key`, `hf_token`, ...) or when it begins like one of the
    well-known kinds (`sk-`, `hf_`, ...). Only the free-form parts of a recipe can hold such keys.
    """
    return Recipe.model_validate(_hidden(recipe.model_dump(mode="json"), secret=False))


def refuse_hidden(recipe: Recipe) -> None:
    """ConfigError naming each key whose value a run folder's recipe has hidden: it must be given again."""
    keys = [key for key, value in flatten(recipe.model_dump(mode="json")).items() if _holds_hidden(value)]
    if keys:
        raise ConfigError(*(f"{key} was hidden when the recipe was written: give it with {key}=..." for key in keys))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary of dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _holds_hidden(value: Any) -> bool:
    if isinstance(value, list):
        return any(_holds_hidden(inner) for inner in cast(list[Any], value))
    if isinstance(value, dict):
        return any(_holds_hidden(inner) for inner in cast(dict[str, Any], value).values())
    return value == HIDDEN


def _hidden(value: Any, *, secret: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _hidden(inner, secret=secret or _SECRET_KEY.search(str(key)) is not None)
            for key, inner in cast(dict[str, Any], value).items()
        }
    if isinstance(value, list):
        return [_hidden(inner, secret=secret) for inner in cast(list[Any], value)]
    if isinstance(value, str) and value and (secret or _SECRET_VALUE.match(value)):
        return HIDDEN
    return value
