"""Checkpoint folders that are either whole or not there.

    write into a hidden sibling -> fsync every file -> manifest.json last -> rename -> fsync the parent -> delete old

A folder got its visible name only when all of it was on disk, so a kill or a full disk at any moment leaves the
previous checkpoint usable. `manifest.json` holds every file's size and SHA-256, so later damage is found as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from strop.checkpoint.state import RunState, parse_state
from strop.errors import CheckpointError

FORMAT = 1
BEST = "best"
_MANIFEST = "manifest.json"
_STATE = "state.json"
_ENGINE = "engine"
_PARTIAL = ".partial-"  # being written; rubbish after a kill
_DELETED = ".deleted-"  # on its way out: renamed first, so that no half-deleted folder has a visible name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_ORDERED = re.compile(r"(\d{6,})-")
_log = logging.getLogger(__name__)


def check_name(name: str) -> str:
    """`name`, when it can name a folder inside the store and nothing else; CheckpointError otherwise."""
    if not _NAME.match(name):
        shown = repr(name if len(name) <= 40 else name[:40] + "...")
        raise CheckpointError(
            f"{shown} cannot name a checkpoint: use 1 to 128 letters, digits, '.', '_', '-'; a letter or digit first"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint: its manifest and every file's checksum were right when it was loaded."""

    folder: Path
    state: RunState
    pins: tuple[str, ...]  # names that keep it from being deleted, until a newer checkpoint takes them

    @property
    def engine(self) -> Path:
        """What `Engine.save` wrote, for `Engine.load`."""
        return self.folder / _ENGINE


class Store:
    """The checkpoints of one run, under `folder`: the newest `keep`, and those that hold a pin.

    Folders are named `<order>-<stage>-<step>`: the order grows with every save, so a step that is done again after a
    resume never meets its own old folder. One process writes at a time.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least the newest checkpoint must be kept")
        self.folder = folder
        self.keep = keep

    async def save(
        self, write: Callable[[Path], Awaitable[None]], state: RunState, pins: tuple[str, ...] = ()
    ) -> Checkpoint:
        """Write a checkpoint and delete those that it makes superfluous.

        `write` fills an existing, empty folder (it is `Engine.save`). Raises CheckpointError when the disk refuses;
        then, as after any error of `write`, the earlier checkpoints are as they were and nothing half-written stays.
        """
        names = self.names()
        order = 1 + max((_order(name) for name in names), default=0)
        name = check_name(f"{order:06d}-{state.stage}-{state.step}")
        partial, final = self.folder / (_PARTIAL + name), self.folder / name
        committed = False
        try:
            self._sweep()
            (partial / _ENGINE).mkdir(parents=True)
            await write(partial / _ENGINE)
            await asyncio.to_thread(_seal, partial, state, pins)
            os.rename(partial, final)
            committed = True
            _fsync(self.folder)
        except OSError as error:
            kept = f"{names[-1]} is still the newest" if names else "there is no earlier one"
            raise CheckpointError(
                f"saving checkpoint {final} failed: {error}. {'' if committed else kept + '. '}"
                "Free space or repair the disk, then resume the run"
            ) from error
        finally:
            if not committed:
                _remove(partial)
        self._delete_old()
        return Checkpoint(folder=final, state=state, pins=pins)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None without one. Broken ones are passed over; a warning says what is wrong."""
        for name in reversed(self.names()):
            try:
                return self.load(name)
            except CheckpointError as error:
                _log.warning("passing over a broken checkpoint: %s", error)
        return None

    def pinned(self, pin: str) -> Checkpoint | None:
        """The newest whole checkpoint that holds `pin`; None without one."""
        for name in reversed(self.names()):
            try:
                if pin in _read_manifest(self.folder / name)[1]:
                    return self.load(name)
            except CheckpointError as error:
                _log.warning("passing over a broken checkpoint: %s", error)
        return None

    def load(self, name: str) -> Checkpoint:
        """The checkpoint called `name`, every file verified. CheckpointError says which file is wrong, and how."""
        folder = self.folder / check_name(name)
        files, pins = _read_manifest(folder)
        if _STATE not in files:
            raise CheckpointError(f"{folder / _MANIFEST} lists no {_STATE}")
        try:
            for path, (size, digest) in files.items():
                _check_size(folder, path, size)
                if _sha256(folder / path) != digest:
                    raise CheckpointError(f"{folder / path} is damaged: its SHA-256 is not the one in {_MANIFEST}")
            state = parse_state((folder / _STATE).read_text("utf-8"))
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        return Checkpoint(folder=folder, state=state, pins=pins)

    def names(self) -> list[str]:
        """Every checkpoint's name, oldest first, whole or not."""
        if not self.folder.exists():
            return []
        return sorted((path.name for path in self.folder.iterdir() if _ORDERED.match(path.name)), key=_order)

    def _delete_old(self) -> None:
        """Delete what is neither among the newest `keep` nor pinned. A broken folder takes nobody's place."""
        whole: list[str] = []
        holders: dict[str, str] = {}
        names = self.names()
        for name in reversed(names):
            try:
                files, pins = _read_manifest(self.folder / name)
                for path, (size, _) in files.items():
                    _check_size(self.folder / name, path, size)
            except CheckpointError:
                continue  # `latest` has warned of it, or will; it is deleted below
            whole.append(name)
            for pin in pins:
                holders.setdefault(pin, name)
        kept = {*whole[: self.keep], *holders.values()}
        for name in names:
            if name not in kept:
                doomed = self.folder / (_DELETED + name)
                try:
                    os.rename(self.folder / name, doomed)
                except OSError as error:
                    _log.warning("cannot delete the old checkpoint %s (%s); trying again at the next save", name, error)
                    continue
                _remove(doomed)

    def _sweep(self) -> None:
        """Remove what an earlier kill or failed delete left behind."""
        if self.folder.exists():
            for path in list(self.folder.iterdir()):
                if path.name.startswith((_PARTIAL, _DELETED)):
                    _remove(path)


def _order(name: str) -> int:
    match = _ORDERED.match(name)
    assert match is not None
    return int(match.group(1))


def _seal(folder: Path, state: RunState, pins: tuple[str, ...]) -> None:
    """Put state and manifest beside the engine's files and all of it on disk; the manifest last."""
    _write(folder / _STATE, state.to_json())
    files: dict[str, dict[str, Any]] = {}
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.append(path)
            continue
        _fsync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": FORMAT, "stage": state.stage, "step": state.step, "pins": list(pins), "files": files}
    _write(folder / _MANIFEST, json.dumps(manifest, indent=1))
    _fsync(folder / _MANIFEST)
    for inner in reversed(folders):
        _fsync(inner)


def _read_manifest(folder: Path) -> tuple[dict[str, tuple[int, str]], tuple[str, ...]]:
    """({file: (bytes, sha256)}, pins) of a checkpoint folder."""
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        version = manifest["format"]
        if version != FORMAT:
            raise CheckpointError(
                f"{path} has format {version!r}, this strop reads format {FORMAT}: use the strop that wrote it"
            )
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        pins = tuple(str(pin) for pin in manifest["pins"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no whole checkpoint: it has no {_MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] == "/" or "\0" in name:
            raise CheckpointError(f"{path} names {name!r}, which is outside the checkpoint")
    return files, pins


def _check_size(folder: Path, name: str, size: int) -> None:
    path = folder / name
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path} is missing, or is no file of this checkpoint")
    if (found := path.stat().st_size) != size:
        raise CheckpointError(f"{path} has {found} bytes instead of {size}")


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    """Delete a folder; what cannot be deleted now is warned of and tried again at the next save."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("cannot delete %s (%s); trying again at the next save", folder, error)
