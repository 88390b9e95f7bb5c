"""B14: the side that is named is the side that goes."""

from __future__ import annotations

import pytest

from strop.tokens.text import Side, cut


@pytest.mark.parametrize(
    ("limit", "left", "right"), [(3, "def", "abc"), (0, "", ""), (10, "abcdef", "abcdef"), (6, "abcdef", "abcdef")]
)
def test_cut(limit: int, left: str, right: str) -> None:
    assert cut("abcdef", limit, Side.LEFT) == left
    assert cut("abcdef", limit, Side.RIGHT) == right
