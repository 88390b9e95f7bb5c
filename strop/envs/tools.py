"""An environment of many turns: calls in a reply are run and their results are the next messages; a reply without calls
is the answer, and is scored.

What a model gets wrong goes back to it as text: broken calls, unknown tools, wrong arguments, a tool's own ToolError.
What is wrong with a tool itself, any other exception, fails the episode, and failures are counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from strop.data.tasks import Task
from strop.envs.base import EnvStep
from strop.envs.rewards.score import Reward, score_reply
from strop.tokens.parse import BadCall, ToolCall, parse_tool_calls
from strop.tokens.text import Side, cut
from strop.types import Message

Tool = Callable[..., object | Awaitable[object]]

RESULT_CHARACTERS = 4000  # of one result, for the model to read

_PROMPT = """You can call these tools:

{tools}

To call one, write a line of this form, as often as you need; the results come in the next message:
<tool_call>{{"name": "the tool", "arguments": {{"argument": "value"}}}}</tool_call>
A reply without a call is your answer."""


class ToolError(Exception):
    """Raised by a tool to tell the model what went wrong; the text of it is the call's result."""


class ToolEnv:
    """Plays `task` with `tools`, functions by their names, plain or async; `reward` scores the reply without calls.

    Subclass it with a constructor that takes a task alone, and name the class in `tasks.env`.
    """

    def __init__(self, task: Task, tools: Mapping[str, Tool], reward: Reward) -> None:
        self.task = task
        self.tools = tools
        self.reward = reward

    async def start(self) -> list[Message]:
        """The task's messages, the tools described in its system message."""
        described = "\n".join(f"{name}{inspect.signature(tool)}: {_summary(tool)}" for name, tool in self.tools.items())
        prompt = _PROMPT.format(tools=described)
        messages = self.task.messages
        if messages and messages[0].get("role") == "system":
            prompt = f"{messages[0].get('content', '')}\n\n{prompt}"
            messages = messages[1:]
        return [Message(role="system", content=prompt), *messages]

    async def step(self, reply: Message) -> EnvStep:
        text = reply.get("content", "")
        calls = parse_tool_calls(text)
        if not calls:
            score = await score_reply(self.reward, self.task, text)
            return EnvStep(reward=score.value, done=True, rewards=score.parts)
        messages = [await self._answer(call) for call in calls]
        bad = sum(isinstance(call, BadCall) for call in calls)
        return EnvStep(done=False, messages=messages, rewards={"calls": float(len(calls)), "bad_calls": float(bad)})

    async def _answer(self, call: ToolCall | BadCall) -> Message:
        if isinstance(call, BadCall):
            return Message(role="tool", content=f"error: {call.problem}")
        result = cut(await self._result(call), RESULT_CHARACTERS, Side.RIGHT)
        return Message(role="tool", name=call.name, content=result)

    async def _result(self, call: ToolCall) -> str:
        if call.name not in self.tools:
            return f"error: there is no tool {call.name!r:.60}; there are {', '.join(self.tools)}"
        tool = self.tools[call.name]
        arguments: dict[str, Any] = call.arguments
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return f"error: {call.name}{inspect.signature(tool)}: {error}"
        try:
            result = tool(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except ToolError as error:
            return f"error: {error}"
        return str(result)


def _summary(tool: Tool) -> str:
    """The first paragraph of a tool's docstring, on one line."""
    return " ".join((inspect.getdoc(tool) or "").partition("\n\n")[0].split())
