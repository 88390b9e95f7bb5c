"""A version to all sampler actors by way of a folder, for machines that share a disk and no fast network.

    tensors -> files in a hidden folder -> renamed when whole -> each actor reads it, checks it, serves it -> the one
    before is deleted

A folder holds one version: safetensors files, and `entries.json` with each tensor's name, shape, format, checksum and
file. Nothing that is in it is ever executed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.errors import EngineError
from strop.rollout.router import SamplerLost
from strop.rollout.transfer import Entry, Incoming, cast, entry_of, shards

FILE_BYTES = 1 << 30
ENTRIES = "entries.json"
_NAME = "{:06}-version-{}"
_PARTIAL = ".partial-"  # being written; rubbish after a kill


def write_version(weights: Iterable[tuple[str, Tensor]], folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write all of them, and only then give the folder its name. EngineError, and nothing left, when the disk refuses;
    what `weights` raises too."""
    partial = folder.with_name(_PARTIAL + folder.name)
    entries: dict[str, list[dict[str, object]]] = {}
    try:
        partial.mkdir(parents=True)
        for number, tensors in enumerate(shards(weights, file_bytes), 1):
            name = f"weights-{number:05}.safetensors"
            save_file(tensors, partial / name)
            entries[name] = [asdict(entry_of(n, tensor)) for n, tensor in tensors.items()]
        (partial / ENTRIES).write_text(json.dumps(entries), "utf-8")
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"a version of the weights cannot be written to {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # moved away when all went well


def read_version(folder: Path, version: int) -> dict[str, Tensor]:
    """The tensors of a folder, each checked. EngineError when one is missing, or is not what was written."""
    incoming, count = Incoming(version), 0
    try:
        entries: dict[str, list[dict[str, object]]] = json.loads((folder / ENTRIES).read_text("utf-8"))
        for name, described in entries.items():
            tensors = load_file(folder / name)
            for one in described:
                entry = _entry(one)
                if entry.name not in tensors:
                    raise EngineError(f"{folder / name} lacks weight {entry.name}")
                incoming.put([(entry, tensors[entry.name])])
                count += 1
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise EngineError(
            f"version {version} cannot be read from {folder}: {error}. With sampler.publish disk every machine needs "
            "the run's folder under the same path"
        ) from error
    return incoming.end(count)


class Reader(Protocol):
    """A sampler elsewhere that can be sent to a folder for its weights."""

    async def read(self, folder: Path, version: int) -> None:
        """Serve what is there. SamplerLost when its process is gone."""
        ...


class Disk:
    """Delivers to `samplers` by way of `folder`, where the newest version stays. `dtype` is what they compute in.

    What a run before has left in the folder is deleted at the first delivery.
    """

    def __init__(self, samplers: Sequence[Reader], folder: Path, dtype: torch.dtype | None = None) -> None:
        self._samplers = list(samplers)
        self._folder = folder
        self._dtype = dtype
        self._serial = 0

    async def deliver(
        self, weights: Iterable[tuple[str, Tensor]], version: int, among: Sequence[int]
    ) -> dict[int, SamplerLost]:
        """See `router.Courier`. A folder that could not be served is deleted again."""
        self._serial += 1
        if self._serial == 1:
            self._delete_but(None)
        folder = self._folder / _NAME.format(self._serial, version)
        await asyncio.to_thread(write_version, cast(weights, self._dtype), folder)
        reading = [self._samplers[i].read(folder, version) for i in among]
        found = await asyncio.gather(*reading, return_exceptions=True)
        lost = {i: error for i, error in zip(among, found, strict=True) if isinstance(error, SamplerLost)}
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, SamplerLost):
                shutil.rmtree(folder, ignore_errors=True)
                raise error
        self._delete_but(folder)
        return lost

    def _delete_but(self, kept: Path | None) -> None:
        for pattern in ("*-version-*", f"{_PARTIAL}*"):
            for old in self._folder.glob(pattern):
                if old != kept:
                    shutil.rmtree(old, ignore_errors=True)


def _entry(described: dict[str, object]) -> Entry:
    shape = described["shape"]
    assert isinstance(shape, list)
    return Entry(
        str(described["name"]), tuple(map(int, shape)), str(described["dtype"]), int(str(described["checksum"]))
    )
