"""The child process of `MathReward`: questions as JSON lines in, verdicts as JSON lines out, until the input ends.

What math-verify alone would get wrong is guarded here: it may read only a fragment of a text that it does not
understand, takes tiny numbers for equal, and calls functions different that agree wherever both are defined.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import sympy

MEMORY_BYTES = 4 * 2**30
DIGITS = 30
TOLERANCE = 1e-6  # relative; a decimal answer is right to six digits

# Where functions are compared: points of both signs that make nothing special happen.
_POINTS = [sympy.Rational(p, q) for p, q in ((17, 7), (-29, 11), (5, 13), (-3, 19), (101, 23), (37, 31))]


def compare(right: str, said: str) -> dict[str, Any]:
    """{"equal": bool}, or {"unreadable": "right" or "said"} when one of them is not mathematics from end to end."""
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    parsed = {name: _parse(text) for name, text in (("right", right), ("said", said))}
    for name, value in parsed.items():
        if not value:
            return {"unreadable": name}
    a, b = parsed["right"][0], parsed["said"][0]
    equal = None
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        equal = same_function(a, b) if a.free_symbols | b.free_symbols else same_number(a, b)
    return {"equal": bool(verify(parsed["right"], parsed["said"], timeout_seconds=None)) if equal is None else equal}


def _parse(text: str) -> list[Any]:
    """The text as one formula, whole or not at all."""
    from math_verify import LatexExtractionConfig, parse  # pyright: ignore[reportMissingImports]

    formula = "$" + text.replace("\\mathrm{e}", "e").replace("$", "") + "$"
    found: list[Any] = parse(formula, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found


def same_number(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    """Equal, or within `TOLERANCE` of each other's size, however small both are; whole numbers must be equal.

    None where a value is not finite.
    """
    a, b = a.doit(), b.doit()
    if a.is_Integer and b.is_Integer:
        return bool(a == b)
    x, y = (sympy.N(value, DIGITS) for value in (a, b))
    if not (x.is_finite and y.is_finite):
        return None
    return bool(abs(x - y) <= TOLERANCE * max(abs(x), abs(y)))


def same_function(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    """Whether both agree at points where both are real; one real and one not is a difference.

    None when they have other symbols than each other, or are real at too few points to tell.
    """
    if a.free_symbols != b.free_symbols:
        return None
    symbols = sorted(a.free_symbols, key=str)
    agreed = 0
    for shift in range(len(_POINTS)):
        point = [(symbol, _POINTS[(shift + i) % len(_POINTS)]) for i, symbol in enumerate(symbols)]
        x, y = (sympy.N(value.subs(point), DIGITS) for value in (a, b))
        if bool(x.is_real) != bool(y.is_real):
            return False
        if x.is_real:
            if abs(x - y) > sympy.Float(10) ** (10 - DIGITS) * max(abs(x), abs(y)):
                return False
            agreed += 1
    return True if agreed >= 2 else None


def main() -> None:
    if sys.platform == "linux":  # elsewhere this limit is not kept, or not allowed
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import math_verify  # pyright: ignore[reportMissingImports]  # before the clock of the first question runs

    print(json.dumps({"ready": math_verify.__name__}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(compare(question["right"], question["said"])), flush=True)


if __name__ == "__main__":
    main()
