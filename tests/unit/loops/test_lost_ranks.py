"""A run over ranks, one of which is killed while it trains: it stops and says so, or goes on by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.config.recipe import Recipe
from strop.runtime.processes import ProcessRanks
from strop.runtime.ranks import RankError
from strop.runtime.remote_engine import RemoteEngine
from tests.conformance.rank_engines import cramped_rank
from tests.ranks.shapes import SHAPES
from tests.unit.loops.test_recipe import HERE, RECIPE

BEGUN = "rank 1 died in forward"  # after the run's folder was made
OVER_RANKS = ["engine.parallel.data=2", "grpo.steps=6", "evaluate.every=0"]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE)
    code = (
        "import sys, pathlib, torch; torch.set_num_threads(1)\n"
        "from strop import recipe; from strop.config.loader import load_recipe\n"
        "if __name__ == '__main__':\n"
        "    p = pathlib.Path(sys.argv[1]); recipe.train(load_recipe(p, sys.argv[2:]), p, resume=False)\n"
    )
    command = [sys.executable, "-c", code, str(path), f"run.folder={folder}/run", *OVER_RANKS, *more]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def kill_a_rank(process: subprocess.Popen[str], folder: Path, after: int) -> None:
    """Kill the youngest process that works under the run, once so many steps are recorded."""
    for _ in range(6000):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        if len(rows(folder)) >= after:
            break
        time.sleep(0.01)
    below = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in below if child.memory_info().rss > 50 << 20 and child.children() == []]
    os.kill(max(ranks, key=lambda child: child.create_time()).pid, signal.SIGKILL)


def numbers(folder: Path) -> list[dict[str, Any]]:
    clocks = ("time/", "memory/", "tokens/per_second", "rollout/tokens_per_second")
    return [{k: v for k, v in r.items() if not k.startswith(clocks) and "per_s" not in k} for r in rows(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return folder


def test_the_run_stops_and_names_the_rank(tmp_path: Path) -> None:
    process = start(tmp_path)
    kill_a_rank(process, tmp_path, after=2)
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "RankError: rank" in said and "SIGKILL" in said
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name[0] != ".")


def test_the_run_goes_on_by_itself_and_is_the_uninterrupted_one(tmp_path: Path, whole: Path) -> None:
    """No group is lost, and none is trained twice: the rows are those of a run to which nothing happened."""
    process = start(tmp_path, "run.restarts=1")
    kill_a_rank(process, tmp_path, after=2)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "from the newest checkpoint on" in said
    assert numbers(tmp_path) == numbers(whole)


def test_what_a_rank_said_is_printed_as_it_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it looks like markup, as in messages of gloo and paths of C++ files."""
    said = "rank 0 raised: [rank0] [/src/gloo/pair.cc:534] closed by peer"
    assert restarted(tmp_path, monkeypatch, [said, None]) == [False, False]
    assert said in " ".join(capsys.readouterr().out.split())


def restarted(folder: Path, monkeypatch: pytest.MonkeyPatch, fates: list[str | None]) -> list[bool]:
    """A run whose starts have these fates: what a rank said when it was lost, if one was. Whether each resumed."""
    resumed: list[bool] = []

    async def fated(recipe: Recipe, path: Path, console: object, *, resume: bool) -> None:
        resumed.append(resume)
        if (said := fates[len(resumed) - 1]) is not None:
            if said == BEGUN:
                (folder / "run").mkdir(exist_ok=True)
                (folder / "run" / "recipe.yaml").touch()
            raise RankError(said)

    monkeypatch.setattr(runner, "_train", fated)
    path = folder / "tiny.yaml"
    path.write_text(RECIPE)
    settings = [f"run.restarts={len(fates) - 1}", f"run.folder={folder}/run"]
    assert runner.train(load_recipe(path, settings), path, resume=False) == 0
    return resumed


def test_ranks_that_are_lost_before_the_run_began_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to resume then; and another run that lies in the folder is not taken for this one."""
    early = "rank 0 raised in start"
    assert restarted(tmp_path, monkeypatch, [early, BEGUN, early, None]) == [False, False, True, True]
    assert (tmp_path / "run" / "recipe.yaml").exists()
    assert restarted(tmp_path, monkeypatch, [early, None]) == [False, False]


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    """The rank that writes says so; the others are not waited for."""
    engine = RemoteEngine(ProcessRanks([cramped_rank, cramped_rank], timeout_s=60), SHAPES["data2"])
    (tmp_path / "new").mkdir()
    with pytest.raises(
        RankError, match=r"(?s)rank 0 raised.*model\.safetensors cannot be written: .*[Ff]ile too large"
    ):
        asyncio.run(engine.save(tmp_path / "new"))
