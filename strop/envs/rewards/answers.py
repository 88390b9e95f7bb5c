"""Reading the final answer out of a reply, without ever raising and in one pass: numbers, boxes, answer lines."""

from __future__ import annotations

import re
from fractions import Fraction

# A sign counts only where nothing stands before it that it could be subtracted from. Commas group thousands only.
_NUMBER = re.compile(
    r"(?<![\w.^])"
    r"(?P<sign>(?<![\w)\]}])[-+])?"
    r"\$?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)?(?P<decimals>\.\d+)?"
    r"(?(digits)|(?(decimals)|(?!)))"
    r"(?P<exponent>[eE][-+]?\d{1,3})?(?!\d|[eE][-+]?\d)"
    r"(?:/(?P<below>\d+))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_BRACES = re.compile(r"\\boxed\s?\{|\\[{}]|[{}]")
_MAX_DIGITS = 400  # a longer number is no answer, and arithmetic on it takes time
_MARKER = re.compile(r"(?:####|\banswer\s*(?:is)?\s*[:=]|\banswer\s+is\b)", re.IGNORECASE)


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text, exactly: 1,234 and $42. and -3 and 1e-1 and 3/4 and \\frac{3}{4}."""
    plain = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\$", "$")
    plain = _FRACTION.sub(r" \1/\2 ", plain)
    found = list(_NUMBER.finditer(plain))
    return _value(found[-1]) if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MAX_DIGITS:
        return None
    digits = (match["digits"] or "0").replace(",", "")
    value = Fraction(f"{digits}{match['decimals'] or ''}{match['exponent'] or ''}")
    below = match["below"]
    if below is not None:
        if int(below) == 0:
            return None
        value /= int(below)
    return -value if match["sign"] == "-" else value


def boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...} of a text, braces balanced; None when there is none."""
    found: tuple[int, int] | None = None
    opened: list[int] = []  # where the inside of each open box begins; -1 for other braces
    for mark in _BRACES.finditer(text):
        if mark[0].startswith("\\boxed"):
            opened.append(mark.end())
        elif mark[0] == "{":
            opened.append(-1)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            if found is None or start > found[0]:
                found = (start, mark.start()) if start >= 0 else found
    return None if found is None else text[found[0] : found[1]].strip()


def final_answer(text: str) -> str | None:
    """A reply's answer as it is written: the last box, else what follows "Answer:" or "####", else the one line.

    None when a reply of several lines marks none.
    """
    inside = boxed(text)
    if inside is not None:
        return inside or None
    marks = list(_MARKER.finditer(text))
    line = text[marks[-1].end() :].strip().split("\n", 1)[0] if marks else text.strip()
    if "\n" in line:
        return None
    return line.strip(" *_`").removesuffix(".").strip(" *_`$") or None
