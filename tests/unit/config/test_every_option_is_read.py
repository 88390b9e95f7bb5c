"""C10: no option of a recipe is inert. Each one's name is read somewhere in strop, outside its declaration."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import strop.config
from strop.config.loader import all_keys

CONFIG = Path(strop.config.__file__).parent
STROP = CONFIG.parent
# What only prints a recipe or checks it does not make an option work.
TALKERS = ("plan.py", "estimate.py", "cli.py", "doctor.py")


@cache
def readers() -> dict[str, set[str]]:
    """Attribute name -> the files of strop that read it."""
    found: dict[str, set[str]] = {}
    for path in STROP.rglob("*.py"):
        if CONFIG in path.parents or path.name in TALKERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(str(path.relative_to(STROP)))
    return found


def test_every_option_is_read_by_a_component() -> None:
    found = readers()
    where = {key: sorted(found.get(key.rpartition(".")[2], set())) for key in all_keys()}
    unread = [key for key, files in where.items() if not files]
    assert unread == [], f"these options do nothing: {', '.join(unread)}"


def test_the_search_sees_reads_and_nothing_else() -> None:
    found = readers()
    assert "loops/grpo.py" in found["updates_per_step"]
    assert "no_such_option" not in found
    assert all(not file.startswith("config/") for files in found.values() for file in files)
