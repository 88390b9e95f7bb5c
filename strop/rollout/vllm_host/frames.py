"""What strop and a vLLM host say to each other: a JSON message, and bytes beside it where weights travel.

    4 bytes: length of the message | 8 bytes: length of the body | the message, UTF-8 JSON | the body

Both ends prove that they know a key before anything else is said, without sending it: each answers the other's nonce.
Nothing that arrives is ever run. This file is read by two Pythons: standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
HEAD = struct.Struct("!IQ")
MESSAGE_BYTES = 256 << 20  # at the most: beyond it the other end speaks something else


class FrameError(Exception):
    """The other end is no vLLM host, or no strop, of this version."""


def pack(message: Message, body_length: int = 0) -> bytes:
    """A frame without its body, which follows it."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(text), body_length) + text


def unpack_head(head: bytes) -> tuple[int, int]:
    """Lengths of the message and of the body."""
    length, body_length = HEAD.unpack(head)
    if length > MESSAGE_BYTES:
        raise FrameError(f"a message of {length} bytes: the other end speaks another protocol")
    return length, body_length


def unpack(text: bytes) -> Message:
    message = json.loads(text)
    if not isinstance(message, dict):
        raise FrameError(f"a message that is no object: {text[:80]!r}")
    return message


def read(receive: Callable[[int], bytes]) -> Message:
    """The next message of an end that sends no bodies; `receive` gives exactly as many bytes as it is asked for."""
    length, body_length = unpack_head(receive(HEAD.size))
    if body_length:
        raise FrameError(f"a body of {body_length} bytes that nobody asked for")
    return unpack(receive(length))


def proof(key: bytes, who: str, nonce: str) -> str:
    """What only an end that knows the key can answer to a nonce."""
    return hmac.new(key, f"{who}:{nonce}".encode(), hashlib.sha256).hexdigest()


def proves(answer: object, key: bytes, who: str, nonce: str) -> bool:
    return isinstance(answer, str) and hmac.compare_digest(answer, proof(key, who, nonce))
