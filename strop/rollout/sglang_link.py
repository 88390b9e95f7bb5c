"""One sglang server and the way to it: JSON out, JSON in, over HTTP, a connection for each request.

    method, path, JSON -> status, JSON; or RolloutError with the status and what the server said; or SamplerLost

Nothing is kept between requests, so that any event loop can ask. Requests are never repeated here.
"""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from socket import socket
from typing import Any, cast

from strop.config.sglang import SglangConfig
from strop.errors import ConfigError, RolloutError
from strop.rollout.router import SamplerLost

EXCERPT = 500  # characters of an answer that an error shows
ANSWER_BYTES = 1 << 30  # of one answer at the most
_PART = 1 << 18

Json = dict[str, Any]


class Refused(RolloutError):
    """The server answered with a status that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Link:
    """Asks one server. Raises ConfigError when the key's file cannot be read."""

    def __init__(self, config: SglangConfig) -> None:
        self._scheme, self._host, self._port = config.place
        self._timeout_s = config.timeout_s
        self._tls = ssl.create_default_context() if self._scheme == "https" else None
        self._key = _read_key(config.key_file) if config.key_file else ""

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    async def get(self, path: str, timeout_s: float | None = None) -> Json:
        return self._parse("GET", path, await self._exchange("GET", path, b"", timeout_s))

    async def post(self, path: str, body: Json, timeout_s: float | None = None) -> Json:
        data = json.dumps(body, separators=(",", ":")).encode()
        return self._parse("POST", path, await self._exchange("POST", path, data, timeout_s))

    async def _exchange(self, method: str, path: str, body: bytes, timeout_s: float | None) -> bytes:
        """The body of a successful answer. Refused, with what it says, for another one."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                raw = await self._send(self._head(method, path, len(body)) + body)
        except TimeoutError as error:
            raise SamplerLost(f"the sglang server at {self} did not answer {path} within {limit_s:g} s") from error
        except OSError as error:
            raise SamplerLost(f"no sglang server at {self}: {error or type(error).__name__}") from error
        try:
            response = HTTPResponse(cast("socket", _Heard(raw)), method=method)
            response.begin()
            found = response.read()
        except (HTTPException, ValueError) as error:  # a status line or a length that is none, or less than it
            raise SamplerLost(
                f"the sglang server at {self} hung up in the middle of its answer to {path}: {error!r}"
            ) from error
        if not 200 <= response.status < 300:
            raise Refused(response.status, self._refusal(method, path, response.status, found))
        return found

    async def _send(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            writer.write(request)
            await writer.drain()
            answer = bytearray()
            while part := await reader.read(_PART):
                answer += part
                if len(answer) > ANSWER_BYTES:
                    raise RolloutError(f"the sglang server at {self} answered with more than {ANSWER_BYTES:,} bytes")
            return bytes(answer)
        finally:
            writer.close()  # a request that was given up ends at the server too, some seconds later
            with suppress(OSError):
                await writer.wait_closed()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            "Accept: application/json",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _parse(self, method: str, path: str, body: bytes) -> Json:
        """An answer's object; {} for an empty body, which some of the server's routes have."""
        if not body or body == b"null":
            return {}
        try:
            found = json.loads(body)
        except ValueError as error:
            raise RolloutError(f"{method} {path} at {self}: the answer is no JSON: {_excerpt(body)}") from error
        if not isinstance(found, dict):
            raise RolloutError(f"{method} {path} at {self}: the answer is no object: {_excerpt(body)}")
        return cast("Json", found)

    def _refusal(self, method: str, path: str, status: int, body: bytes) -> str:
        remedy = ""
        if status in (401, 403):
            remedy = "; give the server's key in sampler.sglang.key_file"
        elif status == 404:
            remedy = "; its sglang is too old, or something else listens there"
        return f"{method} {path} at {self} answered {status}: {_excerpt(body)}{remedy}"


class _Heard:
    """What an answer's parser takes for a socket."""

    def __init__(self, raw: bytes) -> None:
        self._file = io.BytesIO(raw)

    def makefile(self, _mode: str) -> io.BytesIO:
        return self._file


def _excerpt(body: bytes) -> str:
    text = body.decode("utf-8", errors="replace").strip()
    return (text[:EXCERPT] + " ..." if len(text) > EXCERPT else text) or "(nothing)"


def _read_key(path: str) -> str:
    try:
        key = Path(path).expanduser().read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"sampler.sglang.key_file {path} cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"sampler.sglang.key_file {path} must hold the key as one line of ASCII text")
    return key
