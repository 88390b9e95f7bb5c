"""Mathematical equality in a process of its own: F04, F08-F10, F13."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sympy

from strop.config.recipe import TasksConfig
from strop.data.tasks import Task
from strop.envs.build import make_reward
from strop.envs.rewards import math
from strop.envs.rewards.math import MathReward
from strop.envs.rewards.math_worker import same_function, same_number
from strop.envs.rewards.score import Invalid
from strop.errors import ConfigError, DataError

# Workers that stand for the real one: ready at once; then equal when the texts are; "hang" hangs, "die" dies.
PRELUDE = "import json, sys, time\nprint('{}', flush=True)\nfor line in sys.stdin:\n    q = json.loads(line)\n"
TOY = (
    sys.executable,
    "-c",
    PRELUDE
    + "    while q['said'] == 'hang': time.sleep(1)\n"
    + "    if q['said'] == 'die': sys.exit(3)\n"
    + "    bad = {'?': 'said', '!': 'right'}.get(q['said'])\n"
    + "    print(json.dumps({'unreadable': bad} if bad else {'equal': q['right'] == q['said']}), flush=True)\n",
)


def task(answer: str | None = "4") -> Task:
    return Task(id="t", messages=[], answer=answer, source="test", meta={})


def test_verdicts_of_the_worker() -> None:
    """F08: from any thread, right is 1 and wrong is 0; unreadable is Invalid, or an error if it is the task's."""
    reward = MathReward(limit_s=20.0, command=TOY)

    async def main() -> None:
        assert await asyncio.gather(*(reward(task(), said) for said in ("4", "5", "Answer: 4."))) == [1.0, 0.0, 1.0]
        assert isinstance(await reward(task(), "?"), Invalid)
        assert isinstance(await reward(task(), "two\nlines"), Invalid)
        assert isinstance(await reward(task(), "4" * 501), Invalid)
        with pytest.raises(DataError, match="task t: its answer '4' cannot be read"):
            await reward(task(), "!")
        with pytest.raises(DataError, match="marks no final answer"):
            await reward(task("two\nlines"), "4")

    asyncio.run(main())


def test_a_comparison_that_hangs_is_killed_and_the_next_one_runs() -> None:
    """F08, F09: late is Invalid and counted; so is a worker that dies. The reward goes on with another."""
    reward = MathReward(limit_s=0.5, command=TOY)

    async def main() -> None:
        hung = await reward(task(), "hang")
        assert hung == Invalid("no verdict in time")
        assert isinstance(await reward(task(), "die"), Invalid)

    asyncio.run(main())
    patient = MathReward(limit_s=20.0, command=TOY)
    patient._limit_s = 0.5
    first = patient._compare("4", "hang")
    assert first == {"late": True} and patient._worker is None
    patient._limit_s = 20.0
    assert patient._compare("4", "4") == {"equal": True}


def test_a_worker_that_does_not_start_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not start: run it to see why"):
        MathReward(command=(sys.executable, "-c", "raise SystemExit(1)"))._compare("1", "1")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        make_reward(TasksConfig(source="jsonl", path="x", reward="math"), base=Path())


X, N = sympy.symbols("x n")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (sympy.Rational(1, 2**99), sympy.Rational(1, 2**98), False),  # F04: tiny is not equal
        (sympy.Integer(2) ** 98, sympy.Integer(2) ** 98 + 1, False),
        (sympy.Pow(2, 98, evaluate=False), sympy.Pow(2, 98, evaluate=False), True),
        (sympy.Float("0.5"), sympy.Rational(1, 2), True),
        (sympy.sqrt(2), sympy.Float("1.414214"), True),
        (sympy.pi, sympy.Float("3.14"), False),
        (sympy.Integer(0), sympy.Integer(0), True),
        (sympy.Integer(0), sympy.Float("1e-30"), False),
        (sympy.I, sympy.sqrt(-1), True),
        (sympy.zoo, sympy.Integer(1), None),
    ],
)
def test_numbers_by_relative_size(a: sympy.Expr, b: sympy.Expr, same: bool | None) -> None:
    assert same_number(a, b) is same


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (sympy.sqrt(1 / N), 1 / sympy.sqrt(N), True),  # F04: equal wherever both are real
        ((X + 1) ** 2, X**2 + 2 * X + 1, True),
        (sympy.Abs(X), X, False),
        (sympy.sqrt(X), X, False),
        (X / 10**12, 2 * X / 10**12, False),
        (X + N, N + X, True),
        (X - N, N - X, False),
        (X, N, None),
        (sympy.log(-(X**2)), sympy.log(-(X**2)), None),  # real nowhere
    ],
)
def test_functions_where_both_are_real(a: sympy.Expr, b: sympy.Expr, same: bool | None) -> None:
    assert same_function(a, b) is same


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is an optional package and is not installed")
def test_the_real_worker() -> None:
    """F04: pairs that math-verify alone gets wrong, and forms of the same answer."""
    reward = MathReward()
    rows = [
        ("1-\\frac{1}{\\mathrm{e}}", "1+\\frac{1}{\\mathrm{e}}", 0.0),
        ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}", 0.0),
        ("3*x-1*y+13=0", "3x + 4y + 14=0", 0.0),
        ("\\sqrt{1/n}", "\\frac1{\\sqrt n}", 1.0),
        ("2^{98}", "2^{99}", 0.0),
        ("0.5", "\\frac12", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("(1,2)", "(1, 2)", 1.0),
        ("[0,1)", "[0,1]", 0.0),
        ("42", "**Answer:** 42", 1.0),
        ("\\frac12", "Answer: 1/2", 1.0),
        ("5", "Answer: \\boxed{5}", 1.0),
    ]

    async def main() -> None:
        for right, said, value in rows:
            assert await reward(task(right), said) == value, (right, said)
        assert isinstance(await reward(task("4"), "4\\sqrt(2)"), Invalid)
        assert isinstance(await reward(task("4"), "\\sqrt"), Invalid)
        reward._limit_s = 1.0
        assert await reward(task("3"), "9^{9^{9^{9}}}") == Invalid("no verdict in time")
        reward._limit_s = 30.0
        assert await reward(task("3"), "3") == 1.0

    asyncio.run(main())
