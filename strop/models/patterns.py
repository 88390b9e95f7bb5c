"""Names of modules and parameters, chosen by patterns: dotted, part by part.

`*`, `?` and `[0-3]` stand for characters of one part, `**` for any number of whole parts: `model.layers.*` are the
layers and not what is in them, `model.layers.[0-3].mlp` the first four feed-forward parts, `**.bias` every bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from strop.errors import ConfigError


def chosen(patterns: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """The names that any pattern matches, in their order. ConfigError, naming `key`, for one that matches none."""
    matched: set[str] = set()
    problems: list[str] = []
    for pattern in patterns:
        hits = {name for name in names if _matches(pattern.split("."), name.split("."))}
        if not hits:
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            problems.append(f"{key}: {pattern!r} matches nothing; the nearest names are {', '.join(near)}")
        matched |= hits
    if problems:
        raise ConfigError(*problems)
    return [name for name in names if name in matched]


def matches(pattern: str, name: str) -> bool:
    """Whether one pattern means this name."""
    return _matches(pattern.split("."), name.split("."))


def _matches(pattern: list[str], name: list[str]) -> bool:
    if not pattern or not name:
        return pattern in ([], ["**"]) and not name
    if pattern[0] == "**":
        return _matches(pattern[1:], name) or _matches(pattern, name[1:])
    return fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])
