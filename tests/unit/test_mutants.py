"""What is made of mutmut's output: names, changes, reasons, and a table whose figures hide no survivor."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import first_failure, mutants
from tools.mutants import HEAD, Mutant, Suite, changed_lines, parse, reasons, table

OUTPUT = """
    strop.algos.kl.x__k3__mutmut_2: killed
    strop.algos.kl.x_estimate__mutmut_10: survived
    strop.algos.losses.xǁSAPOǁsurrogate__mutmut_2: survived
    strop.algos.losses.xǁPolicyLossǁ__call____mutmut_30: timeout
    strop.algos.losses.xǁPolicyLossǁ_terms__mutmut_1: no tests
some other line
"""


def test_a_line_of_the_output_is_a_mutant() -> None:
    found = parse(OUTPUT.splitlines())
    assert [(m.function, m.module, m.verdict, m.killed) for m in found] == [
        ("strop.algos.kl._k3", "strop.algos.kl", "killed", True),
        ("strop.algos.kl.estimate", "strop.algos.kl", "survived", False),
        ("strop.algos.losses.SAPO.surrogate", "strop.algos.losses", "survived", False),
        ("strop.algos.losses.PolicyLoss.__call__", "strop.algos.losses", "timeout", True),
        ("strop.algos.losses.PolicyLoss._terms", "strop.algos.losses", "no tests", False),
    ]


def test_a_change_is_what_is_put_in() -> None:
    diff = "# name: survived\n--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n x = 1\n-    y = 2\n+    y = 3\n     z\n"
    assert changed_lines(diff) == "y = 3"
    assert changed_lines("--- a/f\n+++ b/f\n-    start,\n-    )\n") == "- start, )"


def test_reasons_are_found_by_function_and_change() -> None:
    found = reasons('["it is the same"]\n"strop.algos.kl.estimate" = ["a", "b"]\n')
    assert found == {
        ("strop.algos.kl.estimate", "a"): "it is the same",
        ("strop.algos.kl.estimate", "b"): "it is the same",
    }


def test_a_survivor_with_a_reason_still_counts_as_one() -> None:
    rows = [row.split() for row in table(parse(OUTPUT.splitlines()), {"strop.algos.kl.x_estimate__mutmut_10"})]
    assert rows[1:] == [
        ["strop/algos/kl.py", "2", "1", "50.0%", "1", "0"],
        ["strop/algos/losses.py", "3", "1", "33.3%", "0", "2"],
        ["all", "5", "2", "40.0%", "1", "2"],
    ]


def test_survivors_are_written_with_their_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasons.toml").write_text(
        '["it is the same"]\n"strop.algos.kl.estimate" = ["y = 3"]\n"strop.algos.kl.gone" = ["y = 4"]\n'
        '"strop.ops.head.of_another_suite" = ["y = 5"]\n'
    )
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "reasons.toml")
    monkeypatch.setattr(Suite, "mutmut", lambda *arguments, quiet: "-y = 2\n+y = 3\n")
    suite = Suite("mutmut", tmp_path, 0.9)
    suite.survivors.parent.mkdir()
    found = parse(OUTPUT.splitlines())
    explained, stale = mutants.explain(suite, found)
    assert explained == {"strop.algos.kl.x_estimate__mutmut_10"}
    assert stale == ["strop.algos.kl.gone: y = 4"]
    written = suite.survivors.read_text()
    assert written.count("it is the same") == 1 and written.count("no reason is known") == 2
    assert Mutant("strop.algos.kl.x__k3__mutmut_2", "killed").name not in written


def test_tests_of_single_cases_go_first(request: pytest.FixtureRequest) -> None:
    def single() -> None: ...

    @given(st.integers())
    def many(number: int) -> None: ...

    items: list[pytest.Item] = [
        pytest.Function.from_parent(request.node.parent, name=f"{call.__name__}{n}", callobj=call)
        for n, call in enumerate((many, single, many, single))
    ]
    first_failure.pytest_collection_modifyitems(items)
    assert [item.name for item in items] == ["single1", "single3", "many0", "many2"]


def test_the_listed_reasons_name_functions_that_exist() -> None:
    root = Path(__file__).parents[2]
    for function, _ in reasons((root / "tools" / "equivalent_mutants.toml").read_text()):
        path = root.joinpath(*function.split(".")[:3]).with_suffix(".py")
        assert f"def {function.rpartition('.')[2]}(" in path.read_text(), function


def test_a_suite_of_its_own_is_laid_out_from_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file that is mutated and every test that is chosen is there, through the links."""
    monkeypatch.chdir(Path(__file__).parents[2])
    suite = replace(HEAD, folder=tmp_path / "head")
    for _ in range(2):
        suite.lay_out()
    table = tomllib.loads((suite.folder / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert table == tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut-head"]
    for path in [*table["only_mutate"], *table["pytest_add_cli_args_test_selection"]]:
        assert (suite.folder / path).exists(), path
