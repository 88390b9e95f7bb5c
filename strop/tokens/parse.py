"""What a reply says beside plain text: reasoning between think tags, and tool calls. Total: any text gives a result.

Nothing here backtracks or evaluates: tags are found by plain search, calls are JSON, and their number is capped, so the
time grows with the length of the text alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn, cast

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
MAX_CALLS = 32  # read in one reply


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """Something that began as a call and cannot be made; `problem` is worded for the model that wrote it."""

    problem: str


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """(reasoning, content) of a reply; None when it does not reason. `opened`: the prompt ended with the opening tag.

    Reasoning that was never closed is reasoning to its end, so an answer that was not reached is not read out of it.
    """
    before, tag, content = text.partition(CLOSE_THINK)
    opener = before.find(OPEN_THINK)
    if not tag and opener < 0 and not opened:
        return None, text
    if opener >= 0 and not opened and before[:opener].strip():
        # The tag stands inside an answer that is being written: that is text like any other.
        return None, text
    reasoning = before[opener + len(OPEN_THINK) :] if opener >= 0 else before
    return reasoning.strip("\n"), content.lstrip("\n")


def parse_tool_calls(text: str) -> list[ToolCall | BadCall]:
    """The calls in a reply, in order, in the form <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    One bad call does not spoil the others. Past `MAX_CALLS` the rest is one `BadCall`.
    """
    found: list[ToolCall | BadCall] = []
    at = text.find(OPEN_CALL)
    while at >= 0:
        if len(found) == MAX_CALLS:
            found.append(BadCall(f"only the first {MAX_CALLS} calls of a reply are read"))
            break
        call, end = _read_call(text, at + len(OPEN_CALL))
        found.append(call)
        at = text.find(OPEN_CALL, end)
    return found


def _read_call(text: str, start: int) -> tuple[ToolCall | BadCall, int]:
    """The call whose JSON begins at `start`, and where to read on: behind it, or right there if it is bad."""
    while text[start : start + 1].isspace():
        start += 1
    try:
        value, end = _JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return BadCall(f"the call is not valid JSON: {error.msg} at character {error.pos - start}"), start
    except RecursionError:
        return BadCall("the call is nested too deeply"), start
    except ValueError as error:
        return BadCall(f"the call is not valid JSON: {error}"), start
    while text[end : end + 1].isspace():
        end += 1
    if not text.startswith(CLOSE_CALL, end):
        return BadCall(f"{CLOSE_CALL} must follow the call's JSON"), end
    return _checked(value), end + len(CLOSE_CALL)


def _checked(value: object) -> ToolCall | BadCall:
    if not isinstance(value, dict):
        return BadCall('a call is an object: {"name": ..., "arguments": {...}}')
    fields = cast("dict[str, object]", value)
    missing = [key for key in ("name", "arguments") if key not in fields]
    if missing:
        return BadCall(f'the call lacks "{missing[0]}"')
    name, arguments = fields["name"], as_arguments(fields["arguments"])
    if not isinstance(name, str) or not name:
        return BadCall('"name" must be the name of a tool')
    if arguments is None:
        return BadCall('"arguments" must be an object')
    return ToolCall(name, arguments)


def as_arguments(value: object) -> dict[str, Any] | None:
    """Arguments given as an object or as its JSON text; None for anything else."""
    if isinstance(value, str):
        try:
            value = _JSON.decode(value)
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
