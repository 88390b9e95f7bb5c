"""One vLLM host and the wire to it: messages go out, answers come back to whoever asked.

A thread reads; so answers reach any event loop, and code that has none.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.config.vllm import VllmConfig
from strop.environment import child_environment
from strop.errors import ConfigError, RolloutError
from strop.rollout.router import SamplerLost
from strop.rollout.vllm_host.frames import FrameError, Message, pack, proof, proves, read

HOST = Path(__file__).parent / "vllm_host" / "serve_vllm.py"
LOG_TAIL = 2000  # characters of the host's own output that an error shows
_NAMED_ERROR = re.compile(r"\b\w+(Error|Exception): ")
Handler = Callable[[Message | RolloutError], None]

log = logging.getLogger(__name__)


class Link:
    """A connection; `child` is the host's process when it was started here."""

    def __init__(self, wire: socket.socket, child: Child | None) -> None:
        self._wire, self._child = wire, child
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._handlers: dict[int, Handler] = {}
        self._next = 0
        self._lost: SamplerLost | None = None
        threading.Thread(target=self._read, name="vllm", daemon=True).start()

    def ask(self, message: Message, body: bytes = b"") -> Future[Message]:
        """The answer to come: RolloutError where the host refused, SamplerLost when it is gone."""
        answer: Future[Message] = Future()
        answer.set_running_or_notify_cancel()  # nobody can cancel what was sent

        def take(reply: Message | RolloutError) -> None:
            if isinstance(reply, RolloutError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

        self.tell(message, take, body)
        return answer

    def tell(self, message: Message, handler: Handler | None = None, body: bytes = b"") -> int:
        """Send; `handler` is called from the reading thread with each reply until the last. Returns its number."""
        with self._lock:
            number, lost = self._next, self._lost
            self._next += 1
            if handler is not None and lost is None:
                self._handlers[number] = handler
        if lost is not None:
            raise SamplerLost(str(lost))
        try:
            with self._sending:
                self._wire.sendall(pack({"id": number, **message}, len(body)))
                if body:
                    self._wire.sendall(body)
        except OSError as error:
            self._lose(str(error))
        return number

    def abandon(self, number: int, recorded: bool = False) -> None:
        """Stop a request whose answer nobody waits for any more. With `recorded` the host keeps something of it even
        when it has ended, which goes too."""
        with self._lock:
            known = self._handlers.pop(number, None)
        if (known is not None or recorded) and self._lost is None:
            self.tell({"op": "abort", "of": number})

    def close(self) -> None:
        """Hang up: the host ends by itself."""
        self._lose("it was closed")
        if self._child is not None:
            self._child.end()

    def _read(self) -> None:
        try:
            while True:
                message = read(lambda count: receive(self._wire, count))
                number = int(message["id"])
                with self._lock:
                    ends = message["last"] or "error" in message
                    handler = self._handlers.pop(number, None) if ends else self._handlers.get(number)
                if handler is not None:
                    error = message.get("error")
                    handler(message if error is None else RolloutError(f"vLLM refused: {error}"))
        except (OSError, EOFError, FrameError) as error:
            if self._lose(str(error) or type(error).__name__) and self._child is not None:
                self._child.end(0.0)  # what it had started may live on

    def _lose(self, why: str) -> bool:
        """Fail all that waits; false when that was done before."""
        with self._lock:
            if self._lost is not None:
                return False
            said = "" if self._child is None else self._child.last_words()
            self._lost = SamplerLost(f"the vLLM host is gone: {why}{said}")
            handlers, self._handlers = list(self._handlers.values()), {}
        with suppress(OSError):  # it hung up first
            self._wire.shutdown(socket.SHUT_RDWR)  # a close alone would not wake the thread that reads
        self._wire.close()
        for handler in handlers:
            handler(SamplerLost(str(self._lost)))
        return True


class Child:
    """A host started here, in a process group of its own, with what it says kept in a file."""

    def __init__(self, python: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="strop-vllm-")
        self.socket = Path(self._folder.name) / "host"
        self.key = secrets.token_hex(32).encode()
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as out:
            try:
                self.process = subprocess.Popen(
                    # -E: what PYTHONPATH means for strop must not shadow that environment's packages
                    [str(Path(python).expanduser()), "-E", str(HOST), "--socket", str(self.socket)],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=child_environment({"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}),
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"sampler.vllm.python {python} cannot be run: {error}") from error
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # one that ended at once is found by `check`
            pipe.write(self.key + b"\n")

    def check(self) -> None:
        """RolloutError when the process has ended."""
        if self.process.poll() is not None:
            raise RolloutError(
                f"the vLLM host ended with status {self.process.returncode} before it was ready{self.last_words()}"
            )

    def last_words(self) -> str:
        """The first error that it wrote, which is the cause, and how its output ends."""
        text = self._log.read_text("utf-8", errors="replace").strip() if self._log.exists() else ""
        first = next((line.strip() for line in text.splitlines() if _NAMED_ERROR.search(line)), "")
        return "".join(
            [f"; it said: {first}" if first else "", f"; its last words:\n{text[-LOG_TAIL:]}" if text else ""]
        )

    def end(self, patience_s: float = 20.0) -> None:
        """Wait for it, then stop it and the processes that it started."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            log.warning("the vLLM host did not end within %g s and is killed", patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()


def connect(config: VllmConfig) -> Link:
    """Start or reach a host, prove the key, and check its proof. ConfigError and RolloutError say what is missing."""
    if bool(config.python) == bool(config.address):
        raise ConfigError("sampler.kind vllm needs sampler.vllm.python, or sampler.vllm.address, and not both")
    child, deadline = None, time.monotonic() + config.start_timeout_s
    if config.address:
        if not config.key_file:
            raise ConfigError("sampler.vllm.address needs sampler.vllm.key_file, whose text the host knows too")
        key = Path(config.key_file).expanduser().read_text("utf-8").strip().encode()
        host, _, port = config.address.rpartition(":")
        where: Any = (host, int(port))
    else:
        child = Child(config.python)
        key, where = child.key, str(child.socket)
    try:
        wire = _reach(where, child, deadline)
        _prove(wire, key)
    except (RolloutError, FrameError, OSError, EOFError) as error:
        if child is not None:
            child.end(0.0)
        raise RolloutError(f"no vLLM host at {where}: {error or type(error).__name__}") from error
    wire.settimeout(None)
    return Link(wire, child)


def _reach(where: Any, child: Child | None, deadline: float) -> socket.socket:
    while True:
        wire = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET, socket.SOCK_STREAM)
        try:
            wire.settimeout(max(deadline - time.monotonic(), 0.1))
            wire.connect(where)
            return wire
        except (FileNotFoundError, ConnectionRefusedError) as error:
            wire.close()
            if child is not None:
                child.check()
            if time.monotonic() > deadline:
                raise RolloutError(f"it did not answer in time: {error}; see sampler.vllm.start_timeout_s") from error
            time.sleep(0.1)


def _prove(wire: socket.socket, key: bytes) -> None:
    """Both ends answer the other's nonce."""
    first, nonce = read(lambda count: receive(wire, count)), secrets.token_hex(16)
    wire.sendall(pack({"proof": proof(key, "strop", str(first["nonce"])), "nonce": nonce}))
    reply = read(lambda count: receive(wire, count))
    if not proves(reply.get("proof"), key, "host", nonce):
        raise RolloutError(f"the keys of sampler.vllm.key_file differ: {reply.get('error', 'its proof is wrong')}")


def receive(wire: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes; EOFError when the other end hangs up before."""
    parts: list[bytes] = []
    while count:
        part = wire.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("it hung up")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
