"""Mathematical answers compared as mathematics: x^2+2x+1 is (x+1)^2, and 0.5 is 1/2. Needs math-verify.

    reply -> its final answer -> a process of its own, with a time limit -> equal, different, or unreadable

The comparison runs symbolic algebra on text that a model wrote: it can take for ever, and its libraries stop it with an
alarm signal, which works on a main thread only. So it runs in a child process that is killed when it is late.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import IO, Any, cast

from strop.data.tasks import Task
from strop.envs.rewards.answers import final_answer
from strop.envs.rewards.match import expected
from strop.envs.rewards.score import Invalid
from strop.errors import ConfigError, DataError

START_S = 60.0  # to import symbolic algebra
LIMIT_S = 5.0  # for one comparison
MAX_CHARACTERS = 500  # in a final answer

_WORKER = (sys.executable, "-m", "strop.envs.rewards.math_worker")


class MathReward:
    """1 when the reply's final answer equals the task's, 0 when it differs.

    `Invalid` when the reply marks no answer, when that is no mathematics, or when the comparison takes more than
    `limit_s` seconds. Raises ConfigError when math-verify is not installed; a call raises DataError when the task's own
    answer cannot be read.
    """

    def __init__(self, limit_s: float = LIMIT_S, command: tuple[str, ...] = _WORKER) -> None:
        if command == _WORKER and find_spec("math_verify") is None:
            raise ConfigError("tasks.reward math needs a package that is not here: pip install math-verify")
        self._limit_s = limit_s
        self._command = command
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    async def __call__(self, task: Task, reply: str) -> float | Invalid:
        right = final_answer(expected(task))
        said = final_answer(reply)
        if right is None:
            raise DataError(f"task {task.id}: its answer {expected(task)!r:.60} marks no final answer")
        if said is None or len(said) > MAX_CHARACTERS:
            return Invalid("no final answer")
        verdict = await asyncio.to_thread(self._compare, right, said)
        if "unreadable" in verdict:
            if verdict["unreadable"] == "right":
                raise DataError(f"task {task.id}: its answer {right!r:.60} cannot be read as mathematics")
            return Invalid("no mathematics")
        return Invalid("no verdict in time") if "late" in verdict else float(verdict["equal"])

    def _compare(self, right: str, said: str) -> dict[str, Any]:
        """Ask the worker, one question at a time. One that is late is killed; the next question starts another."""
        question = json.dumps({"right": right, "said": said}).encode() + b"\n"
        with self._lock:
            worker = self._worker
            if worker is None or worker.poll() is not None:
                worker = self._worker = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
                if _read_line(cast("IO[bytes]", worker.stdout), START_S) is None:
                    worker.kill()
                    raise ConfigError(f"{' '.join(self._command)} does not start: run it to see why")
            line = _ask(worker, question, self._limit_s)
            if line is None:
                worker.kill()
                worker.wait()
                self._worker = None
                return {"late": True}
        return cast("dict[str, Any]", json.loads(line))


def _ask(worker: subprocess.Popen[bytes], question: bytes, limit_s: float) -> bytes | None:
    stdin = cast("IO[bytes]", worker.stdin)
    try:
        stdin.write(question)
        stdin.flush()
    except BrokenPipeError:  # it ran out of memory, say
        return None
    return _read_line(cast("IO[bytes]", worker.stdout), limit_s)


def _read_line(stream: IO[bytes], limit_s: float) -> bytes | None:
    """The next line, or None when it does not come in time or the stream ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(limit_s):
            return None
    return stream.readline() or None
