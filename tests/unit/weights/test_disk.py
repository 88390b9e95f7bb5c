"""Versions by way of a folder: whole or not there, checked when read, and only the newest is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.errors import EngineError
from strop.ops.checksum import checksum
from strop.rollout.router import SamplerLost
from strop.weights.disk import ENTRIES, Disk, read_version, write_version
from tests.ranks.test_broadcast import odd


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """Layouts, formats, empty tensors, NaNs with their bits, over several files: E03, E04, E12."""
    write_version(odd(), tmp_path / "v", file_bytes=64)
    found = read_version(tmp_path / "v", 1)
    assert [(n, t.dtype, t.shape, checksum(t)) for n, t in found.items()] == [
        (n, t.dtype, t.shape, checksum(t)) for n, t in odd()
    ]
    assert names(tmp_path) == ["v"] and len(names(tmp_path / "v")) > 2


def test_a_changed_byte_is_named(tmp_path: Path) -> None:
    write_version(odd(), tmp_path / "v")
    file = tmp_path / "v" / "weights-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(EngineError, match=r"weight .* of version 1 arrived as .*, sent as"):
        read_version(tmp_path / "v", 1)


def test_a_folder_that_is_not_whole_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"version 1 cannot be read from .*every machine needs"):
        read_version(tmp_path / "v", 1)
    write_version(odd(), tmp_path / "v")
    entries = json.loads((tmp_path / "v" / ENTRIES).read_text())
    entries["weights-00001.safetensors"].append(entries["weights-00001.safetensors"][0] | {"name": "more"})
    (tmp_path / "v" / ENTRIES).write_text(json.dumps(entries))
    with pytest.raises(EngineError, match="lacks weight more"):
        read_version(tmp_path / "v", 1)


def test_a_disk_that_refuses_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"cannot be written to .*/file/v"):
        write_version(odd(), tmp_path / "file" / "v")

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from odd()
        raise EngineError("the engine lost a weight")

    (tmp_path / "new").mkdir()
    with pytest.raises(EngineError, match="lost a weight"):
        write_version(broken(), tmp_path / "new" / "v", file_bytes=64)
    assert names(tmp_path / "new") == []


class Reads:
    """A sampler that notes what it has read."""

    def __init__(self) -> None:
        self.read_folders: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.fails: Exception | None = None

    async def read(self, folder: Path, version: int) -> None:
        self.read_folders.append(folder.name)
        if self.fails is not None:
            raise self.fails
        self.weights = read_version(folder, version)


def test_the_folder_before_is_deleted_when_all_serve_the_new_one(tmp_path: Path) -> None:
    readers = [Reads(), Reads()]
    (tmp_path / "000001-version-7").mkdir()  # of a run before
    (tmp_path / "other").mkdir()
    courier = Disk(readers, tmp_path, torch.bfloat16)

    async def work() -> None:
        assert await courier.deliver(odd(), 1, range(2)) == {}
        assert names(tmp_path) == ["000001-version-1", "other"]
        assert readers[1].weights["t"].dtype == torch.bfloat16 and readers[1].weights["i"].dtype == torch.int64
        readers[0].fails = EngineError("missing b")
        with pytest.raises(EngineError, match="missing b"):
            await courier.deliver(odd(), 2, range(2))
        assert names(tmp_path) == ["000001-version-1", "other"], "the one that is served stays"
        readers[0].fails = gone = SamplerLost("its actor died")
        assert await courier.deliver(odd(), 3, range(2)) == {0: gone}
        assert await courier.deliver(odd(), 3, [1]) == {}
        assert readers[1].read_folders[-1] == "000004-version-3" and names(tmp_path) == ["000004-version-3", "other"]

    asyncio.run(work())
