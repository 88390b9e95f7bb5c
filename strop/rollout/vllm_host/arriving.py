"""Weights on their way into a vLLM host: bytes are checked as they come, kept in safetensors files, and used at the
end.

    entries and bytes, or changes of bytes that are here -> checksums -> files -> the worker, when all are there

Bytes are never tensors here, so that every format is as easy as every other.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class WeightsRefused(ValueError):
    """What arrived is not what was announced; what is served stays as it is."""


class Arriving:
    """One version on its way; `held` is the one that changes are relative to, and stays as it is."""

    def __init__(self, version: int, folder: Path, *, serial: int = 0, held: Arriving | None = None) -> None:
        self.version = version
        self.serial = serial
        self.files: list[Path] = []
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._held = held
        self._places: dict[str, tuple[Path, int, int]] = {}  # where the bytes of each weight are: file, from, how many

    def put(self, entries: list[dict[str, Any]], body: bytes) -> None:
        """Take a bucket: [{name, shape, dtype, checksum, length}] and its tensors' bytes, one after the other; with
        `changed` in an entry, as many indices of elements (int64) and then their new bytes."""
        view, start, offset, header, contents = memoryview(body), 0, 0, {}, []
        for entry in entries:
            name, end = str(entry["name"]), start + int(entry["length"])
            if name in self._places:
                raise WeightsRefused(f"weight {name} of version {self.version} came twice")
            if entry["dtype"] not in CODES:
                raise WeightsRefused(f"weight {name} is {entry['dtype']}, which safetensors does not know")
            content = view[start:end] if "changed" not in entry else self._changed(entry, view[start:end])
            found = zlib.crc32(content)
            if end > len(view) or found != entry["checksum"]:
                raise WeightsRefused(f"weight {name} of version {self.version} arrived as checksum {found}, sent as "
                                     f"{entry['checksum']}")  # fmt: skip
            offsets = [offset, offset + len(content)]
            header[name] = {"dtype": CODES[entry["dtype"]], "shape": entry["shape"], "data_offsets": offsets}
            contents.append(content)
            start, offset = end, offsets[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = self._folder / f"{len(self.files)}.safetensors"
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.writelines(contents)
        self.files.append(file)
        for name, told in header.items():
            first, last = told["data_offsets"]
            self._places[name] = (file, 8 + len(text) + first, last - first)

    def bytes_of(self, name: str) -> bytearray:
        file, start, length = self._places[name]
        with file.open("rb") as opened:
            opened.seek(start)
            return bytearray(opened.read(length))

    def _changed(self, entry: dict[str, Any], content: memoryview) -> bytearray:
        """What is held of a weight, with the changed elements."""
        name, count = str(entry["name"]), int(entry["changed"])
        if self._held is None or name not in self._held._places:
            raise WeightsRefused(f"changes of weight {name} came for version {self.version}, which is not here")
        whole = self._held.bytes_of(name)
        if count:
            width = len(content) // count - 8
            indices = np.frombuffer(content, np.int64, count)
            values = np.frombuffer(content, np.uint8, count * width, offset=8 * count).reshape(count, width)
            if width < 1 or indices.min() < 0 or indices.max() >= len(whole) // width:
                raise WeightsRefused(f"changes of weight {name} are not of its {len(whole)} bytes")
            np.frombuffer(whole, np.uint8).reshape(-1, width)[indices] = values
        return whole

    def check(self, count: int) -> None:
        if len(self._places) != count:
            raise WeightsRefused(
                f"version {self.version}: {len(self._places)} weights arrived of the {count} that were sent"
            )

    def done(self) -> None:
        """It is all there: what it was relative to is not needed any more."""
        self._held = None

    def drop(self) -> None:
        shutil.rmtree(self._folder)
