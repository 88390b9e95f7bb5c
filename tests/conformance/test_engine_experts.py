"""The experts of a mixture dealt to two ranks; the other families and shapes are in tests/ranks (`make ranks`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.expert_checks import check_numbers, check_replay, check_steps, open_engines
from tests.ranks.shapes import EXPERT_SHAPES


@pytest.mark.parametrize(("family", "again"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_two_ranks_are_one(family: str, again: bool, tmp_path: Path) -> None:
    """A32, G03, G04, H08: also when a rank's experts get no token, and when every layer is computed again."""
    one, spread = open_engines(family, EXPERT_SHAPES["data2-experts2"], again=again)
    try:
        check_numbers(one, spread)
        check_replay(one, spread, family)
        check_steps(one, spread, tmp_path)
    finally:
        spread.close()
