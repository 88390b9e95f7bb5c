"""Weights on their way into a vLLM host: bytes are checked as they come, kept in safetensors files, and used at the
end.

    entries and bytes -> checksums -> files -> the worker, when all are there

Standard library only: bytes are never tensors here.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class WeightsRefused(ValueError):
    """What arrived is not what was announced; what is served stays as it is."""


class Arriving:
    """One version on its way."""

    def __init__(self, version: int, folder: Path) -> None:
        self.version = version
        self.files: list[Path] = []
        self._folder = folder
        self._names: set[str] = set()

    def put(self, entries: list[dict[str, Any]], body: bytes) -> None:
        """Take a bucket: [{name, shape, dtype, checksum, length}] and its tensors' bytes, one after the other."""
        view, start, header = memoryview(body), 0, {}
        for entry in entries:
            name, end = str(entry["name"]), start + int(entry["length"])
            found = zlib.crc32(view[start:end])
            if end > len(view) or found != entry["checksum"]:
                raise WeightsRefused(f"weight {name} of version {self.version} arrived as checksum {found}, sent as "
                                     f"{entry['checksum']}")  # fmt: skip
            if name in self._names:
                raise WeightsRefused(f"weight {name} of version {self.version} came twice")
            if entry["dtype"] not in CODES:
                raise WeightsRefused(f"weight {name} is {entry['dtype']}, which safetensors does not know")
            self._names.add(name)
            header[name] = {"dtype": CODES[entry["dtype"]], "shape": entry["shape"], "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = self._folder / f"{self.version}-{len(self.files)}.safetensors"
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.write(body)
        self.files.append(file)

    def check(self, count: int) -> None:
        if len(self._names) != count:
            raise WeightsRefused(
                f"version {self.version}: {len(self._names)} weights arrived of the {count} that were sent"
            )

    def drop(self) -> None:
        for file in self.files:
            file.unlink()
        self.files.clear()
