"""An opened GGUF file: its tensors, and its metadata through accessors that check what they give.

The gguf package's reader believes the lengths that a file states, so the header is walked here first: a length that
reaches past the end of the file is an error before anything is allocated for it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from strop.errors import ConfigError

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader

# Bytes of each scalar value type: unsigned and signed 8, 16, 32 bits, float32, bool, 64 bits, float64.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened GGUF file whose header was read to the end, and whose tensors all lie inside it."""

    path: Path
    reader: GGUFReader
    architecture: str

    @classmethod
    def read(cls, path: Path, supported: tuple[str, ...]) -> GGUFFile:
        try:
            import gguf
        except ImportError as error:
            raise ConfigError("reading a GGUF file needs a package that is not here: pip install gguf") from error
        if not path.is_file():
            raise ConfigError(f"{path} is not a file")
        _check_header(path)
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:  # slices past the end, and such
            raise ConfigError(f"{path} is cut off or damaged, it cannot be read as GGUF: {error}") from error
        file = cls(path, reader, "")
        architecture = str(file.value("general.architecture", str))
        if architecture not in supported:
            raise ConfigError(
                f"{path} holds a model of architecture {architecture!r}; supported are {', '.join(supported)}"
            )
        return cls(path, reader, architecture)

    def has(self, key: str) -> bool:
        return self._name(key) in self.reader.fields

    def _name(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)

    def value(self, key: str, kind: type) -> Any:
        """The metadata value under `key` ("{arch}" stands for the architecture), checked to be a `kind`."""
        name = self._name(key)
        if name not in self.reader.fields:
            raise ConfigError(f"{self.path} lacks {name} in its metadata")
        try:
            value = self.reader.fields[name].contents()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: {name} is not UTF-8 text") from error
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"{self.path}: {name} should be {kind.__name__}, and is {type(value).__name__} {value!r:.60}"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 and below 2^31."""
        if default is not None and not self.has(key):
            return default
        value = int(self.value(key, int))
        if not 0 < value < 2**31:
            raise ConfigError(f"{self.path}: {self._name(key)} is {value}, which is no size")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. Files hold float32; the shortest decimal that means the same is what was meant."""
        if default is not None and not self.has(key):
            return default
        value = float(str(np.float32(self.value(key, float))))
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{self.path}: {self._name(key)} is {value}, which must be finite and above 0")
        return value

    def token(self, name: str) -> int | None:
        """A special token's id, if the file names one."""
        key = f"tokenizer.ggml.{name}_token_id"
        if not self.has(key):
            return None
        value = int(self.value(key, int))
        size = len(self.value("tokenizer.ggml.tokens", list))
        if not 0 <= value < size:
            raise ConfigError(f"{self.path}: {key} is {value}, but the file has {size} tokens")
        return value

    def end_tokens(self) -> list[int]:
        """Ids that end a text or a turn, the first one first, none twice."""
        ids = [self.token("eos"), self.token("eot")]
        return list(dict.fromkeys(i for i in ids if i is not None))


def _check_header(path: Path) -> None:
    """Walk the metadata and the list of tensors; ConfigError where a stated length does not fit into the file."""
    with path.open("rb") as stream:
        magic = stream.read(4)
        if magic != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file: it begins with {magic!r} where b'GGUF' belongs")
        walk = _Walk(path, stream, path.stat().st_size)
        version = walk.number("<I")
        if version not in (2, 3):
            raise ConfigError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
        tensors, entries = walk.number("<Q"), walk.number("<Q")
        for _ in range(entries):
            walk.skip(walk.number("<Q"))
            walk.skip_value(walk.number("<I"))
        for _ in range(tensors):
            walk.skip(walk.number("<Q"))
            walk.skip(8 * walk.number("<I"))  # its shape
            walk.skip(12)  # its number format and its place


@dataclass(slots=True)
class _Walk:
    """A position in a file that cannot be moved past the end; every step moves forward, so that any walk ends."""

    path: Path
    stream: BinaryIO
    size: int

    def number(self, layout: str) -> int:
        count = struct.calcsize(layout)
        read = self.stream.read(count)
        if len(read) < count:
            raise self._cut_off()
        return int(struct.unpack(layout, read)[0])

    def skip(self, count: int) -> None:
        if count > self.size - self.stream.tell():
            raise self._cut_off()
        self.stream.seek(count, 1)

    def skip_value(self, kind: int) -> None:
        if kind in _SCALARS:
            self.skip(_SCALARS[kind])
        elif kind == _STRING:
            self.skip(self.number("<Q"))
        elif kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SCALARS:
                self.skip(_SCALARS[inner] * count)
            elif inner == _STRING:
                for _ in range(count):
                    self.skip(self.number("<Q"))
            else:
                raise ConfigError(
                    f"{self.path} is damaged: a list in its metadata has elements of unknown type {inner}"
                )
        else:
            raise ConfigError(f"{self.path} is damaged: its metadata has a value of unknown type {kind}")

    def _cut_off(self) -> ConfigError:
        place = self.stream.tell()
        return ConfigError(f"{self.path} is cut off or damaged: its header goes on past its end (near byte {place})")
