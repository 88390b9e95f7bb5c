"""A run folder says what happened, once; a killed and resumed run says what an uninterrupted one does."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.checkpoint.store import BEST
from strop.config import yaml12
from strop.config.recipe import Recipe
from strop.engines.base import Applied, OptimOutcome, OptimParams, SkipReason
from strop.errors import CheckpointError, ConfigError, EngineError
from strop.track import rows
from strop.track.run import Run, Watch
from strop.track.spans import Clock
from strop.types import Ending, Group, Metric, Reduction
from tests.unit.track.fakes import (
    FakeEngine,
    FakeStream,
    all_stages,
    decode,
    evaluation,
    one_stage,
    recipe,
    trajectory,
)


def record(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything recorded, without what depends on the machine and the moment."""
    return {
        name: [
            {key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))}
            for row in rows.read_rows(folder / name)
        ]
        for name in (rows.METRICS, rows.SAMPLES, rows.EVALUATIONS)
    }


def finished(folder: Path, **run: Any) -> Path:
    asyncio.run(all_stages(Run.start(folder, recipe(**run), decode=decode)))
    return folder


@pytest.fixture(name="began")
def _began(tmp_path: Path) -> Run:
    """A run at the beginning of its grpo stage."""
    run = Run.start(tmp_path / "run", recipe(), decode=decode)
    asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
    return run


def end_step(run: Run, step: int, metrics: dict[str, Metric] | None = None, *, last: bool = False) -> dict[str, Any]:
    """End a step and give its row."""
    asyncio.run(run.end_step(step, metrics or {}, FakeEngine(), FakeStream(), last=last))
    return list(rows.read_rows(run.folder / rows.METRICS))[-1]


def test_every_step_has_one_row_and_every_evaluation_too(tmp_path: Path) -> None:
    recorded = record(finished(tmp_path / "run"))
    steps = [("sft", 1), ("sft", 2), ("sft", 3), *(("grpo", step) for step in range(1, 6))]
    assert [(row["stage"], row["step"]) for row in recorded[rows.METRICS]] == steps
    assert [(row["stage"], row["step"]) for row in recorded[rows.EVALUATIONS]] == [
        ("sft", 0), ("sft", 2), ("sft", 3), ("grpo", 0), ("grpo", 2), ("grpo", 4), ("grpo", 5),
    ]  # fmt: skip
    assert len(recorded[rows.SAMPLES]) == 3 * len(steps)
    assert recorded[rows.EVALUATIONS][0]["pass_at_k"] == {"1": pytest.approx(0.9607894), "4": 1.0}


def test_the_written_recipe_is_the_recipe(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    assert Recipe.model_validate(yaml12.parse((folder / "recipe.yaml").read_text(), "recipe.yaml")) == recipe()


_KILLED = """
import asyncio, builtins, os, signal, sys
from pathlib import Path
from strop.track.run import Run
from tests.unit.track.fakes import all_stages, decode, recipe
from tests.unit.track.test_run import finished, record

os.fsync = lambda descriptor: None  # a kill spares the page cache; this is about the order of things
folder = Path(sys.argv[1])
expected = record(finished(folder / "whole"))

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
    Run.samples, Run.record_evaluation, Run.end_step = map(wrap, (Run.samples, Run.record_evaluation, Run.end_step))
    Run.count_outcome = wrap(Run.count_outcome)
    os.rename, os.unlink, os.mkdir = map(wrap, (os.rename, os.unlink, os.mkdir))
    os.fsync = wrap(os.fsync)

kills = 0
for n in range(2, 400, int(sys.argv[2])):
    at = folder / str(n)
    child = os.fork()
    if not child:
        die_at(n)
        asyncio.run(all_stages(Run.start(at, recipe(), decode=decode)))
        os._exit(0)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        break
    if (at / "recipe.yaml").exists():
        child = os.fork()  # and killed a second time, later in its resumed life
        if not child:
            die_at(n // 2)
            asyncio.run(all_stages(Run.resume(at, recipe(), decode=decode)))
            os._exit(0)
        os.waitpid(child, 0)
        asyncio.run(all_stages(Run.resume(at, recipe(), decode=decode)))
        assert record(at) == expected, f"killed at {n}: the record differs"
        kills += 1
print("kills", kills)
"""


def test_killed_at_any_moment_and_resumed_it_records_what_an_uninterrupted_run_does(tmp_path: Path) -> None:
    """D02, D06, D07 (stream, moments, schedule go on), and no row twice: kill -9 twice, at points all over the run."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), "13"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 8


def test_a_resume_in_the_middle_restores_counters_engine_and_stream(tmp_path: Path) -> None:
    """D02, D06, D07: bitwise what they were; the rows after the checkpoint are cut away."""
    folder = finished(tmp_path / "run", save_every=0, keep=5)

    async def interrupted() -> tuple[FakeEngine, FakeStream]:
        run = Run.start(tmp_path / "cut", recipe(save_every=3, keep=5), decode=decode)
        engine, stream = FakeEngine(), FakeStream()
        with run:
            await one_stage(run, "sft", engine)
            await run.begin("grpo", engine, stream)
            for step in (1, 2, 3):
                stream.take(3)
                run.count_outcome(engine.optim_step(OptimParams(lr=0.1)))
                await run.end_step(step, {}, engine, stream, last=False)
            saved = FakeEngine(), FakeStream()
            saved[0].__dict__.update(engine.__dict__)
            saved[1].__dict__.update(stream.__dict__)
            run.count_outcome(engine.optim_step(OptimParams(lr=0.1)))
            await run.end_step(4, {}, engine, stream, last=False)
        return saved

    saved = asyncio.run(interrupted())
    with Run.resume(tmp_path / "cut", recipe(save_every=3), decode=decode) as run:
        engine, stream = FakeEngine(), FakeStream()
        assert asyncio.run(run.begin("sft", engine, FakeStream())) is False
        assert asyncio.run(run.begin("grpo", engine, stream)) is True
        assert (run.step, run.updates) == (3, 3)
        assert engine.__dict__ == saved[0].__dict__
        assert stream.__dict__ == saved[1].__dict__
        kept = list(rows.read_rows(run.folder / rows.METRICS))
        assert [(row["stage"], row["step"]) for row in kept][-1] == ("grpo", 3)
    assert folder != tmp_path / "cut"


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = record(folder)
    engine = asyncio.run(all_stages(Run.resume(folder, recipe(), decode=decode)))
    assert record(folder) == before
    assert engine.count == 16, "the engine holds the finished weights"


def test_a_later_stage_begins_from_the_weights_of_the_one_before(tmp_path: Path) -> None:
    """Killed between the stages: grpo goes on from the end of sft, which stays as long as the run does."""
    run = Run.start(tmp_path / "run", recipe(keep=1), decode=decode)
    assert run.start_of("sft") is None
    engine = FakeEngine()
    asyncio.run(one_stage(run, "sft", engine))
    run.close()
    with Run.resume(tmp_path / "run", recipe(keep=1), decode=decode) as run:
        again, stream = FakeEngine(), FakeStream()
        assert asyncio.run(run.begin("sft", again, stream)) is False
        assert asyncio.run(run.begin("grpo", again, FakeStream())) is True
        assert (run.step, run.updates) == (0, 0)
        assert again.__dict__ == engine.__dict__
        asyncio.run(one_stage(run, "grpo", again))
        start, reference = run.start_of("grpo"), FakeEngine()
        assert start is not None
        asyncio.run(reference.load(start))
        assert reference.value == engine.value != again.value


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", recipe(save_every=1, keep=1), decode=decode)
    asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
    run.record_evaluation(evaluation("grpo", 0, 0.2))
    for step, accuracy in enumerate((0.1, 0.6, 0.4, 0.6, 0.5), 1):
        run.record_evaluation(evaluation("grpo", step, accuracy))
        end_step(run, step)
    best, latest = run.store.pinned(BEST), run.store.latest()
    assert best is not None and (best.state.step, best.state.best_accuracy) == (2, 0.6)
    assert latest is not None and latest.state.step == 5
    assert len(run.store.names()) == 2


def test_a_resumed_run_knows_the_best_so_far(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", recipe(save_every=2), decode=decode)
    asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
    run.record_evaluation(evaluation("grpo", 2, 0.6))
    end_step(run, 2)
    run.close()
    with Run.resume(tmp_path / "run", recipe(save_every=2), decode=decode) as run:
        asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
        run.record_evaluation(evaluation("grpo", 3, 0.5))
        end_step(run, 3)
        best = run.store.pinned(BEST)
        assert best is not None and best.state.step == 2


def test_the_best_is_saved_when_nothing_else_is_due_and_only_if_asked_for(tmp_path: Path) -> None:
    for keep_best, steps in ((True, [1, 3]), (False, [])):
        cfg = recipe(save_every=0, keep=9)
        cfg = cfg.model_copy(update={"evaluate": cfg.evaluate.model_copy(update={"keep_best": keep_best})})
        run = Run.start(tmp_path / str(keep_best), cfg, decode=decode)
        asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
        for step, accuracy in enumerate((0.1, 0.05, 0.4, 0.4), 1):
            run.record_evaluation(evaluation("grpo", step, accuracy))
            end_step(run, step)
        assert [run.store.load(name).state.step for name in run.store.names()] == steps


def test_a_fresh_run_in_a_used_folder_is_refused(tmp_path: Path) -> None:
    """D12: nothing in the folder is touched."""
    folder = finished(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ConfigError, match=r"is not empty .*resume that run, or give another folder"):
        Run.start(folder, recipe(), decode=decode)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".partial-recipe.yaml").write_text("killed at the very begin")
    Run.start(tmp_path / "empty", recipe(), decode=decode).close()
    Run.resume(tmp_path / "empty", recipe(), decode=decode).close()


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        Run.resume(tmp_path, recipe(), decode=decode)
    folder = finished(tmp_path / "run", keep=1)
    with pytest.raises(CheckpointError, match=r"tasks.arguments.n was absent and is now 3"):
        Run.resume(folder, recipe({"n": 3}), decode=decode)
    before = record(folder)
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        Run.resume(folder, recipe(), decode=decode)
    assert record(folder) == before, "nothing is cut away when nothing can be resumed"


def test_a_broken_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D05, seen from the run: it resumes the older one with a warning, and the record is that of an unbroken run."""
    folder = finished(tmp_path / "run")
    before = record(folder)
    newest = sorted(folder.glob("checkpoints/*"))[-1]
    (newest / "engine" / "engine.json").write_text("[0")
    with caplog.at_level(logging.WARNING):
        asyncio.run(all_stages(Run.resume(folder, recipe(), decode=decode)))
    assert newest.name in caplog.text
    assert record(folder) == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", recipe(), decode=decode)
    with pytest.raises(CheckpointError, match="in use by another"):
        Run.resume(tmp_path / "run", recipe(), decode=decode)
    run.close()
    Run.resume(tmp_path / "run", recipe(), decode=decode).close()


def test_metrics_of_parts_are_reported_once(began: Run) -> None:
    """A09 (a mean of everything, not of means) and A10 (nothing multiplied by parts or ranks)."""
    kl = Metric(Reduction.MEAN, 2.0, 1).merge(Metric(Reduction.MEAN, 3.0, 3))
    losses = [Metric(Reduction.MEAN, 0.3 * 4, 4), Metric(Reduction.MEAN, 0.3 * 12, 12)]
    row = end_step(began, 1, {"kl": kl, "loss": losses[0].merge(losses[1]), "n": Metric(Reduction.SUM, 5.0, 2)})
    assert row["kl"] == 1.25
    assert row["loss"] == pytest.approx(0.3)
    assert row["n"] == 5.0


def test_what_is_not_a_number_is_left_out(began: Run) -> None:
    began.count_outcome(OptimOutcome(grad_norm=float("nan"), skipped=True, reason=SkipReason.NO_GRADIENT))
    nothing, bad = Metric(Reduction.MEAN, 0.0, 0), Metric(Reduction.MEAN, float("nan"), 2)
    row = end_step(began, 1, {"nothing": nothing, "bad": bad, "worse": Metric(Reduction.MAX, float("inf"))})
    assert not {"nothing", "bad", "worse", "optim/grad_norm", "optim/lr"} & row.keys()
    assert row["optim/skipped"] == 1.0
    began.record_evaluation(replace(evaluation("grpo", 1, 0.5), mean_reward=float("nan")))
    for line in (began.folder / rows.EVALUATIONS).read_text().splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["mean_reward"] is None


def skipped() -> OptimOutcome:
    return OptimOutcome(grad_norm=float("inf"), skipped=True, reason=SkipReason.NON_FINITE_GRADIENT)


def applied(lr: float) -> dict[str, Applied]:
    return {"adamw/decay": Applied(lr=lr)}


def test_outcomes_are_counted_and_averaged_over_a_step(began: Run) -> None:
    began.count_outcome(OptimOutcome(grad_norm=1.0, applied=applied(0.2)))
    began.count_outcome(skipped())
    began.count_outcome(OptimOutcome(grad_norm=2.0, applied=applied(0.1)))
    assert began.updates == 2, "a skipped step does not move the schedule"
    row = end_step(began, 1)
    assert row["optim/grad_norm"] == 1.5
    assert row["optim/lr"] == pytest.approx(0.15)
    assert row["optim/skipped"] == 1.0
    assert "optim/lr" not in end_step(began, 2), "what was counted belongs to one step"


def test_groups_with_rates_of_their_own_are_all_written(began: Run) -> None:
    rates = {"adamw/decay": Applied(lr=0.1), "muon/hidden": Applied(lr=2.0)}
    began.count_outcome(OptimOutcome(grad_norm=1.0, applied=rates))
    row = end_step(began, 1)
    assert (row["optim/lr"], row["optim/lr/adamw/decay"], row["optim/lr/muon/hidden"]) == (2.0, 0.1, 2.0)


def test_too_many_skipped_in_a_row_stop_the_run(began: Run) -> None:
    for _ in range(2):
        began.count_outcome(skipped())
    began.count_outcome(OptimOutcome(grad_norm=1.0, applied=applied(0.1)))
    for _ in range(2):
        began.count_outcome(skipped())
    with pytest.raises(EngineError, match=r"3 optimizer steps in a row were skipped \(non_finite_gradient\).*grpo.*=3"):
        began.count_outcome(skipped())


def test_skipped_in_a_row_goes_on_over_a_resume(began: Run) -> None:
    for _ in range(2):
        began.count_outcome(skipped())
    end_step(began, 2)
    began.close()
    with Run.resume(began.folder, recipe(), decode=decode) as run:
        asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
        with pytest.raises(EngineError):
            run.count_outcome(skipped())


class FakeTime:
    def __init__(self) -> None:
        self.wall = self.cpu = 100.0

    def spend(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.wall, cpu=lambda: self.cpu)


def test_phases_add_up_and_never_overlap(tmp_path: Path) -> None:
    time = FakeTime()
    run = Run.start(tmp_path / "run", recipe(), decode=decode, watch=Watch(clock=time.clock()))
    asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))
    for _ in range(2):
        with run.span("learn"):
            time.spend(3.0, 6.0)
            with run.span("reference"):
                time.spend(1.0, 0.5)
            time.spend(1.0, 1.0)
    time.spend(2.0, 0.0)
    with run.span("evaluate"):
        time.spend(5.0, 1.0)
    run.samples(1, [Group("a", [trajectory([1], [2] * 30, 0.0)])])
    row = end_step(run, 1)
    assert (row["time/learn"], row["time/reference"], row["time/step"]) == (8.0, 2.0, 17.0)
    assert (row["time/cpu/learn"], row["time/cpu/reference"], row["time/cpu/evaluate"]) == (14.0, 1.0, 1.0)
    assert row["time/tokens_per_s"] == 30 / 12.0, "without the evaluation"
    assert rows.phase_seconds(row) == {"learn": 8.0, "reference": 2.0, "evaluate": 5.0, "other": 2.0}
    time.spend(1.0, 0.0)
    row = end_step(run, 2)
    assert row["time/step"] == 1.0 and "time/learn" not in row and "time/tokens_per_s" not in row
    assert row["memory/peak_rss_mb"] > 1.0 and row["memory/rss_mb"] > 1.0
    with pytest.raises(ValueError, match="'step'"), run.span("step"):
        pass


def test_supervised_training_counts_the_tokens_that_it_trains(tmp_path: Path) -> None:
    time = FakeTime()
    run = Run.start(tmp_path / "run", recipe(), decode=decode, watch=Watch(clock=time.clock()))
    asyncio.run(run.begin("sft", FakeEngine(), FakeStream()))
    time.spend(2.0, 2.0)
    row = end_step(run, 1, {"loss/nll": Metric(Reduction.MEAN, 50.0, 100)})
    assert row["time/tokens_per_s"] == 50.0 and row["loss/nll"] == 0.5


def test_samples_show_the_best_the_worst_and_others(began: Run) -> None:
    groups = [
        Group("a", [trajectory([1, 2], [3, i], reward=float(i)) for i in range(5)]),
        Group("b", [trajectory([7], [8], float("nan"), Ending.LENGTH)]),
    ]
    began.samples(4, groups)
    found = list(rows.read_rows(began.folder / rows.SAMPLES))
    assert [row["why"] for row in found] == ["best", "worst", "random"]
    assert [row["reward"] for row in found][:2] == [4.0, 0.0] and found[2]["reward"] in (1.0, 2.0, 3.0)
    assert found[0] == {
        "stage": "grpo", "step": 4, "why": "best", "task_id": "a", "prompt": "1 2", "reply": "3 4",
        "reward": 4.0, "rewards": {"format": 1.0}, "ending": "done", "tokens": 2,
    }  # fmt: skip
    began.samples(5, [groups[1]])
    assert list(rows.read_rows(began.folder / rows.SAMPLES))[-1]["reward"] is None, "a failed episode has no reward"


def test_a_row_is_one_write_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = rows.RowFile(path)
    file.append({"step": 1, "text": "zwei\nZeilen \u2028 \ud800"})
    file.append({"step": 2})
    file.close()
    path.write_bytes(path.read_bytes() + b'{"step": 3, "te')
    assert [row["step"] for row in rows.read_rows(path)] == [1, 2]
    rows.keep_rows(path, lambda row: row["step"] < 2)
    assert [row["step"] for row in rows.read_rows(path)] == [1]
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with pytest.raises(CheckpointError, match="line 1 is not a JSON object"):
        list(rows.read_rows(path))
    assert not list(rows.read_rows(tmp_path / "none.jsonl"))


def test_an_unknown_stage_and_a_foreign_evaluation_are_mistakes(began: Run) -> None:
    with pytest.raises(ValueError, match="no stage 'dpo'; it has sft, grpo"):
        asyncio.run(began.begin("dpo", FakeEngine(), FakeStream()))
    with pytest.raises(ValueError, match="stage 'sft', the run is in 'grpo'"):
        began.record_evaluation(evaluation("sft", 1, 0.5))


def test_secrets_are_written_nowhere(tmp_path: Path) -> None:
    """K05: recipe, checkpoints and session rows."""
    cfg = recipe({"api_key": "sk-test", "judge": {"token": "tok-test"}})
    asyncio.run(all_stages(Run.start(tmp_path / "run", cfg, decode=decode)))
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"sk-test" not in path.read_bytes() and b"tok-test" not in path.read_bytes(), path
    Run.resume(tmp_path / "run", cfg, decode=decode).close()
    written = Recipe.model_validate(yaml12.parse((tmp_path / "run/recipe.yaml").read_text(), "recipe.yaml"))
    with pytest.raises(ConfigError, match=r"tasks.arguments.api_key was hidden"):
        Run.resume(tmp_path / "run", written, decode=decode)


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    """I05: what is still held after 50 more steps is what was held after the first 10."""
    run = Run.start(tmp_path / "run", recipe(save_every=0), decode=decode)
    asyncio.run(run.begin("grpo", FakeEngine(), FakeStream()))

    async def held_after(first: int, last: int) -> int:
        for step in range(first, last):
            run.samples(step, [Group("a", [trajectory([1], [2] * 200, float(i)) for i in range(8)])])
            run.record_evaluation(evaluation("grpo", step, 0.5))
            with run.span("learn"):
                run.count_outcome(OptimOutcome(grad_norm=1.0, applied=applied(0.1)))
            metrics = {f"m{i}": Metric(Reduction.MEAN, 1.0) for i in range(30)}
            await run.end_step(step, metrics, FakeEngine(), FakeStream(), last=False)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = asyncio.run(held_after(1, 11))
        after = asyncio.run(held_after(11, 61))
    finally:
        tracemalloc.stop()
    assert after - before < 5_000, f"{after - before} bytes more after 50 steps"
