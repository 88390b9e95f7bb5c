"""The command line: what it refuses, with which exit code, in which words, and that help needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from strop import cli
from strop.checkpoint.store import Checkpoint
from strop.errors import CheckpointError, ConfigError, DataError, EngineError, RolloutError

RECIPE = "model: {path: m}\ntasks: {source: jsonl, path: t.jsonl}\ngrpo: {}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


class Parts(ModuleType):
    """Stands for strop.recipe and strop.plan: records what the command line asks of them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.raises: BaseException | None = None

    def train(self, recipe: Any, path: Path, *, resume: bool) -> int:
        self.calls.append(("train", recipe.seed, path, resume))
        self._maybe_raise()
        return 0

    def plan(self, recipe: Any, path: Path, *, resume: bool, may_fetch: bool = False) -> str:
        self.calls.append(("plan", recipe.seed, path, resume, may_fetch))
        self._maybe_raise()
        return "the plan"

    def evaluate(self, recipe: Any, path: Path, checkpoint: Path | None) -> dict[str, float | None]:
        self.calls.append(("evaluate", recipe.seed, path, checkpoint))
        return {"sampled_accuracy": 0.25, "greedy_accuracy": None}

    def export(self, recipe: Any, path: Path, checkpoint: Path, target: Path) -> Path:
        self.calls.append(("export", path, checkpoint, target))
        return target

    def write_report(self, run: Path) -> Path:
        self.calls.append(("report", run))
        return run / "report.html"

    def _maybe_raise(self) -> None:
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    stand_in = Parts("parts")
    for name in ("strop.recipe", "strop.plan", "strop.track.report"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in


def make_run(folder: Path, *steps: tuple[str, int], best: int | None = None) -> Path:
    """A run folder with whole checkpoints; `best` is the index of the one that is marked."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    for order, (stage, step) in enumerate(steps):
        checkpoint = folder / "checkpoints" / f"{order + 1:06d}-{stage}-{step}"
        (checkpoint / "engine").mkdir(parents=True)
        state = {
            "format": 2,
            "stage": stage,
            "step": step,
            "done": False,
            "updates": step,
            "skipped_in_row": 0,
            "stream": {},
            "carried": {},
            "best_accuracy": None,
            "recipe": {},
        }
        text = json.dumps(state)
        (checkpoint / "state.json").write_text(text)
        from hashlib import sha256

        files = {"state.json": {"bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}}
        pins = ["best"] if best == order else []
        manifest = {"format": 1, "stage": stage, "step": step, "pins": pins, "files": files}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return folder


# Starting -------------------------------------------------------------------------------------------------------------


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_help_needs_neither_torch_nor_pydantic() -> None:
    done = run_python(
        "import sys, strop.cli\n"
        "try: strop.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich', 'ruamel'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    assert "HEAVY []" in done.stdout, done.stderr
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout


def test_a_wrong_recipe_is_refused_before_torch_is_imported(recipe: Path) -> None:
    recipe.write_text(RECIPE + "sede: 1\n")
    done = run_python(
        "import sys, strop.cli\n"
        f"code = strop.cli.main(['train', {str(recipe)!r}, 'x'])\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    assert done.stdout == "2 False\n", done.stderr
    assert done.stderr.splitlines() == [
        "strop: override 'x' must read key.path=value, like grpo.steps=10",
        "strop: unknown key sede: did you mean seed?",
    ]


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: strop {command}" in capsys.readouterr().out


# Wrong usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "strop: there is no command trian: did you mean train?; see strop --help"),
        (["zzz"], "strop: there is no command zzz: the commands are train, plan, eval, export, report, doctor;"),
        ([], "strop: the following arguments are required: COMMAND"),
        (["train"], "strop train: the following arguments are required: RECIPE"),
        (["train", "r.yaml", "--resum"], "strop train: unrecognized arguments: --resum; see strop train --help"),
        (["train", "r.yaml", "--load", "x"], "strop train: unrecognized arguments: --load"),
        (["export", "runs/x", "--t", "out"], "strop export: the following arguments are required: --to"),
        (["doctor", "x"], "strop doctor: unrecognized arguments: x"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    """C04: an option is never taken for a longer one that it begins like."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_options_and_overrides_in_any_order() -> None:
    wanted = (Path("r.yaml"), ["a.b=1", "c=--x"], True)
    for arguments in (
        ["train", "r.yaml", "--resume", "a.b=1", "c=--x"],
        ["train", "--resume", "r.yaml", "a.b=1", "c=--x"],
        ["train", "r.yaml", "a.b=1", "c=--x", "--resume"],
        ["train", "r.yaml", "a.b=1", "--resume", "c=--x"],
    ):
        options = cli.parse(arguments)
        assert (options.recipe, options.overrides, options.resume) == wanted


# Exit codes -----------------------------------------------------------------------------------------------------------


def test_train_plans_first_and_then_trains(recipe: Path, parts: Parts) -> None:
    assert cli.main(["train", str(recipe), "seed=7", "--resume"]) == 0
    assert parts.calls == [("plan", 7, recipe, True, True), ("train", 7, recipe, True)]


def test_plan_prints_and_fetches_nothing(recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(recipe), "seed=7"]) == 0
    assert parts.calls == [("plan", 7, recipe, False, False)]
    assert capsys.readouterr().out == "the plan\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a is 1", "b is 2"), 2, "strop: a is 1\nstrop: b is 2\n"),
        (DataError("tasks.jsonl, line 3: not JSON"), 2, "strop: tasks.jsonl, line 3: not JSON\n"),
        (RolloutError("too many episodes failed"), 1, "strop: too many episodes failed\n"),
        (EngineError("no steps"), 1, "strop: no steps\n"),
        (CheckpointError("damaged"), 1, "strop: damaged\n"),
    ],
)
def test_errors_on_purpose_are_sentences_without_a_traceback(
    recipe: Path, parts: Parts, error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.raises = error
    assert cli.main(["train", str(recipe)]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


def test_programming_errors_keep_their_traceback(recipe: Path, parts: Parts) -> None:
    parts.raises = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", str(recipe)])


def test_a_wrong_recipe_writes_nothing(tmp_path: Path, recipe: Path, parts: Parts) -> None:
    recipe.write_text(RECIPE + "sede: 1\n")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["train", str(recipe)]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert parts.calls == []


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


def test_stopped_before_anything_was_written(recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    parts.raises = KeyboardInterrupt()
    assert cli.main(["train", str(recipe)]) == 130
    assert capsys.readouterr().err == "\nstrop: stopped; the run had not begun and nothing was written\n"


def test_stopped_before_the_first_checkpoint(recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(recipe.parent / "runs" / "r")
    parts.raises = KeyboardInterrupt()
    assert cli.main(["train", str(recipe)]) == 130
    assert f"has no checkpoint yet; begin again with: strop train {recipe} --resume" in capsys.readouterr().err


def test_stopped_with_a_checkpoint_says_how_to_go_on(
    recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(recipe.parent / "runs" / "r", ("sft", 5), ("grpo", 10))
    parts.raises = KeyboardInterrupt()
    assert cli.main(["train", str(recipe), "grpo.steps=20", "draw.stop=[a b]"]) == 130
    said = capsys.readouterr().err
    assert f"the newest checkpoint in {run} is 000002-grpo-10" in said
    assert f"strop train {recipe} grpo.steps=20 'draw.stop=[a b]' --resume" in said


# Run folders ----------------------------------------------------------------------------------------------------------


def found(run: Path, wanted: str | None) -> Checkpoint:
    from strop.checkpoint.store import Store

    return cli.find_checkpoint(Store(run / "checkpoints", keep=9), wanted)


def test_checkpoints_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ("sft", 5), ("grpo", 10), ("grpo", 20), best=1)
    assert found(run, None).folder.name == "000002-grpo-10"
    assert found(run, "best").folder.name == "000002-grpo-10"
    assert found(run, "last").folder.name == "000003-grpo-20"
    assert found(run, "20").folder.name == "000003-grpo-20"
    assert found(run, "5").folder.name == "000001-sft-5"


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        ("best", CheckpointError, "is the best: none was better .* give --checkpoint last"),
        ("0", CheckpointError, "is of step 0; there are: 000001-grpo-10"),
        ("1", CheckpointError, "is of step 1; there are: 000001-grpo-10"),
        ("newest", ConfigError, "--checkpoint newest: it must be best, last, or a step"),
        ("-1", ConfigError, "--checkpoint -1: it must be best, last, or a step"),
    ],
)
def test_checkpoints_that_are_not_there(tmp_path: Path, wanted: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        found(make_run(tmp_path / "run", ("grpo", 10)), wanted)


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the run has saved none yet"):
        found(make_run(tmp_path / "run"), "last")


def test_eval_of_a_recipe_and_of_a_run(
    recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", ("grpo", 10), best=0)
    assert cli.main(["eval", str(recipe), "seed=3"]) == 0
    assert cli.main(["eval", str(run), "seed=4"]) == 0
    engine = run / "checkpoints" / "000001-grpo-10" / "engine"
    assert parts.calls == [("evaluate", 3, recipe, None), ("evaluate", 4, run / "recipe.yaml", engine)]
    printed = capsys.readouterr().out
    assert "sampled_accuracy" in printed and "0.25" in printed


def test_a_checkpoint_of_a_recipe_makes_no_sense(
    recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(recipe), "--checkpoint", "last"]) == 2
    assert "--checkpoint last needs a run folder" in capsys.readouterr().err


def test_export(tmp_path: Path, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = make_run(tmp_path / "run", ("grpo", 10)), tmp_path / "out"
    assert cli.main(["export", str(run), "--checkpoint", "10", "--to", str(target)]) == 0
    engine = run / "checkpoints" / "000001-grpo-10" / "engine"
    assert parts.calls == [("export", run / "recipe.yaml", engine, target)]
    target.mkdir()
    (target / "x").touch()
    assert cli.main(["export", str(run), "--checkpoint", "last", "--to", str(target)]) == 2
    assert "exists already and is not an empty folder" in capsys.readouterr().err
    assert len(parts.calls) == 1


@pytest.mark.parametrize("command", [["report"], ["export", "--to", "out"]])
def test_what_is_no_run_folder_is_refused(
    command: list[str], recipe: Path, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    assert cli.main([name, "nowhere", *rest]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert cli.main([name, str(recipe.parent), *rest]) == 2
    assert "is not the folder of a run: it has no recipe.yaml" in capsys.readouterr().err
    assert parts.calls == []


def test_report(tmp_path: Path, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run)]) == 0
    assert parts.calls == [("report", run)]
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"


# The code as a whole --------------------------------------------------------------------------------------------------


def test_code_inside_a_model_folder_never_runs() -> None:
    """K08: `trust_remote_code` is nowhere switched on."""
    root = Path(cli.__file__).parent
    files = [*root.rglob("*.py"), *(root.parent / "recipes").rglob("*.py")]
    assert len(files) > 20
    assert [str(path) for path in files if "trust_remote_code=True" in path.read_text().replace(" ", "")] == []
