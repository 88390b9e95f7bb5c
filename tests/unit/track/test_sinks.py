"""TensorBoard and W&B get every number of every row, and none of the secrets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strop.errors import ConfigError
from strop.track import rows, sinks
from strop.track.run import Run, Watch
from strop.track.sinks import TensorBoard, WeightsAndBiases, build_sinks
from tests.unit.track.fakes import FakeEngine, all_stages, decode, one_stage, recipe

SECRETS = {"api_key": "sk-test-1", "judge": {"password": "hidden-2"}}


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def assert_no_secret(folder: Path) -> None:
    """K05."""
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"sk-test-1" not in content and b"hidden-2" not in content, path


def test_nothing_is_asked_for_by_default(tmp_path: Path) -> None:
    assert build_sinks(recipe(), tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        build_sinks(recipe(track=("tensorboard", "wandb")), tmp_path)
    wanted = [problem.split(" is a ")[0] for problem in caught.value.problems]
    assert wanted == ["run.track: tensorboard", "run.track: wandb"]
    assert all("pip install 'strop[track]'" in problem for problem in caught.value.problems)


def test_tensorboard_gets_what_metrics_jsonl_gets(tmp_path: Path) -> None:
    """Also K05: no secret in any file of the run folder."""
    cfg, folder = recipe(SECRETS, track=("tensorboard",)), tmp_path / "run"
    watch = Watch(sinks=build_sinks(cfg, folder))
    asyncio.run(all_stages(Run.start(folder, cfg, decode=decode, watch=watch)))
    written = [row for row in rows.read_rows(folder / rows.METRICS) if row["stage"] == "grpo"]
    logged = scalars(folder / "tensorboard" / "grpo", "reward/mean")
    assert logged == [(row["step"], pytest.approx(row["reward/mean"])) for row in written]
    assert [step for step, _ in scalars(folder / "tensorboard" / "sft", "evaluate/sampled_accuracy")] == [0, 2, 3]
    assert len(scalars(folder / "tensorboard" / "grpo", "time/learn")) == 5
    assert_no_secret(folder)


def test_tensorboard_hides_what_a_killed_run_logged_too_much(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, {})
    sink.begin("grpo", 0)
    for step in (1, 2, 3):
        sink.log(step, {"x": float(step)})
    sink.close()
    sink = TensorBoard(tmp_path, {})
    sink.begin("grpo", 2)
    sink.log(3, {"x": 30.0})
    sink.close()
    assert scalars(tmp_path / "tensorboard" / "grpo", "x") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    """Also K05: no secret in any file of the run folder."""
    cfg, folder = recipe(SECRETS, track=("wandb",)), tmp_path / "run"

    async def train() -> None:
        run = Run.start(folder, cfg, decode=decode, watch=Watch(sinks=build_sinks(cfg, folder)))
        with run:
            await one_stage(run, "sft", FakeEngine())

    asyncio.run(train())
    (logged,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = b""
    for _ in range(600):  # W&B's own process writes the file, and may do so after `finish` has returned
        content = logged.read_bytes()
        if b"grpo.schedule.lr" in content and b"sft/evaluate/sampled_accuracy" in content:
            break
        time.sleep(0.1)
    assert b"sft/reward/mean" in content and b"sft/evaluate/sampled_accuracy" in content
    assert b"grpo.schedule.lr" in content, "the recipe is its configuration"
    assert_no_secret(folder)


def test_a_sink_that_has_not_begun_says_so(tmp_path: Path) -> None:
    for sink in (TensorBoard(tmp_path, {}), WeightsAndBiases(tmp_path, {})):
        with pytest.raises(RuntimeError, match="log before begin"):
            sink.log(1, {"x": 1.0})
        sink.close()


def test_neither_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, strop.track.sinks; print([m for m in ('wandb', 'tensorboard', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout.strip() == "[]", done.stderr
