"""Long texts made short."""

from __future__ import annotations

from enum import StrEnum


class Side(StrEnum):
    """The side of a text that is taken away."""

    LEFT = "left"
    RIGHT = "right"


def cut(text: str, limit: int, side: Side) -> str:
    """At most `limit` characters of `text`: cutting on the left keeps its end, on the right its beginning."""
    if len(text) <= limit:
        return text
    return text[:limit] if side is Side.RIGHT else text[len(text) - limit :]
