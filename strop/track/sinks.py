"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from strop.checkpoint.state import recipe_values
from strop.config.recipe import Recipe
from strop.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter
    from wandb import Run as WandbRun


class Sink(Protocol):
    """Told of every row. Nothing is written before `begin`."""

    def begin(self, stage: str, step: int) -> None:
        """A stage begins, or goes on from `step`."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def build_sinks(recipe: Recipe, folder: Path) -> list[Sink]:
    """The sinks that the recipe asks for, writing into the run folder once they begin.

    They see the recipe without its secrets. ConfigError names every package that is missing, and how to install it.
    """
    problems = [
        f"run.track: {package} is a package that is not installed: pip install 'strop[track]'"
        for package in recipe.run.track
        if find_spec(package) is None
    ]
    if problems:
        raise ConfigError(*problems)
    kinds = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [kinds[package](folder, recipe_values(recipe)) for package in dict.fromkeys(recipe.run.track)]


class TensorBoard:
    """Event files under `tensorboard/<stage>`: each stage is a TensorBoard run with its own steps."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._writer: SummaryWriter | None = None

    def begin(self, stage: str, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.close()
        # purge_step hides what a killed run logged after the step that was restored.
        self._writer = SummaryWriter(str(self._folder / "tensorboard" / stage), purge_step=step + 1 if step else None)
        if not step:
            # Four spaces make it a block of code in TensorBoard's Markdown.
            self._writer.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in self._config.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            raise RuntimeError("log before begin")
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """An offline run under `wandb/`, to be sent with `wandb sync`; keys begin with their stage."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._run: WandbRun | None = None
        self._stage = ""

    def begin(self, stage: str, step: int) -> None:
        import wandb

        if self._run is None:
            self._run = wandb.init(
                mode="offline",
                dir=str(self._folder),
                project="strop",
                name=self._folder.name,
                config=dict(self._config),
                settings=wandb.Settings(
                    silent=True, console="off", save_code=False, disable_git=True, x_disable_stats=True
                ),
            )
        self._stage = stage
        # Steps begin again in each stage, and W&B's own step may only grow: every stage brings its own axis.
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            raise RuntimeError("log before begin")
        self._run.log({f"{self._stage}/{key}": value for key, value in values.items()} | {f"{self._stage}/step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
