"""Memory that processes share: found by its token, gone with the last that has it, refused where it is not meant."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from strop.weights import shared
from strop.weights.shared import Lent, borrow, forget, lend

SIZE = 5000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared, "_FOLDER", tmp_path)
    return tmp_path


def lent() -> tuple[Lent, torch.Tensor]:
    found = lend(SIZE)
    assert found is not None
    return found


def test_what_one_writes_all_read_also_when_its_name_is_gone(folder: Path) -> None:
    one, memory = lent()
    other = borrow(one)
    assert other is not None and len(other) == len(memory) == SIZE and not other.any()
    forget(one)
    assert list(folder.iterdir()) == [] and borrow(one) is None
    forget(one)
    memory[7], other[8] = 3, 4
    assert memory[:10].tolist() == other[:10].tolist() == [0, 0, 0, 0, 0, 0, 0, 3, 4, 0]


def test_it_is_for_this_user_alone() -> None:
    one, _ = lent()
    assert Path(one.path).stat().st_mode & 0o777 == 0o600


def write_in_child(one: Lent, folder: Path) -> None:
    shared._FOLDER = folder
    memory = borrow(one)
    assert memory is not None
    memory[1] = 9


def test_a_process_of_its_own_has_the_same_memory(folder: Path) -> None:
    one, memory = lent()
    child = get_context("forkserver").Process(target=write_in_child, args=(one, folder))
    child.start()
    child.join()
    assert child.exitcode == 0 and memory[1] == 9


def test_memory_of_another_machine_is_not_found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing of that name, a file of that name with another token or size, another folder, or a link."""
    one, _ = lent()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(one.path, elsewhere / "strop-copy")
    (folder / "strop-link").symlink_to(elsewhere / "strop-copy")
    (folder / "other").write_bytes(Path(one.path).read_bytes())
    assert borrow(one) is not None
    for wrong in (
        replace(one, path=str(folder / "strop-none")),
        replace(one, token="00" * 16),
        replace(one, size=SIZE - 1),
        replace(one, path=str(elsewhere / "strop-copy")),
        replace(one, path=str(folder / "strop-link")),
        replace(one, path=str(folder / "other")),
        replace(one, path=f"{folder}/../{folder.name}/x/../{Path(one.path).name}"),
    ):
        assert borrow(wrong) is None, wrong


def test_memory_that_cannot_be_mapped_is_as_good_as_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = lent()

    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared.mmap, "mmap", full)
    assert borrow(one) is None and lend(SIZE) is None
    assert [str(path) for path in folder.iterdir()] == [one.path]


@pytest.mark.parametrize("why", ["no folder", "little room", "no room after all"])
def test_where_there_is_none_nothing_is_lent_and_nothing_stays(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no folder":
        monkeypatch.setattr(shared, "_FOLDER", folder / "none")
    elif why == "little room":
        monkeypatch.setattr(shared.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * SIZE - 1))
    else:

        def full(fd: int, start: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(shared.os, "posix_fallocate", full)
    assert lend(SIZE) is None
    assert list(folder.iterdir()) == []
