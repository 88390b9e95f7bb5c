"""Whole recipes on a real Ray in which something breaks: they end or go on as the recipe says, name the cause, and
learn from every group once (`make ray`).

The cluster has room for one run and no more: what a restart needs is what the processes before it gave back.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray as ray_library

from strop import recipe as runner
from strop.checkpoint.store import Store
from strop.config.loader import load_recipe
from strop.data.stream import TaskStream
from strop.errors import RolloutError
from strop.parts import Parts
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.rollout.ray import Host, RaySampler
from strop.rollout.router import Router
from strop.runtime.ranks import WHOLE, RankError
from strop.runtime.ray import Rank, RayRanks
from strop.runtime.remote_engine import RemoteEngine
from strop.track.run import Run
from tests.ray.test_ray import pid_of
from tests.unit.loops.test_recipe import RECIPE, numbers, rows

ray: Any = ray_library  # its own annotations leave most of it out
CPUS = 0.25  # of a rank, and of a sampler
RANKS, SAMPLERS, STEPS, TASKS, ATTEMPTS = 2, 2, 4, 6, 4
LOOP = (
    f"steps: {STEPS}, tasks_per_step: {TASKS}, group_size: {ATTEMPTS}, updates_per_step: 2, "
    "drop_uniform_groups: false, schedule: {lr: 3e-3}"
)
GRPO, ASYNC = f"grpo={{{LOOP}}}", f"async_grpo={{{LOOP}, max_lag: 2}}"
OVER_RAY = [
    f"engine.parallel.data={RANKS}",
    f"engine.runtime={{kind: ray, cpus_per_rank: {CPUS}, timeout_s: 120}}",
    f"sampler.actors={SAMPLERS}",
]
RECORDED = ["run.save_every=1", "run.keep=9", "run.samples_per_step=999", "run.live=false", "evaluate.every=0"]

Break = Callable[[Parts], None]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=(RANKS + SAMPLERS) * CPUS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def given_back(cluster: None) -> Iterator[None]:
    yield
    until(lambda: ray.available_resources().get("CPU") == (RANKS + SAMPLERS) * CPUS, "what the run was given")


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not after a minute"
        time.sleep(0.05)


def train(folder: Path, loop: str, *more: str, resume: bool = False) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.partition("grpo:")[0])
    overrides = [loop, f"run.folder={folder}/run", *OVER_RAY, *RECORDED, *more]
    runner.train(load_recipe(path, overrides), path, resume=resume)
    return folder / "run"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[Break], list[Parts]]:
    """Have the next run broken before its first loop, and not again when it goes on, from the checkpoint of step 1.
    What is called gives the parts of each start."""
    honest = runner.run_loops

    def prepare(break_: Break) -> list[Parts]:
        starts: list[Parts] = []

        async def run_loops(parts: Parts, run: Run) -> None:
            starts.append(parts)
            if len(starts) == 1:
                break_(parts)
            else:
                assert_intact(run.folder, 1)
            await honest(parts, run)

        monkeypatch.setattr(runner, "run_loops", run_loops)
        return starts

    return prepare


def rank_actors(parts: Parts) -> list[Any]:
    assert isinstance(parts.engine, RemoteEngine) and isinstance(parts.engine._ranks, RayRanks)
    return parts.engine._ranks._actors


def router_of(parts: Parts) -> Router:
    assert isinstance(parts.sampler, Router)
    return parts.sampler


def signal_in(rank: Rank, method: str, call: int, how: signal.Signals) -> None:
    """In a rank: get a signal in the midst of a call, while the others wait for what it computes."""
    assert rank._server is not None
    methods, calls = rank._server._methods[WHOLE], count(1)
    honest = methods[method]

    async def deadly(*arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), how)
        return await honest(*arguments)

    methods[method] = deadly


def break_rank(how: signal.Signals, parts: Parts, *, timeout_s: float | None = None) -> None:
    """Rank 1, in the second of the two gradients of step 2: the first has changed the weights."""
    ray.get(rank_actors(parts)[1].__ray_call__.remote(signal_in, "forward_backward", 4, how))
    if timeout_s is not None:
        assert isinstance(parts.engine, RemoteEngine) and isinstance(parts.engine._ranks, RayRanks)
        parts.engine._ranks._timeout_s = timeout_s


def kill_in(host: Host, version: int, passes: int) -> None:
    """In a sampler: die once so many tokens of each running request are drawn with weights of `version` or later."""
    sampler, done = host.sampler, count(1)
    assert isinstance(sampler, BuiltinSampler)
    honest = sampler._step

    def deadly() -> None:
        honest()
        if sampler.version >= version and next(done) == passes:
            assert sampler._scheduler.busy, "killed when it had nothing to do"
            os.kill(os.getpid(), signal.SIGKILL)

    sampler._step = deadly


def kill_samplers(which: list[int], parts: Parts) -> None:
    """While the attempts of step 2 are being drawn."""
    for i in which:
        sampler = router_of(parts)._samplers[i]
        assert isinstance(sampler, RaySampler)
        ray.get(sampler.actor.__ray_call__.remote(kill_in, 1, 3))


def full_disk_in(rank: Rank, save: int) -> None:
    """In a rank: no file may grow beyond a few kilobytes in this call of save, as on a disk that is full."""
    assert rank._server is not None
    methods, calls = rank._server._methods[WHOLE], count(1)
    honest = methods["save"]

    async def cramped(folder: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if next(calls) == save:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            await honest(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    methods["save"] = cramped


def fill_disk(parts: Parts) -> None:
    ray.get(rank_actors(parts)[0].__ray_call__.remote(full_disk_in, 2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to which nothing happens."""
    return train(tmp_path_factory.mktemp("whole"), GRPO)


def attempts(folder: Path) -> Counter[tuple[Any, ...]]:
    """Every attempt that was learned from."""
    return Counter((row["step"], row["task_id"], row["reply"], row["reward"]) for row in rows(folder, "samples.jsonl"))


def assert_same(found: Path, whole: Path) -> None:
    """The same attempts at the same tasks in the same steps, none of them twice, and the same was learned from them."""
    assert attempts(found) == attempts(whole)
    assert len(numbers(found)) == len(numbers(whole)) == STEPS
    for one, other in zip(numbers(found), numbers(whole), strict=True):
        assert one.pop("stage") == other.pop("stage")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def assert_intact(folder: Path, step: int) -> None:
    """The newest checkpoint is that of this step, whole, and nothing lies beside the older ones."""
    store = Store(folder / "checkpoints", keep=9)
    newest = store.latest()
    assert newest is not None and newest.state.step == step
    assert [path.name for path in store.folder.iterdir() if path.name.startswith(".")] == []
    assert [store.load(name).state.step for name in store.names()] == list(range(1, step + 1))


def test_nothing_is_missing_where_nothing_happens(whole: Path) -> None:
    """What the other tests count against."""
    of_task = Counter((row["step"], row["task_id"]) for row in rows(whole, "samples.jsonl"))
    assert set(of_task.values()) == {ATTEMPTS} and len(of_task) == STEPS * TASKS
    assert len({task for _, task in of_task}) == STEPS * TASKS, "a task twice in an epoch"
    assert len(attempts(whole)) > 0.9 * STEPS * TASKS * ATTEMPTS, "attempts cannot be told apart"
    assert_intact(whole, STEPS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_that_loses_a_rank_goes_on_by_itself_and_is_the_whole_one(
    how: signal.Signals, whole: Path, tmp_path: Path, started: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = started(partial(break_rank, how, timeout_s=None if how is signal.SIGKILL else 5.0))
    folder = train(tmp_path, GRPO, "run.restarts=1")
    assert len(starts) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "from the newest checkpoint on, restarts left: 0; rank 1 " in said
    assert [row["step"] for row in rows(folder, "sessions.jsonl")] == [0, 1], "from the checkpoint of step 1 on"
    assert_same(folder, whole)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (signal.SIGKILL, r"^rank 1 died in forward_backward: .*actor died"),
        (signal.SIGSTOP, r"^rank 1 did not answer forward_backward within 5 s and hangs; rank 0 "),
    ],
    ids=["killed", "stopped"],
)
def test_a_run_that_loses_a_rank_ends_and_names_it(
    how: signal.Signals, says: str, tmp_path: Path, started: Any
) -> None:
    pids: list[int] = []

    def break_(parts: Parts) -> None:
        pids.extend(pid_of(actor) for actor in rank_actors(parts))
        break_rank(how, parts, timeout_s=5.0)

    started(break_)
    with pytest.raises(RankError, match=says):
        train(tmp_path, GRPO)
    assert_intact(tmp_path / "run", 1)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"ranks {pids} ended")


def test_a_run_that_loses_a_sampler_goes_on_and_is_the_whole_one(whole: Path, tmp_path: Path, started: Any) -> None:
    starts = started(partial(kill_samplers, [0]))
    folder = train(tmp_path, GRPO)
    assert len(starts) == 1 and list(router_of(starts[0]).lost) == [0]
    assert_same(folder, whole)


def test_attempts_drawn_ahead_are_each_learned_from_once_when_a_sampler_is_lost(tmp_path: Path, started: Any) -> None:
    """As many tasks as there are to a step, each in one step alone, and those that the stream began with."""
    starts = started(partial(kill_samplers, [0]))
    folder = train(tmp_path, ASYNC)
    (parts,) = starts
    assert list(router_of(parts).lost) == [0]
    assert max(row["async/lag_max"] for row in rows(folder)) > 0, "nothing was drawn ahead"
    assert [row["async/given_up"] for row in rows(folder)] == [0] * STEPS
    of_task = Counter((row["step"], row["task_id"]) for row in rows(folder, "samples.jsonl"))
    assert set(of_task.values()) == {ATTEMPTS}
    assert Counter(step for step, _ in of_task) == dict.fromkeys(range(1, STEPS + 1), TASKS)
    stream = TaskStream(parts.train_tasks, seed=parts.recipe.seed)
    assert sorted(task for _, task in of_task) == sorted(task.id for task in stream.take(STEPS * TASKS))


@pytest.mark.parametrize("loop", [GRPO, ASYNC], ids=["grpo", "async_grpo"])
def test_a_run_that_loses_all_samplers_names_them_and_can_be_resumed(
    loop: str, whole: Path, tmp_path: Path, started: Any
) -> None:
    started(partial(kill_samplers, [0, 1]))
    with pytest.raises(
        RolloutError, match=r"(?s)^no sampler is left: 0: its actor died.*; 1: its actor died"
    ) as caught:
        train(tmp_path, loop, "run.restarts=1")
    assert str(caught.value).count("its actor died") == SAMPLERS, "each is named once"
    assert_intact(tmp_path / "run", 1)
    if loop == GRPO:
        assert_same(train(tmp_path, loop, resume=True), whole)


def test_a_full_disk_is_named_and_what_was_there_stays(
    whole: Path, tmp_path: Path, started: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the run goes on there is room again."""
    starts = started(fill_disk)
    folder = train(tmp_path, GRPO, "run.restarts=1")
    assert len(starts) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "restarts left: 0; rank 0 " in said
    assert "model.safetensors cannot be written: " in said and "File too large" in said
    assert_same(folder, whole)
