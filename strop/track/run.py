"""The run folder, and everything that is recorded into it: spans, outcomes, samples, evaluations, rows, checkpoints.

    recipe.yaml  sessions.jsonl  metrics.jsonl  samples.jsonl  evaluations.jsonl  checkpoints/  export/

A row is written before its step's checkpoint, and on resume every file is cut back to the restored step: a run that was
killed at any moment and resumed has the rows of a run that was not. Nothing here grows with the number of steps.
"""

from __future__ import annotations

import fcntl
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from strop.checkpoint.secrets import hide_secrets, refuse_hidden
from strop.checkpoint.state import RunState, recipe_values
from strop.checkpoint.store import BEST, Checkpoint, Store
from strop.config.loader import dump_recipe
from strop.config.recipe import Recipe
from strop.engines.base import OptimOutcome
from strop.errors import CheckpointError, ConfigError, EngineError
from strop.track import rows
from strop.track.evaluation import Evaluation
from strop.track.rows import Row, RowFile
from strop.track.samples import Decode, choose
from strop.track.sinks import Sink
from strop.track.spans import Clock, Spans
from strop.track.view import NoView, View
from strop.types import Group, Metric, Metrics, Reduction, StreamState, merge_metrics, results

POLICY = "optim"  # what the metrics of the policy's optimizer steps begin with
_LOCK = ".lock"
_log = logging.getLogger(__name__)


class Saved(Protocol):
    """What a run needs of an Engine: to write itself down, and to come back."""

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...


class Position(Protocol):
    """Where a task stream stands, as whoever takes from it says."""

    def state(self) -> StreamState: ...


class Stream(Position, Protocol):
    """A task stream."""

    def restore(self, state: StreamState) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a run is looked at and timed; the defaults show nothing, send nothing."""

    view: View = field(default_factory=NoView)
    sinks: Sequence[Sink] = ()
    clock: Clock = field(default_factory=Clock)


def stages(recipe: Recipe) -> dict[str, int]:
    """The recipe's loops in the order they run, and the steps of each."""
    return {name: loop.steps for name, loop in recipe.loops().items()}


class Run:
    """One run of one recipe in one folder. Make it with `start` or `resume`, and close it (it is a context manager).

    Each stage (loop) counts its own steps from 0: `if await run.begin("grpo", engine, tasks): await grpo.train(...)`.
    """

    def __init__(self, folder: Path, recipe: Recipe, decode: Decode, watch: Watch, resumed: Checkpoint | None) -> None:
        self.folder = folder
        self.recipe = recipe
        self.stage = ""
        self.step = 0  # steps of this stage that are complete
        self.updates = 0  # optimizer steps of this stage that were applied
        self.carried: dict[str, float] = {}  # numbers that this stage's loop takes from step to step
        self.store = Store(folder / "checkpoints", keep=recipe.run.keep)
        self._decode = decode
        self._watch = watch
        self._resumed = resumed
        self._loaded = False
        self._skipped_in_row: dict[str, int] = {}  # by engine; a checkpoint keeps the policy's
        self._best = resumed.state.best_accuracy if resumed is not None else None
        self._improved_at: tuple[str, int] | None = None
        self._optim: Metrics = {}
        self._sampled_tokens = 0
        self._spans = Spans(watch.clock)
        self._process = psutil.Process()
        self._lock = _lock(folder)
        self._metrics = RowFile(folder / rows.METRICS)
        self._samples = RowFile(folder / rows.SAMPLES)
        self._evaluations = RowFile(folder / rows.EVALUATIONS)
        _record_session(folder, resumed)

    @classmethod
    def start(cls, folder: Path, recipe: Recipe, *, decode: Decode, watch: Watch = Watch()) -> Run:
        """A fresh run. ConfigError, and nothing written, when `folder` holds anything already.

        `decode` turns token ids [T] into text, for the samples.
        """
        refuse_hidden(recipe)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".partial-{rows.RECIPE}"  # all that a kill within this method can leave
        if used := sorted(path.name for path in folder.iterdir() if path != partial):
            raise ConfigError(
                f"run.folder={folder} is not empty (it holds {', '.join(used[:4])}{', ...' if len(used) > 4 else ''}): "
                "resume that run, or give another folder"
            )
        partial.write_text(dump_recipe(hide_secrets(recipe)), "utf-8")
        partial.rename(folder / rows.RECIPE)
        return cls(folder, recipe, decode, watch, None)

    @classmethod
    def resume(cls, folder: Path, recipe: Recipe, *, decode: Decode, watch: Watch = Watch()) -> Run:
        """Go on from the newest whole checkpoint, or from the beginning when none had been saved yet.

        Rows after the restored step are cut away. CheckpointError when `folder` holds no run or another recipe's, when
        no checkpoint of it is whole, or when it is in use.
        """
        refuse_hidden(recipe)
        if not (folder / rows.RECIPE).is_file():
            raise CheckpointError(f"{folder} holds no run to resume: it has no {rows.RECIPE}")
        store = Store(folder / "checkpoints", keep=recipe.run.keep)
        checkpoint = store.latest()
        if checkpoint is None and (names := store.names()):
            raise CheckpointError(f"no checkpoint in {store.folder} is whole ({', '.join(names)}): start a new run")
        if checkpoint is not None:
            checkpoint.state.check_recipe(recipe)
        else:
            _log.warning("%s has no checkpoint yet: the run begins again", folder)
        with _lock(folder):
            for name in (rows.METRICS, rows.SAMPLES, rows.EVALUATIONS, rows.EXPERTS):
                rows.keep_rows(folder / name, _until(checkpoint, list(stages(recipe))))
        return cls(folder, recipe, decode, watch, checkpoint)

    async def begin(self, stage: str, engine: Saved, tasks: Stream) -> bool:
        """Enter a stage; False when it was complete before the resume, so that its loop must not run.

        A resumed run loads `engine` (the same one for all stages) at its first stage that is not over, `tasks` in the
        stage that was interrupted; then `step` and `updates` say where the loop goes on.
        """
        order = list(stages(self.recipe))
        if stage not in order:
            raise ValueError(f"the recipe has no stage {stage!r}; it has {', '.join(order)}")
        state = self._resumed.state if self._resumed is not None else None
        if state is not None and order.index(stage) < order.index(state.stage):
            return False
        if self._resumed is not None and not self._loaded:
            await engine.load(self._resumed.engine)
            self._loaded = True
        here = state if state is not None and state.stage == stage else None
        if here is not None:
            tasks.restore(here.stream)
        self.stage = stage
        self.step = here.step if here is not None else 0
        self.updates = here.updates if here is not None else 0
        self.carried = dict(here.carried) if here is not None else {}
        self._skipped_in_row = {POLICY: here.skipped_in_row if here is not None else 0}
        if here is not None and here.done:
            return False
        for sink in self._watch.sinks:
            sink.begin(stage, self.step)
        self._watch.view.begin(stage, self.step, stages(self.recipe)[stage])
        self._spans.restart()
        return True

    def start_of(self, stage: str) -> Path | None:
        """The engine folder (for `Engine.load`) that `stage` began from; None: it began from the recipe's own model.

        A frozen reference of a later stage is loaded from here, before a resume and after it.
        """
        order = list(stages(self.recipe))
        if order.index(stage) == 0:
            return None
        before = order[order.index(stage) - 1]
        checkpoint = self.store.pinned(_end_of(before))
        if checkpoint is None:
            raise CheckpointError(f"{self.store.folder} has no checkpoint of the end of {before}, where {stage} began")
        return checkpoint.engine

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Charge the wall and CPU seconds of the block to phase `name` of the current step."""
        self._watch.view.phase(name)
        with self._spans.span(name):
            yield

    def count_outcome(self, outcome: OptimOutcome, engine: str = POLICY) -> None:
        """Record what an optimizer step did; `updates` counts the applied ones, so a skip does not move the schedule.

        `engine` is its name in the metrics; those of another engine than the policy do not move `updates`. EngineError
        after `engine.max_skipped_steps` skipped ones of one engine in a row, naming the reason.
        """
        counted: Metrics = {f"{engine}/skipped": Metric(Reduction.SUM, float(outcome.skipped))}
        if not outcome.skipped:
            counted[f"{engine}/grad_norm"] = Metric(Reduction.MEAN, outcome.grad_norm)
            counted |= _rates(outcome, engine)
        self._optim = merge_metrics([self._optim, counted])
        if not outcome.skipped:
            self.updates += engine == POLICY
            self._skipped_in_row[engine] = 0
            return
        in_row = self._skipped_in_row[engine] = self._skipped_in_row.get(engine, 0) + 1
        _log.warning("%s step skipped after step %d of %s: %s", engine, self.step, self.stage, outcome.reason)
        limit = self.recipe.engine.max_skipped_steps
        if in_row >= limit:
            raise EngineError(
                f"{in_row} optimizer steps in a row were skipped ({outcome.reason}) after step "
                f"{self.step} of {self.stage}, and engine.max_skipped_steps={limit}: try a lower schedule.lr or "
                "schedule.max_grad_norm"
            )

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """Count the step's sampled tokens, and write `run.samples_per_step` readable attempts."""
        self._sampled_tokens += sum(trajectory.num_sampled for group in groups for trajectory in group)
        seed = f"{self.recipe.seed}/{self.stage}/{step}"  # so that a resumed run chooses as it would have
        chosen = choose(groups, self.recipe.run.samples_per_step, seed, self._decode)
        for sample in chosen:
            self._samples.append({"stage": self.stage, "step": step} | asdict(sample))
        self._watch.view.samples(chosen)

    def expert_load(self, step: int, layers: Sequence[int], counts_LE: NDArray[np.int64]) -> None:
        """Write how often each expert of these decoder layers was taken in a step, for the report's map."""
        file = RowFile(self.folder / rows.EXPERTS)  # opened when there is something: most runs have no experts
        file.append({"stage": self.stage, "step": step, "layers": list(layers), "counts": counts_LE.tolist()})
        file.sync()
        file.close()

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation; when it is the best so far, the `end_step` of its step saves a checkpoint.

        ValueError when it says that it was made in another stage than the one that runs.
        """
        if evaluation.stage != self.stage:
            raise ValueError(f"the evaluation says stage {evaluation.stage!r}, the run is in {self.stage!r}")
        values = rows.finite(
            {
                "evaluate/sampled_accuracy": evaluation.sampled_accuracy,
                "evaluate/mean_reward": evaluation.mean_reward,
                "evaluate/mean_tokens": evaluation.mean_tokens,
            }
            | ({} if evaluation.greedy_accuracy is None else {"evaluate/greedy_accuracy": evaluation.greedy_accuracy})
            | {f"evaluate/pass_at_{k}": value for k, value in evaluation.pass_at_k.items()}
        )
        self._evaluations.append(_evaluation_row(evaluation))
        for sink in self._watch.sinks:
            sink.log(evaluation.step, values)
        self._watch.view.evaluation(evaluation)
        if self._best is None or evaluation.sampled_accuracy > self._best:
            self._best = evaluation.sampled_accuracy
            self._improved_at = (evaluation.stage, evaluation.step)

    async def end_step(self, step: int, metrics: Metrics, engine: Saved, tasks: Position, last: bool) -> None:
        """Write the step's row, tell sinks and view, and save a checkpoint when one is due.

        One is due every `run.save_every` steps, after the last, and when held-out accuracy is better than ever. Its
        time is charged to the next step as `time/save`. `last` ends the stage, whatever its planned number of steps.
        """
        trained = metrics[rows.LOSS].count if rows.LOSS in metrics else 0.0
        tokens = self._sampled_tokens or float(trained)
        row = self._row(step, results(merge_metrics([metrics, self._optim])), tokens)
        self._metrics.append(row)
        self.step = step
        self._optim = {}
        self._sampled_tokens = 0
        for sink in self._watch.sinks:
            sink.log(step, {key: value for key, value in row.items() if key not in ("stage", "step")})
        self._watch.view.row(row)
        best = self.recipe.evaluate.keep_best and self._improved_at == (self.stage, step)
        every = self.recipe.run.save_every
        if last or best or (every and step % every == 0):
            with self.span("save"):
                await self._save(engine, tasks, best=best, last=last)

    def close(self) -> None:
        """Close files, sinks and the view. A run that was not closed loses nothing."""
        self._watch.view.close()
        for sink in self._watch.sinks:
            sink.close()
        for file in (self._metrics, self._samples, self._evaluations, self._lock):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _row(self, step: int, values: dict[str, float], tokens: float) -> Row:
        seconds, phases = self._spans.take()
        working = seconds - sum(phases.get(phase, 0.0) for phase in rows.ASIDE)
        rate = {rows.RATE: tokens / working} if tokens and working > 0 else {}
        resident = self._process.memory_info().rss / 2**20
        memory = {rows.RSS: resident, rows.PEAK_RSS: max(resident, _peak_rss_mb())}  # two clocks of the kernel's
        return {"stage": self.stage, "step": step} | rows.finite(
            values | {rows.STEP_TIME: seconds} | phases | rate | memory
        )

    async def _save(self, engine: Saved, tasks: Position, *, best: bool, last: bool) -> None:
        followed = last and self.stage != list(stages(self.recipe))[-1]
        pins = (*((BEST,) if best else ()), *((_end_of(self.stage),) if followed else ()))
        for file in (self._metrics, self._samples, self._evaluations):
            file.sync()  # rows up to this step must not be lost to a power cut that spares the checkpoint
        state = RunState(
            stage=self.stage,
            step=self.step,
            done=last,
            updates=self.updates,
            skipped_in_row=self._skipped_in_row.get(POLICY, 0),
            stream=tasks.state(),
            carried=self.carried,
            best_accuracy=self._best,
            recipe=recipe_values(self.recipe),
        )
        await self.store.save(engine.save, state, pins)


def _rates(outcome: OptimOutcome, engine: str) -> Metrics:
    """The learning rate, and each group's own where they differ: then the first is the largest of them."""
    by_group = {f"{engine}/lr/{name}": applied.lr for name, applied in outcome.applied.items()}
    rates = {f"{engine}/lr": max(by_group.values())} | (by_group if len(set(by_group.values())) > 1 else {})
    return {name: Metric(Reduction.MEAN, rate) for name, rate in rates.items()}


def _end_of(stage: str) -> str:
    return f"end-of-{stage}"


def _until(checkpoint: Checkpoint | None, order: list[str]) -> Callable[[Row], bool]:
    """Whether a row belongs to a run that stands at `checkpoint`; without one nothing does."""
    if checkpoint is None:
        return lambda row: False
    here = (order.index(checkpoint.state.stage), checkpoint.state.step)
    return lambda row: (order.index(row["stage"]), row["step"]) <= here


def _evaluation_row(evaluation: Evaluation) -> Row:
    row: dict[str, Any] = asdict(evaluation)
    numbers = rows.finite({"mean_reward": evaluation.mean_reward, "mean_tokens": evaluation.mean_tokens})
    answers = [a | {"reward": a["reward"] if math.isfinite(a["reward"]) else None} for a in row["answers"]]
    return row | {"mean_reward": None, "mean_tokens": None} | numbers | {"answers": answers}


def _record_session(folder: Path, resumed: Checkpoint | None) -> None:
    """One row for each start and resume: when, from where, with which versions."""
    session = RowFile(folder / rows.SESSIONS)
    packages = ("strop", "torch", "transformers", "numpy")
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    session.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "stage": resumed.state.stage if resumed is not None else None,
            "step": resumed.state.step if resumed is not None else 0,
            "python": sys.version.split()[0],
            "versions": versions,
        }
    )
    session.close()


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _lock(folder: Path) -> IO[bytes]:
    """Hold the folder for this process; the kernel lets go when the process ends, however it ends."""
    file = open(folder / _LOCK, "ab")  # noqa: SIM115 - held for the whole run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise CheckpointError(f"{folder} is in use by another running process: wait for it, or stop it") from error
    except OSError as error:
        _log.warning("%s cannot be locked (%s): make sure that only one process runs there", folder, error)
    return file


def _peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere
