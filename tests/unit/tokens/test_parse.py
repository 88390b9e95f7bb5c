"""Tool calls and reasoning in replies: any text gives a result, and bad calls are words for the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tokens.parse import MAX_CALLS, BadCall, ToolCall, parse_tool_calls, split_reasoning


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


GOOD = call('\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n')


def test_calls_are_read_in_order_between_text() -> None:
    text = f"Let me see. {GOOD} and {call(json.dumps({'name': 'f', 'arguments': {}}))} done"
    assert parse_tool_calls(text) == [ToolCall("add", {"a": 1, "b": [2, 3]}), ToolCall("f", {})]
    assert parse_tool_calls("no calls, <b>only</b> text") == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name":"f"}', 'lacks "arguments"'),  # B16
        ('{"name":"f","arguments":{"a":', "not valid JSON: Expecting value at character"),  # B16
        ('{"arguments":{}}', 'lacks "name"'),
        ('{"name":"","arguments":{}}', '"name" must be'),
        ('{"name":7,"arguments":{}}', '"name" must be'),
        ('{"name":"f","arguments":[1]}', '"arguments" must be an object'),
        ('{"name":"f","arguments":"[1]"}', '"arguments" must be an object'),
        ('{"name":"f","arguments":null}', '"arguments" must be an object'),
        ('{"name":"f","arguments":{"x": NaN}}', "NaN is not a JSON number"),
        ('["f"]', "a call is an object"),
        ("f(1)", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name":"f","arguments":{}} and more', "</tool_call> must follow"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name":"f","arguments":{"n":' + "9" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_bad_calls_say_what_is_wrong(body: str, problem: str) -> None:
    """B16; B15: a good call behind a bad one is still made."""
    bad, good = parse_tool_calls(call(body) + GOOD)
    assert isinstance(bad, BadCall) and problem in bad.problem
    assert good == ToolCall("add", {"a": 1, "b": [2, 3]})


def test_a_call_that_was_cut_off_is_bad_and_the_next_one_is_not() -> None:
    """B15, B16"""
    text = '<tool_call>{"name": "f", "argum' + GOOD
    assert [type(found) for found in parse_tool_calls(text)] == [BadCall, ToolCall]
    assert [type(found) for found in parse_tool_calls(GOOD.removesuffix("</tool_call>"))] == [BadCall]


def test_arguments_may_be_json_text() -> None:
    """B17"""
    assert parse_tool_calls(call('{"name":"f","arguments":"{\\"a\\": 1}"}')) == [ToolCall("f", {"a": 1})]


def test_tags_inside_strings_are_strings() -> None:
    body = json.dumps({"name": "print", "arguments": {"text": "<tool_call>{}</tool_call>"}})
    assert parse_tool_calls(call(body)) == [ToolCall("print", {"text": "<tool_call>{}</tool_call>"})]


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    """K01: what looks like code stays a string; a list is a list."""
    canary = tmp_path / "canary"
    code = f"[open({str(canary)!r}, 'w')]"
    body = json.dumps({"name": "f", "arguments": {"code": code, "list": [1, 2, 3]}})
    assert parse_tool_calls(call(body)) == [ToolCall("f", {"code": code, "list": [1, 2, 3]})]
    assert not canary.exists()


@pytest.mark.parametrize(
    "text",
    [
        "<think>" + "<tool_call>" * 20_000,  # B18
        "<tool_call>{" * 20_000,
        '<tool_call>{"a":"' * 20_000,
        '<tool_call>{"' * 20_000,
        "<tool_call>" + " " * 200_000,
        ("<tool_call>" + "[" * 900) * 200,
        "</think>" * 50_000,
        "<think>" * 50_000,
    ],
    ids=range(8),
)
def test_hostile_text_is_read_a_bounded_number_of_times(text: str) -> None:
    """B18: each call reads the text once at the most, and the number of calls is capped."""
    found = parse_tool_calls(text)
    assert len(found) <= MAX_CALLS + 1 and all(isinstance(f, BadCall) for f in found)
    split_reasoning(text, opened=True)


def test_the_cap_is_told() -> None:
    found = parse_tool_calls(GOOD * (MAX_CALLS + 5))
    assert len(found) == MAX_CALLS + 1
    assert found[-1] == BadCall(f"only the first {MAX_CALLS} calls of a reply are read")
    assert len(parse_tool_calls(GOOD * MAX_CALLS)) == MAX_CALLS


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"f"', "{", "}", '"', "\\", " ", "é"]
        )
    )
)
def test_any_text_gives_a_result(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert isinstance(parse_tool_calls(text), list)
    reasoning, content = split_reasoning(text, opened=False)
    assert reasoning is not None or content == text


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("2+2=4\n</think>\n\n4", True, ("2+2=4", "4")),  # B07
        ("2+2=4\n</think>\n\n4", False, ("2+2=4", "4")),
        ("<think>\na\n</think>\n\nb", False, ("a", "b")),
        ("<think>\na\n</think>\n\nb", True, ("a", "b")),
        ("<think>cut off", False, ("cut off", "")),
        ("cut off", True, ("cut off", "")),
        ("plain", False, (None, "plain")),
        ("use <think> tags", False, (None, "use <think> tags")),
        ("use <think>x</think> tags", False, (None, "use <think>x</think> tags")),
        ("a</think>b</think>c", False, ("a", "b</think>c")),
        ("", False, (None, "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning(text: str, opened: bool, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text, opened=opened) == expected
