"""One HTML page about a run, complete in itself: run folder -> report.html.

Everything that a model, a task or a recipe wrote is escaped, and the page's own policy forbids scripts and any request.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from strop.track import charts, rows
from strop.track.draw import clean, duration
from strop.track.history import Change, History, Pair, Stage, pair_answers, read_history, show_pairs
from strop.track.rows import Row
from strop.track.svg import number

REPORT = "report.html"
_PAIRS = 8
_SAMPLES = 4
_CHARACTERS = 6_000  # of one text; the files hold all of it
_STYLE = Path(__file__).with_name("report.css").read_text("utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, finished or not, and give its path. ConfigError when it is not one."""
    history = read_history(run_folder)
    path, partial = run_folder / REPORT, run_folder / f".partial-{REPORT}"
    partial.write_text(page(history), "utf-8", errors="replace")
    os.replace(partial, path)
    return path


def page(history: History) -> str:
    """The whole page."""
    title = _title(history)
    parts = [
        _header(history, title),
        _hero(history),
        _section("Learning", _charts(charts.learning(history))),
        _section("Before and after", _before_after(history)),
        _section("Health", _charts(charts.health(history))),
        _section("Time and memory", _charts(charts.cost(history))),
        _section("Evaluations", _evaluations(history)),
        _section("Attempts of the last step", _samples(history)),
        _section("Everything else", _rest(history)),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _text(value: object) -> str:
    """Any text as it may stand in the page."""
    return escape(clean(str(value)), quote=True)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>" if body else ""


def _charts(figures: list[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _title(history: History) -> str:
    model, tasks = history.recipe.get("model") or {}, history.recipe.get("tasks") or {}
    fresh = model.get("fresh") or {}
    package = str(model.get("package") or "").partition("==")[0]
    name = Path(model.get("path") or package or f"fresh {fresh.get('model_type', 'model')}").name
    source = str(tasks.get("path", "tasks"))
    file, _, function = source.rpartition(":")
    return f"{name} on {function if file else Path(source).stem}"


def _planned(history: History, stage: str) -> int | None:
    section = history.recipe.get(stage)
    return section.get("steps") if isinstance(section, dict) else None


def _header(history: History, title: str) -> str:
    done = ", then ".join(_extent(stage, _planned(history, stage.name)) for stage in history.stages)
    when = f", {history.sessions[0]['time'][:16].replace('T', ' ')}" if history.sessions else ""
    return (
        f'<h1>{_text(title)}</h1><p class="sub">{_text(done or "No step has been recorded yet")}'
        f'<span class="badge">{_text(history.folder.name)}{_text(when)}</span></p>'
    )


def _extent(stage: Stage, planned: int | None) -> str:
    of = "" if planned in (None, stage.steps) else f" of {planned}"
    return f"{stage.name.upper()} for {stage.steps}{of} steps"


def _hero(history: History) -> str:
    facts = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in _facts(history))
    outcome = f'<div class="card">{_outcome(history)}</div>'
    return f'<div class="hero">{outcome}<div class="card"><dl>{facts}</dl></div></div>'


def _outcome(history: History) -> str:
    stage = history.measured
    if stage is None:
        only = next((s.evaluations[-1] for s in reversed(history.stages) if s.evaluations), None)
        if only is None:
            return '<p class="big">&ndash;</p><p class="dim">No held-out evaluation has been recorded.</p>'
        return (
            f'<p class="big">{only["sampled_accuracy"]:.1%}</p>'
            f'<p class="dim">held-out accuracy after step {only["step"]} of {_text(only["stage"])}</p>'
        )
    first, last = stage.evaluations[0], stage.evaluations[-1]
    before, after = first["sampled_accuracy"], last["sampled_accuracy"]
    best = max(stage.evaluations, key=lambda row: row["sampled_accuracy"])
    kind = "to" if after > before else "worse" if after < before else "from"
    highest = f"; best {best['sampled_accuracy']:.1%} after step {best['step']}"
    peak = highest if best["sampled_accuracy"] > after else ""
    return (
        f'<p class="big"><span class="from">{before:.1%}</span><span class="arrow">&rarr;</span>'
        f'<span class="{kind}">{after:.1%}</span></p>'
        f'<p class="dim">held-out accuracy ({history.accuracy_of}) before and after '
        f"{last['step'] - first['step']} steps of {_text(stage.name.upper())}{peak}</p>"
        f"{_tally(pair_answers(stage, history.solved_at))}"
    )


def _tally(pairs: list[Pair]) -> str:
    if not pairs:
        return ""
    colors = {Change.GAINED: "--good", Change.KEPT: "--c1", Change.FAILED: "--c8", Change.LOST: "--bad"}
    counts = {change: sum(pair.change is change for pair in pairs) for change in colors}
    bars = "".join(f'<i style="flex:{n};background:var({colors[change]})"></i>' for change, n in counts.items() if n)
    keys = " ".join(
        f'<span class="key"><i style="background:var({colors[change]})"></i><b>{n}</b> {change}</span>'
        for change, n in counts.items()
    )
    how = "greedily" if pairs[0].before["greedy"] else "once"
    return f'<div class="tally">{bars}</div><p class="note">of {len(pairs)} tasks, answered {how}:</p>{keys}'


def _facts(history: History) -> list[tuple[str, str]]:
    metrics = [row for stage in history.stages for row in stage.metrics]
    facts = [("Time", duration(history.seconds))] if metrics else []
    facts += [(f"{stage.name.upper()} steps", str(len(stage.metrics))) for stage in history.stages]
    rates = [row[rows.RATE] for row in history.stages[-1].metrics if rows.RATE in row] if metrics else []
    if rates:
        facts.append(("Tokens per second", number(round(sum(rates) / len(rates)))))
    peaks = [row[rows.PEAK_RSS] for row in metrics if rows.PEAK_RSS in row]
    if peaks:
        facts.append(("Peak memory", f"{max(peaks) / 1024:.2f} GiB"))
    gaps = [row[rows.GAP] for row in metrics if rows.GAP in row]
    if gaps:
        facts.append(("Largest gap", f"{max(gaps):.1e}"))
    skipped = sum(row.get("optim/skipped", 0.0) for row in metrics)
    if any("optim/skipped" in row for row in metrics):
        facts.append(("Skipped updates", f"{skipped:.0f}"))
    if len(history.sessions) > 1:
        facts.append(("Resumed", f"{len(history.sessions) - 1} times"))
    if history.sessions:
        last = history.sessions[-1]
        facts.append(("Python", str(last["python"])))
        facts += [(str(name), str(version)) for name, version in last["versions"].items()]
    return facts


def _before_after(history: History) -> str:
    stage = history.measured
    pairs = pair_answers(stage, history.solved_at) if stage is not None else []
    if stage is None or not pairs:
        return ""
    steps = stage.evaluations[0]["step"], stage.evaluations[-1]["step"]
    shown = "".join(_pair(pair, *steps, history.solved_at) for pair in show_pairs(pairs, _PAIRS))
    return (
        f'<p class="dim">The same held-out tasks at steps {steps[0]} and {steps[1]} of {_text(stage.name.upper())}, '
        f'chosen so that every kind of change is seen.</p><div class="pairs">{shown}</div>'
    )


def _pair(pair: Pair, first: int, last: int, solved_at: float) -> str:
    before, after, task = pair.before, pair.after, _text(_short_id(pair.before["task_id"]))
    return (
        f'<div class="card pair"><div class="task"><div class="label"><span>{task}</span>'
        f'<span>{pair.change}</span></div><pre class="prompt">{_long(before["prompt"])}</pre>'
        f'<div class="label"><span>expected: {_text(_cut(str(before["expected"]), 200))}</span></div></div>'
        f"{_reply(f'step {first}', before['reply'], before['reward'], solved_at)}"
        f"{_reply(f'step {last}', after['reply'], after['reward'], solved_at)}</div>"
    )


def _reply(label: str, reply: str, reward: float | None, solved_at: float) -> str:
    kind = "right" if reward is not None and reward >= solved_at else "wrong"
    shown = "no reward" if reward is None else f"reward {reward:g}"
    return (
        f'<div class="reply {kind}"><div class="label"><span>{_text(label)}</span><b>{shown}</b></div>'
        f"<pre>{_long(reply)}</pre></div>"
    )


def _short_id(task_id: str) -> str:
    """A task's id without the folder that its source lies in."""
    return task_id.rpartition("/")[2]


def _cut(text: str, count: int) -> str:
    return text if len(text) <= count else f"{text[:count]} ... ({len(text) - count} more characters)"


def _long(text: str) -> str:
    return _text(_cut(text.strip("\n"), _CHARACTERS)) or '<span class="dim">(empty)</span>'


def _evaluations(history: History) -> str:
    found = [row for stage in history.stages for row in stage.evaluations]
    if not found:
        return ""
    names = sorted({int(k) for row in found for k in row["pass_at_k"]})[1:]
    head = ["stage", "step", history.accuracy_of, "greedy", *(f"pass@{k}" for k in names), "mean reward", "mean tokens"]
    body = [
        [
            row["stage"],
            str(row["step"]),
            _share(row["sampled_accuracy"]),
            _share(row["greedy_accuracy"]),
            *(_share(row["pass_at_k"].get(str(k))) for k in names),
            _fixed(row["mean_reward"], 3),
            _fixed(row["mean_tokens"], 1),
        ]
        for row in found
    ]
    return f'<div class="card scroll">{_table(head, body)}</div>'


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(head: list[str], body: list[list[str]]) -> str:
    heads = "".join(f'<th class="{"num" if i else ""}">{_text(name)}</th>' for i, name in enumerate(head))
    lines = "".join(
        "<tr>" + "".join(f'<td class="{"num" if i else ""}">{_text(cell)}</td>' for i, cell in enumerate(row)) + "</tr>"
        for row in body
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _samples(history: History) -> str:
    shown = "".join(_sample(row, history.solved_at) for row in history.samples[:_SAMPLES])
    return f'<div class="pairs">{shown}</div>' if shown else ""


def _sample(row: Row, solved_at: float) -> str:
    label = f"{row['why']} of step {row['step']}, {row['tokens']} tokens, ended by {row['ending']}"
    task = _text(_short_id(row["task_id"]))
    return (
        f'<div class="card pair"><div class="task"><div class="label"><span>{task}</span></div>'
        f'<pre>{_long(row["prompt"])}</pre></div><div class="task">'
        f"{_reply(label, row['reply'], row['reward'], solved_at)}</div></div>"
    )


def _rest(history: History) -> str:
    others = charts.rest(history)
    more = f"<details><summary>{len(others)} more curves</summary>{_charts(others)}</details>" if others else ""
    return (
        f"{more}<details><summary>The recipe, resolved ({rows.RECIPE})</summary>"
        f'<pre class="card">{_text(history.recipe_text)}</pre></details>{_sessions(history.sessions)}'
    )


def _sessions(sessions: list[Row]) -> str:
    if not sessions:
        return ""

    def where(row: dict[str, Any]) -> str:
        return "the beginning" if row["stage"] is None else f"{row['stage']} step {row['step']}"

    names = list(dict.fromkeys(name for row in sessions for name in row["versions"]))
    head = ["started", "from", "python", *names]
    body = [[row["time"], where(row), row["python"], *(row["versions"].get(n, "") for n in names)] for row in sessions]
    return f'<details><summary>Sessions</summary><div class="card scroll">{_table(head, body)}</div></details>'
