"""Checkpoints are whole or not there, whatever fails and whenever the process dies."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.checkpoint.state import RunState
from strop.checkpoint.store import BEST, Store, check_name
from strop.errors import CheckpointError
from strop.types import StreamState


def state(step: int, stage: str = "grpo") -> RunState:
    return RunState(
        stage=stage,
        step=step,
        done=False,
        updates=step,
        skipped_in_row=0,
        carried={"kl_coefficient": 0.05},
        stream=StreamState(seed=0, epoch=0, position=step, ended=[], fingerprint=7),
        best_accuracy=None,
        recipe={"seed": 0},
    )


def content(step: int) -> bytes:
    return f"weights of step {step}\n".encode() * 1000


async def write(folder: Path, step: int) -> None:
    (folder / "shards").mkdir()
    (folder / "shards" / "model.bin").write_bytes(content(step))
    (folder / "optimizer.bin").write_bytes(content(-step))


def save(store: Store, step: int, *pins: str) -> None:
    asyncio.run(store.save(lambda folder: write(folder, step), state(step), pins))


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_latest(store: Store, step: int) -> None:
    found = store.latest()
    assert found is not None
    assert found.state == state(step)
    assert (found.engine / "shards" / "model.bin").read_bytes() == content(step)
    assert (found.engine / "optimizer.bin").read_bytes() == content(-step)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    save(store, 10)
    save(store, 20)
    assert_latest(store, 20)
    assert store.load("000001-grpo-10").state.step == 10
    manifest = json.loads((tmp_path / "checkpoints/000002-grpo-20/manifest.json").read_text())
    assert set(manifest["files"]) == {"engine/shards/model.bin", "engine/optimizer.bin", "state.json"}
    assert manifest["files"]["engine/shards/model.bin"]["bytes"] == len(content(20))


def test_the_newest_are_kept_and_the_pinned_beside_them(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    save(store, 1, "end-of-sft")
    save(store, 2, BEST)
    for step in (3, 4, 5):
        save(store, step)
    assert entries(tmp_path) == ["000001-grpo-1", "000002-grpo-2", "000004-grpo-4", "000005-grpo-5"]
    best = store.pinned(BEST)
    assert best is not None and best.state.step == 2
    save(store, 6, BEST)
    assert entries(tmp_path) == ["000001-grpo-1", "000005-grpo-5", "000006-grpo-6"], "a new best frees the old one"
    assert store.pinned("worst") is None


def test_a_step_done_again_after_a_resume_is_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    for step in (10, 20, 10):
        save(store, step)
    assert_latest(store, 10)
    assert len(store.names()) == 3


def test_order_is_by_number_not_by_text(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    save(store, 1)
    (tmp_path / "000001-grpo-1").rename(tmp_path / "999999-grpo-1")
    save(store, 2)
    assert store.names() == ["999999-grpo-1", "1000000-grpo-2"]
    assert_latest(store, 2)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda f: (f / "manifest.json").unlink(), "no manifest.json", id="no manifest"),
        pytest.param(lambda f: (f / "manifest.json").write_text(""), "cannot be read", id="empty manifest"),
        pytest.param(lambda f: (f / "manifest.json").write_text("[1]"), "cannot be read", id="garbage manifest"),
        pytest.param(lambda f: os.truncate(f / "engine/optimizer.bin", 9), "has 9 bytes instead of", id="truncated"),
        pytest.param(lambda f: (f / "engine/optimizer.bin").unlink(), "optimizer.bin is missing", id="file lost"),
        pytest.param(lambda f: flip(f / "engine/shards/model.bin"), "model.bin is damaged", id="one bit flipped"),
        pytest.param(lambda f: flip(f / "state.json"), "state.json is damaged", id="state changed"),
        pytest.param(lambda f: shutil.rmtree(f / "engine"), "is missing", id="folder lost"),
        pytest.param(lambda f: edit_format(f, 2), "format 2", id="format of another version"),
    ],
)
def test_a_broken_newest_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any], says: str
) -> None:
    """D05: step 10 whole, step 20 broken in any way: 10 is resumed, and the warning names what is wrong."""
    store = Store(tmp_path, keep=2)
    save(store, 10)
    save(store, 20)
    damage(tmp_path / "000002-grpo-20")
    with caplog.at_level(logging.WARNING):
        assert_latest(store, 10)
    assert "000002-grpo-20" in caplog.text and says in caplog.text
    with pytest.raises(CheckpointError, match=says):
        store.load("000002-grpo-20")
    save(store, 20)
    assert_latest(store, 20)
    if says != "model.bin is damaged" and says != "state.json is damaged":  # those only a checksum finds
        assert entries(tmp_path) == ["000001-grpo-10", "000003-grpo-20"], "a broken folder takes nobody's place"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))


def edit_format(folder: Path, version: int) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": version}))


def test_a_full_disk_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    """D04: keep=1, and the save fails half-way with ENOSPC."""
    store = Store(tmp_path, keep=1)
    save(store, 1)

    async def half(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left.*000001-grpo-1 is still the newest.*Free space"):
        asyncio.run(store.save(half, state(2)))
    assert entries(tmp_path) == ["000001-grpo-1"]
    assert_latest(store, 1)


def test_an_error_of_the_engine_goes_through_and_leaves_no_rubbish(tmp_path: Path) -> None:
    async def broken(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        raise ValueError("engine")

    with pytest.raises(ValueError, match="engine"):
        asyncio.run(Store(tmp_path, keep=1).save(broken, state(2)))
    assert entries(tmp_path) == []


class Faults:
    """Counts the file operations of a save, and makes the n-th of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int) -> None:
        self.count, self.fail_at, self.failed = 0, fail_at, ""
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "open"), (os, "mkdir")):
            patch.setattr(owner, name, self._wrap(name, getattr(owner, name)))
        patch.setattr("builtins.open", self._wrap("open for writing", open))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open for writing" and "w" not in str(arguments[1:2]):
                return real(*arguments, **options)
            if name == "open" and "dir_fd" in options:  # rmtree
                return real(*arguments, **options)
            self.count += 1
            if self.count == self.fail_at:
                self.failed = f"{name}{arguments}"
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        return call


def test_every_file_operation_may_fail(tmp_path: Path) -> None:
    """D04, by fault injection: whichever operation fails, the newest is whole, and a later save succeeds."""
    failures = 0
    for fail_at in range(1, 100):
        folder = tmp_path / str(fail_at)
        store = Store(folder, keep=1)
        save(store, 1)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at)
            try:
                save(store, 2)
                raised = False
            except CheckpointError:
                raised = True
        if not faults.failed:
            break
        failures += 1
        newest = store.latest()
        assert newest is not None, faults.failed
        assert_latest(store, newest.state.step)
        assert newest.state.step == 1 or "rename" not in faults.failed or not raised
        assert entries(folder) == store.names(), f"rubbish stays: {faults.failed}"
        for name in store.names():
            store.load(name)  # a folder that has its name is whole
        save(store, 3)
        assert_latest(store, 3)
    assert failures >= 15, "the operations that a save is made of were not reached"


def test_a_failed_delete_is_a_warning_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D11: rmtree raises; the save succeeds, the next one cleans up."""
    store = Store(tmp_path, keep=1)
    save(store, 1)

    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", refuse)
        save(store, 2)
    assert "Device or resource busy" in caplog.text and "000001-grpo-1" in caplog.text
    assert_latest(store, 2)
    save(store, 3)
    assert entries(tmp_path) == ["000003-grpo-3"]


def test_two_processes_may_make_the_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: the folder appears between the look and the mkdir."""
    store = Store(tmp_path / "checkpoints", keep=1)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: False if path == store.folder else real(path))
    store.folder.mkdir()
    save(store, 1)
    monkeypatch.undo()
    assert_latest(store, 1)


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "..", ".", "", "/etc/passwd", "x" * 300, "a\0b", "-x", ".hidden", "a\n", "~x", "a\\b"]
)
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    """K04."""
    store = Store(tmp_path / "inner", keep=1)
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        store.load(name)
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        asyncio.run(store.save(lambda folder: write(folder, 1), state(1, stage=name)) if "/" in name else refuse(name))
    assert entries(tmp_path) == ["x"]


async def refuse(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../b", ""])
def test_a_manifest_cannot_name_files_outside(tmp_path: Path, name: str) -> None:
    """K04: the manifest of a checkpoint that somebody else made."""
    store = Store(tmp_path, keep=1)
    save(store, 1)
    path = tmp_path / "000001-grpo-1/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        store.load("000001-grpo-1")


def test_a_link_out_of_the_checkpoint_is_no_file_of_it(tmp_path: Path) -> None:
    """K04: a symlink in place of a file, with the right bytes behind it."""
    store = Store(tmp_path / "store", keep=1)
    save(store, 1)
    inside, outside = tmp_path / "store/000001-grpo-1/engine/optimizer.bin", tmp_path / "outside.bin"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(CheckpointError, match="no file of this checkpoint"):
        store.load("000001-grpo-1")


def test_keep_must_keep_something(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0"):
        Store(tmp_path, keep=0)


_KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from tests.unit.checkpoint.test_store import assert_latest, save, state
from strop.checkpoint.store import Store

folder = Path(sys.argv[1])
rng = random.Random(0)

def die_at(n):
    count = 0
    def wrap(real):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):  # those that change the disk
        setattr(os, name, wrap(getattr(os, name)))

def survives(store):
    found = store.latest()
    assert found is not None, "nothing can be resumed"
    assert_latest(store, found.state.step)
    return found.state.step

def one_child(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

# At every operation of a save.
kills = 0
store = Store(folder / "ops", keep=1)
save(store, 1)
for n in range(1, 100):
    def work():
        die_at(n)
        save(store, 2)
    if not one_child(work):
        break
    kills += 1
    save(store, survives(store) + 1)
    assert len(list(store.folder.iterdir())) == 1, "rubbish stays"
else:
    raise AssertionError("a save never ends")

# At random moments of a loop of saves.
store = Store(folder / "loop", keep=1)
save(store, 1)
for _ in range(6):
    step = survives(store)
    child = os.fork()
    if not child:
        while True:
            step += 1
            save(store, step)
    time.sleep(rng.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert survives(store) >= step
print("kills", kills)
"""


def test_a_kill_at_any_moment_leaves_something_to_resume(tmp_path: Path) -> None:
    """D05: kill -9 at every file operation of a save, and at random moments of a loop of saves."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 20
