"""The command line: strop train | plan | eval | export | report | doctor.

Exit codes: 0 done; 1 a run failed; 2 the request cannot be run as written (one sentence for each mistake, on stderr,
and nothing was written); 130 stopped with Ctrl-C. What needs torch is imported inside the commands, so help comes at
once.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from strop.errors import CheckpointError, ConfigError, DataError, StropError

if TYPE_CHECKING:
    from strop.checkpoint.store import Checkpoint, Store
    from strop.config.recipe import Recipe

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its line of help, its arguments and what it does with them."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors that strop raises on purpose are printed without a traceback."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return COMMANDS[options.command].run(options)
    except (ConfigError, DataError) as error:
        print(*(f"strop: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return REFUSED
    except StropError as error:
        print(f"strop: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("strop: stopped", file=sys.stderr)
        return INTERRUPTED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments. Exits with code 2 and a sentence on stderr when they are wrong.

    Options and overrides may stand in any order; options are never abbreviated.
    """
    parser = _Parser(prog="strop", allow_abbrev=False, description="Reinforcement learning for language models.")
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the following")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="strop COMMAND --help tells more")
    width = max(map(len, COMMANDS))
    parser.epilog = "commands:\n" + "\n".join(f"  {name:<{width}}  {c.help}" for name, c in COMMANDS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = parser.parse_args(arguments)
    command = COMMANDS[options.command]
    inner = _Parser(prog=f"strop {options.command}", allow_abbrev=False, description=command.help)
    command.arguments(inner)
    return inner.parse_intermixed_args(options.rest, argparse.Namespace(command=options.command))


class _Parser(argparse.ArgumentParser):
    """Wrong usage in one sentence, with the nearest command."""

    def error(self, message: str) -> NoReturn:
        if "argument COMMAND: invalid choice" in message:
            given = message.split("'")[1]
            near = get_close_matches(given, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
            message = f"there is no command {given}: {hint}"
        self.exit(REFUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"strop {version('strop')}"
    except PackageNotFoundError:
        return "strop, run from a source folder"


# Commands -------------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    from strop.config.loader import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    try:
        from strop.plan import plan

        plan(recipe, options.recipe, resume=options.resume, may_fetch=True)
        from strop.recipe import train

        return train(recipe, options.recipe, resume=options.resume)
    except KeyboardInterrupt:
        print(f"\nstrop: stopped; {_where_it_stands(recipe, options)}", file=sys.stderr)
        return INTERRUPTED


def _plan(options: argparse.Namespace) -> int:
    from strop.config.loader import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from strop.plan import plan

    print(plan(recipe, options.recipe, resume=options.resume))
    return DONE


def _eval(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    recipe, path, checkpoint = _recipe_or_run(options)
    from strop.recipe import evaluate

    found = evaluate(recipe, path, checkpoint.engine if checkpoint is not None else None)
    table = Table("measure", "value", title=f"{path} {_named(checkpoint)}")
    for name, value in found.items():
        table.add_row(name, "-" if value is None else f"{value:.4g}")
    Console().print(table)
    return DONE


def _export(options: argparse.Namespace) -> int:
    recipe, path = _recipe_of(options.run)
    checkpoint = find_checkpoint(_store(recipe, options.run), options.checkpoint)
    if options.to.exists() and (not options.to.is_dir() or any(options.to.iterdir())):
        raise ConfigError(f"--to {options.to} exists already and is not an empty folder: give another one")
    from strop.recipe import export

    print(f"wrote {export(recipe, path, checkpoint.engine, options.to)} {_named(checkpoint)}")
    return DONE


def _report(options: argparse.Namespace) -> int:
    _recipe_of(options.run)
    from strop.track.report import write_report

    print(f"wrote {write_report(options.run)}")
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from strop.doctor import doctor

    return DONE if doctor() else FAILED


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe file")
    _takes_overrides(parser)


OVERRIDE = "a key of the recipe and its value, as YAML; or a file whose keys go over the recipe's"


def _takes_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDE)


def _takes_train(parser: argparse.ArgumentParser) -> None:
    _takes_recipe(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run folder")


def _takes_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", type=Path, metavar="RECIPE|RUN", help="a recipe file, or a run folder")
    _takes_overrides(parser)
    _takes_checkpoint(parser, "of a run folder: ")


def _takes_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    _takes_checkpoint(parser, "")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder for the model")


def _takes_checkpoint(parser: argparse.ArgumentParser, prefix: str) -> None:
    text = f"{prefix}best (the default), last, or a step"
    parser.add_argument("--checkpoint", default=None, metavar="best|last|N", help=text)


def _takes_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")


COMMANDS = {
    "train": Command("run a recipe: check it, train, evaluate, export, report", _takes_train, _train),
    "plan": Command("check a recipe and print the run that it would do; writes nothing", _takes_train, _plan),
    "eval": Command("measure held-out accuracy of a recipe's model or of a run's checkpoint", _takes_eval, _eval),
    "export": Command("write a run's checkpoint as a Hugging Face folder", _takes_export, _export),
    "report": Command("write a run's report page", _takes_report, _report),
    "doctor": Command("say what this machine can run, and what to install", lambda parser: None, _doctor),
}


# Run folders ----------------------------------------------------------------------------------------------------------


def find_checkpoint(store: Store, wanted: str | None) -> Checkpoint:
    """The checkpoint that `--checkpoint` names: best (None too), last, or the step it was saved after.

    CheckpointError when there is none; ConfigError when `wanted` is none of these.
    """
    if wanted in (None, "best"):
        checkpoint = store.pinned("best")
        missing = (
            f"no checkpoint in {store.folder} is the best: none was better than the model that the run began with, or "
            "evaluate.keep_best is off; give --checkpoint last"
        )
    elif wanted == "last":
        checkpoint, missing = store.latest(), f"there is no checkpoint in {store.folder}: the run has saved none yet"
    elif wanted.isdecimal():
        names = [name for name in store.names() if name.rpartition("-")[2] == str(int(wanted))]
        checkpoint = store.load(names[-1]) if names else None
        missing = (
            f"no checkpoint in {store.folder} is of step {wanted}; there are: {', '.join(store.names()) or 'none'}"
        )
    else:
        raise ConfigError(f"--checkpoint {wanted}: it must be best, last, or a step, like 40")
    if checkpoint is None:
        raise CheckpointError(missing)
    return checkpoint


def _recipe_of(run: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, Path]:
    """A run folder's resolved recipe, and where it lies."""
    from strop.config.loader import load_recipe
    from strop.track.rows import RECIPE

    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder: give the folder of a run, like runs/quickstart")
    if not (run / RECIPE).is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no {RECIPE}")
    return load_recipe(run / RECIPE, overrides), run / RECIPE


def _recipe_or_run(options: argparse.Namespace) -> tuple[Recipe, Path, Checkpoint | None]:
    from strop.config.loader import load_recipe

    if options.what.is_dir():
        recipe, path = _recipe_of(options.what, options.overrides)
        return recipe, path, find_checkpoint(_store(recipe, options.what), options.checkpoint)
    if options.checkpoint is not None:
        raise ConfigError(f"--checkpoint {options.checkpoint} needs a run folder, and {options.what} is not a folder")
    return load_recipe(options.what, options.overrides), options.what, None


def _store(recipe: Recipe, run: Path) -> Store:
    from strop.checkpoint.store import Store

    return Store(run / "checkpoints", keep=recipe.run.keep)


def _named(checkpoint: Checkpoint | None) -> str:
    return "(its own model)" if checkpoint is None else f"({checkpoint.folder.name})"


def _where_it_stands(recipe: Recipe, options: argparse.Namespace) -> str:
    """What an interrupted run left behind, and how to go on."""
    folder = Path(recipe.run.folder)
    if not folder.exists():
        return "the run had not begun and nothing was written"
    names = _store(recipe, folder).names()
    again = shlex.join(["strop", "train", str(options.recipe), *options.overrides, "--resume"])
    if not names:
        return f"{folder} has no checkpoint yet; begin again with: {again}"
    return f"the newest checkpoint in {folder} is {names[-1]}; go on from it with: {again}"


if __name__ == "__main__":
    sys.exit(main())
