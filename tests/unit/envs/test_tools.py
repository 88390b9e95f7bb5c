"""A tool-using episode: calls are run, mistakes go back to the model, a reply without calls is scored."""

from __future__ import annotations

import asyncio

import pytest

from strop.data.tasks import Task
from strop.envs.rewards.match import exact
from strop.envs.tools import RESULT_CHARACTERS, ToolEnv, ToolError
from strop.types import Message

TASK = Task(id="t", messages=[Message(role="user", content="17*3?")], answer="51", source="test", meta={})


def multiply(a: int, b: int) -> int:
    """Multiply two
    whole numbers.

    More that the model need not read.
    """
    return a * b


async def lookup(word: str) -> str:
    await asyncio.sleep(0)
    if word != "sum":
        raise ToolError(f"no entry {word}")
    return "x" * (RESULT_CHARACTERS + 7)


def broken() -> str:
    raise ZeroDivisionError("the tool's own fault")


def env() -> ToolEnv:
    return ToolEnv(TASK, {"multiply": multiply, "lookup": lookup, "broken": broken}, exact)


def step(text: str):
    return asyncio.run(env().step(Message(role="assistant", content=text)))


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_tools_are_described_in_the_system_message() -> None:
    first, second = asyncio.run(env().start())
    assert first.get("role") == "system" and second == TASK.messages[0]
    assert "multiply(a: 'int', b: 'int') -> 'int': Multiply two whole numbers.\n" in first.get("content", "")
    assert "More that" not in first.get("content", "")
    assert '<tool_call>{"name": "the tool", "arguments": {"argument": "value"}}</tool_call>' in first.get("content", "")
    own = Task(
        id="t", messages=[Message(role="system", content="Be brief."), *TASK.messages], answer="", source="", meta={}
    )
    merged = asyncio.run(ToolEnv(own, {"multiply": multiply}, exact).start())
    assert [m.get("role") for m in merged] == ["system", "user"]
    assert merged[0].get("content", "").startswith("Be brief.\n\nYou can call")


def test_calls_are_run_and_the_episode_goes_on() -> None:
    done = step("Let me see" + call('{"name": "multiply", "arguments": {"a": 17, "b": 3}}'))
    assert not done.done and done.reward == 0.0
    assert done.messages == [Message(role="tool", name="multiply", content="51")]
    assert done.rewards == {"calls": 1.0, "bad_calls": 0.0}


def test_a_reply_without_calls_is_scored() -> None:
    assert step("51").done and step("51").reward == 1.0
    assert step("It is 51").reward == 0.0


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ('{"name": "multiply"}', 'error: the call lacks "arguments"'),  # B16
        ('{"name": "multiply", "arguments": {"a": ', "error: the call is not valid JSON"),  # B16
        ('{"name": "divide", "arguments": {}}', "error: there is no tool 'divide'; there are multiply, lookup, broken"),
        ('{"name": "multiply", "arguments": {"a": 1}}', "error: multiply(a: 'int', b: 'int') -> 'int': missing"),
        ('{"name": "multiply", "arguments": {"a": 1, "b": 2, "c": 3}}', "got an unexpected keyword argument 'c'"),
        ('{"name": "lookup", "arguments": {"word": "q"}}', "error: no entry q"),
    ],
)
def test_mistakes_go_back_to_the_model(body: str, answer: str) -> None:
    done = step(call(body))
    assert not done.done and len(done.messages) == 1
    assert done.messages[0].get("role") == "tool" and answer in done.messages[0].get("content", "")


def test_one_bad_call_does_not_spoil_the_others() -> None:
    """B15"""
    done = step(call("{bad}") + call('{"name": "multiply", "arguments": {"a": 2, "b": 3}}'))
    assert [m.get("content", "")[:5] for m in done.messages] == ["error", "6"]
    assert done.rewards == {"calls": 2.0, "bad_calls": 1.0}


def test_long_results_are_cut() -> None:
    done = step(call('{"name": "lookup", "arguments": {"word": "sum"}}'))
    assert done.messages[0].get("content") == "x" * RESULT_CHARACTERS


def test_a_tools_own_fault_fails_the_episode() -> None:
    """It is not the model's mistake: the episode is counted as failed, never scored 0."""
    with pytest.raises(ZeroDivisionError):
        step(call('{"name": "broken", "arguments": {}}'))
