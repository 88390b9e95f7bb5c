"""The budgets in tools/budgets.py: each one fires on the smallest offence and stays silent on its legal twin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tools import budgets

ROOT = Path(__file__).resolve().parents[2]
HEADER = '"""A module."""\n'


def texts(source: str, path: str = "strop/x.py") -> list[str]:
    return [finding.text for finding in budgets.check_module(PurePosixPath(path), HEADER + source)]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(**options): ...", "takes **options"),
        ("def f(a, b, c, d, e, f, g): ...", "7 positional parameters"),
        ("def f():\n" + "    x = 1\n" * 100, "has 101 lines"),
        ("x = 1\n" * 600, "601 lines"),
        ("eval('1')", "eval()"),
        ("import pickle", "imports pickle"),
        ("from dill import loads", "imports dill"),
        ("torch.load(path)", "weights_only=True"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("import os\nhome = os.environ['HOME']", "environment variables"),
        ("from os import getenv", "environment variables"),
        ("try: ...\nexcept: ...", "broad except"),
        ("try: ...\nexcept (KeyError, Exception): ...", "broad except"),
        ("with contextlib.suppress(BaseException): ...", "broad except"),
        ("class A:\n    def f(self): return hasattr(self, 'x')", "hasattr(self, 'x')"),
        ("from strop.types import Group\ndef f(g: Group | None): getattr(g, 'x', 0)", "getattr(g, 'x', 0)"),
        ("class A: ...\ndef f():\n    a = A()\n    setattr(a, 'x', 0)", "setattr(a, 'x', 0)"),
    ],
)
def test_an_offence_is_found(source: str, says: str) -> None:
    found = texts(source)
    assert len(found) == 1, found
    assert says in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b, c, d, e, f, *, g): ...",
        "class F:\n    def forward(ctx, a, b, c, d, e, f, g): ...",
        "@triton.jit\ndef kernel(a, b, c, d, e, f, g): ...",
        "class A:\n    def f(self, a, b, c, d, e, f): ...",
        "def f():\n" + "    x = 1\n" * 99,
        "x = 1\n" * 599,
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "try: ...\nexcept KeyError: ...",
        "with contextlib.suppress(FileNotFoundError): ...",
        "def f(config): return getattr(config, 'sliding_window', None)",
        "from os import path",
    ],
)
def test_the_legal_twin_is_not(source: str) -> None:
    assert texts(source) == []


def test_one_broad_except_is_allowed_in_one_file() -> None:
    broad = "try: ...\nexcept Exception: ...\n"
    assert texts(broad, "strop/rollout/groups.py") == []
    assert len(texts(broad * 2, "strop/rollout/groups.py")) == 1
    assert len(texts(broad, "strop/rollout/base.py")) == 1


def test_the_environment_has_one_reader() -> None:
    assert texts("import os\nhome = os.environ['HOME']", "strop/environment.py") == []


def test_loops_are_shorter_than_files() -> None:
    assert texts("x = 1\n" * 149, "strop/loops/grpo.py") == []
    assert "151 lines" in texts("x = 1\n" * 150, "strop/loops/grpo.py")[0]


@pytest.mark.parametrize("path", ["strop/utils.py", "strop/data/helpers.py", "strop/common/x.py"])
def test_no_drawers(path: str) -> None:
    assert "drawer" in texts("", path)[0]


def test_a_module_says_what_flows_through_it() -> None:
    path = PurePosixPath("strop/x.py")
    assert "docstring" in budgets.check_module(path, "x = 1\n")[0].text
    assert budgets.check_module(path, "") == []


@pytest.mark.parametrize(
    ("body", "findings"),
    [
        ("x = f()", 1),
        ("assert True", 1),
        ("assert f() == 1", 0),
        ("with pytest.raises(ValueError): f()", 0),
        ("torch.testing.assert_close(a, b)", 0),
        ("assert f()\n    pytest.skip()", 1),
        ("assert f()\n    pytest.skip('no compiler')", 0),
    ],
)
def test_tests_assert_and_skips_give_reasons(body: str, findings: int) -> None:
    found = budgets.check_tests(PurePosixPath("tests/test_x.py"), f"def test_x():\n    {body}\n")
    assert len(found) == findings, found


def test_a_test_may_assert_through_a_function_beside_it() -> None:
    calls = "def test_x():\n    same(1, 2)\ndef same(a, b):\n    near(a, b)\n"
    path = PurePosixPath("tests/test_x.py")
    assert budgets.check_tests(path, calls + "def near(a, b):\n    assert a == b\n") == []
    assert len(budgets.check_tests(path, calls + "def near(a, b):\n    return a == b\n")) == 1


def test_a_bare_skip_mark_is_found_once() -> None:
    source = "@pytest.mark.skip\ndef test_x():\n    assert f()\n"
    assert [f.line for f in budgets.check_tests(PurePosixPath("tests/test_x.py"), source)] == [1]


def test_a_tree_is_added_up(tmp_path: Path) -> None:
    (tmp_path / "strop").mkdir()
    for k in range(10):
        (tmp_path / "strop" / f"m{k}.py").write_text(HEADER + "x = 1\n" * (450 if k else 10))
    found, figures = budgets.check_tree(tmp_path)
    assert [f.text for f in found] == ["p90 of files: 451 lines (at most 400)"]
    assert "10 files" in figures


def test_import_strop_is_light() -> None:
    """`import strop` and a recipe's declarations must not load torch or any other heavy library."""
    heavy = ("torch", "transformers", "datasets", "matplotlib", "wandb")
    code = f"import sys, strop, strop.config.recipe; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
