"""Engines that are saved and restored as one: the trained policy in the checkpoint's folder, the others in folders
within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strop.engines.base import Engine


@dataclass(frozen=True, slots=True)
class Beside:
    """A policy, and the engines that are trained beside it, by the names of their folders (`critic`).

    What reads a policy alone (an export, an evaluation, the next loop) finds it where it always is.
    """

    policy: Engine
    others: Mapping[str, Engine]

    async def save(self, folder: Path) -> None:
        """Write every engine into an existing, empty folder."""
        await self.policy.save(folder)
        for name, engine in self.others.items():
            (folder / name).mkdir()
            await engine.save(folder / name)

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote. CheckpointError names the folder of an engine that was not saved there."""
        await self.policy.load(folder)
        for name, engine in self.others.items():
            await engine.load(folder / name)
