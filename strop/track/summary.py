"""The end of a run in the terminal: a table of accuracies, a few answers before and after, where the report is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from strop.track.draw import clean, duration
from strop.track.history import History, Stage, pair_answers, read_history, show_pairs
from strop.track.rows import Row

_PAIRS = 3
_CHARACTERS = 160


def print_summary(folder: Path, report: Path, console: Console) -> None:
    """Print what a run came to. The folder may hold any run, finished or not."""
    history = read_history(folder)
    if any(stage.evaluations for stage in history.stages):
        console.print(Text("\nheld-out accuracy", style="bold"))
        console.print(_accuracies(history))
    if history.measured is not None:
        title = f"the same held-out tasks before and after {history.measured.name}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(_answers(history.measured, history.solved_at))
    steps = ", ".join(f"{len(stage.metrics)} steps of {stage.name}" for stage in history.stages)
    console.print(Text(f"{steps or 'no steps'} in {duration(history.seconds)}"))
    console.print(Text.assemble("report: ", (str(report), "bold")), soft_wrap=True)


def _accuracies(history: History) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("step", justify="right")
    measured = [(stage.name, row) for stage in history.stages for row in _ends(stage)]
    names = sorted({int(k) for _, row in measured for k in row["pass_at_k"] if int(k) > 1})
    for name in (history.accuracy_of, "greedy", *(f"pass@{k}" for k in names)):
        table.add_column(name, justify="right")
    for index, (stage, row) in enumerate(measured):
        numbers = [row["sampled_accuracy"], row["greedy_accuracy"], *(row["pass_at_k"].get(str(k)) for k in names)]
        when = "before" if row["step"] == 0 else "after"
        shown = ["" if number is None else f"{number:.1%}" for number in numbers]
        table.add_row(f"{when} {escape(stage)}", str(row["step"]), *shown, end_section=index == len(measured) - 1)
    return table


def _ends(stage: Stage) -> list[Row]:
    return [stage.evaluations[0], *stage.evaluations[-1:]] if len(stage.evaluations) > 1 else stage.evaluations


def _answers(stage: Stage, solved_at: float) -> Table:
    table = Table()
    for column in ("task", "before", "after", "expected"):
        table.add_column(column, overflow="fold")
    for pair in show_pairs(pair_answers(stage, solved_at), _PAIRS):
        right = "green" if pair.after["reward"] is not None and pair.after["reward"] >= solved_at else "red"
        table.add_row(
            _short(pair.before["prompt"]),
            _short(pair.before["reply"]),
            Text(_short(pair.after["reply"]).plain, style=right),
            _short(pair.after["expected"]),
        )
    return table


def _short(text: str) -> Text:
    text = clean(text.strip())
    return Text(text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + " ...")
