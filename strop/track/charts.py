"""Which curves a report shows, and what each is good for: rows of metrics.jsonl -> figures, where there is data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from strop.track import rows
from strop.track.experts import expert_maps
from strop.track.history import History, Stage
from strop.track.rows import Row
from strop.track.svg import (
    Scale,
    Series,
    Span,
    area_chart,
    fractions,
    line_chart,
    linear,
    logarithmic,
    number,
    percent,
)
from strop.track.timeline import timeline


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: its title, what to look for, and the keys of metrics.jsonl that it draws, with their legends."""

    title: str
    note: str
    keys: dict[str, str]
    scale: Callable[[Sequence[float]], Scale] = linear
    smooth: bool = True  # draw a moving average over the values


LEARNING = (
    Chart("Reward", "mean over the step's attempts", {rows.REWARD: "reward"}),
    Chart("Loss", "mean negative log-likelihood of the trained tokens", {rows.LOSS: "loss"}),
    Chart("Preference loss", "mean over the step's pairs", {"loss/preference": "loss"}),
    Chart("Distance from the teachers", "divergence per token, in nats", {"distill/divergence": "divergence"}),
    Chart("Pairs told apart", "share of the step's pairs", {"preference/accuracy": "right"}, fractions),
)
HEALTH = (
    Chart("Sampler-trainer gap", "largest difference in a token's logprob", {rows.GAP: "gap"}, logarithmic),
    Chart("Entropy", "of the next token, in nats", {"policy/entropy": "entropy"}),
    Chart(
        "Rewards of given replies",
        "log ratios times beta, or a reward model's scores; mean over the step's pairs",
        {"preference/chosen_reward": "chosen", "preference/rejected_reward": "rejected"},
    ),
    Chart("KL from the start", "estimate per token, in nats", {"kl/reference": "KL"}),
    Chart(
        "What the critic knows",
        "part of the variance of returns that its values explain; 1 is all, 0 no more than their mean",
        {"value/explained_variance": "explained"},
    ),
    Chart("KL from the sampling policy", "estimate per token, in nats", {"policy/kl_k3": "KL"}),
    Chart(
        "Reply length",
        "tokens sampled in one attempt",
        {"rollout/tokens_mean": "mean", "rollout/tokens_max": "longest"},
    ),
    Chart(
        "Wasted attempts",
        "shares of attempts cut by the token limit, and of groups that scored alike",
        {"rollout/truncated": "cut", "rollout/uniform_groups": "groups alike"},
        fractions,
    ),
    Chart(
        "Attempts imitated",
        "share of all attempts, and of tasks with at least one",
        {"best_of_n/kept": "attempts", "best_of_n/solved_tasks": "tasks"},
        fractions,
    ),
    Chart(
        "Replayed routes",
        "shares of the choices of experts that were replayed, and of those that the model would make otherwise",
        {"router/replayed": "replayed", "router/disagreement": "otherwise"},
        fractions,
    ),
    Chart("Gradient norm", "before clipping", {"optim/grad_norm": "norm"}),
    Chart("Learning rate", "of the optimizer step", {"optim/lr": "lr"}, smooth=False),
    Chart("Clipped tokens", "share whose ratio left its bounds", {"policy/clip_fraction": "clipped"}),
)
COST = (
    Chart("Speed", "tokens per second of a step, evaluations and saving left out", {rows.RATE: "tokens/s"}),
    Chart("Memory", "resident memory, MiB", {rows.RSS: "now", rows.PEAK_RSS: "peak"}, smooth=False),
)


def learning(history: History) -> list[str]:
    """Reward, loss and held-out accuracy."""
    reward, *losses = (_figure(chart, history) for chart in LEARNING)
    return [figure for figure in (reward, _accuracy(history), *losses) if figure]


def health(history: History) -> list[str]:
    """Whether the training is sound."""
    return [*(figure for chart in HEALTH if (figure := _figure(chart, history))), *expert_maps(history.folder)]


def cost(history: History) -> list[str]:
    """Time, speed and memory."""
    return [
        figure for figure in (_time(history), timeline(history), *(_figure(chart, history) for chart in COST)) if figure
    ]


def rest(history: History) -> list[str]:
    """Every other number that the run recorded."""
    shown = {key for chart in (*LEARNING, *HEALTH, *COST) for key in chart.keys}
    names = dict.fromkeys(key for stage in history.stages for row in stage.metrics for key in row)
    keys = [key for key in names if key not in {*shown, "stage", "step"} and not key.startswith("time/")]
    keys = [key for key in keys if "/layer_" not in key]  # a model has too many: the map of experts shows them
    return [figure for key in keys if (figure := _figure(Chart(key, "", {key: key.rpartition("/")[2]}), history))]


def _spans(history: History, stages: Sequence[Stage]) -> list[Span]:
    """Stages side by side, in their order, with their names where the run has several."""
    spans: list[Span] = []
    for stage in stages:
        first = spans[-1].last if spans else 0.0
        spans.append(Span(name=stage.name, first=first, steps=max(1, stage.steps), labelled=len(history.stages) > 1))
    return spans


def _series(
    history: History,
    keys: dict[str, str],
    take: Callable[[Stage], list[Row]],
    *,
    dots: bool = False,
    smooth: bool = False,
) -> tuple[list[Series], list[Span]]:
    """The series of all stages that have any of the keys, and where those stages stand."""
    stages = [stage for stage in history.stages if any(key in row for row in take(stage) for key in keys)]
    spans = _spans(history, stages)
    series: list[Series] = []
    for color, (key, name) in enumerate(keys.items(), 1):
        points = [
            [(row["step"], float(row[key])) for row in take(stage) if row.get(key) is not None] for stage in stages
        ]
        if any(points):
            series.append(Series(name=name, points=points, color=color, dots=dots, smooth=smooth))
    return series, spans


def _figure(chart: Chart, history: History) -> str:
    series, spans = _series(history, chart.keys, lambda stage: stage.metrics, smooth=chart.smooth)
    if not series:
        return ""
    scale = chart.scale([value for line in series for value in line.values])
    return _framed(chart.title, chart.note, _legend(series, scale), line_chart(series, scale, spans))


def _accuracy(history: History) -> str:
    found = sorted({int(k) for stage in history.stages for row in stage.evaluations for k in row["pass_at_k"]})
    keys = {"sampled_accuracy": history.accuracy_of, "greedy_accuracy": "greedy"} | {
        f"pass@{k}": f"pass@{k}" for k in found[1:]
    }

    def flat(stage: Stage) -> list[Row]:
        return [row | {f"pass@{k}": value for k, value in row["pass_at_k"].items()} for row in stage.evaluations]

    series, spans = _series(history, keys, flat, dots=True)
    if not series:
        return ""
    scale = fractions([])
    shares = {"sampled": "problems solved", "pairs": "pairs told apart"}
    note = f"share of {shares[history.accuracy_of]} that are never trained on"
    return _framed("Held-out accuracy", note, _legend(series, scale), line_chart(series, scale, spans))


def _time(history: History) -> str:
    stages = [stage for stage in history.stages if any(rows.STEP_TIME in row for row in stage.metrics)]
    timed = [
        [(row["step"], rows.phase_seconds(row)) for row in stage.metrics if rows.STEP_TIME in row] for stage in stages
    ]
    totals: dict[str, float] = {}
    for _, phases in (step for steps in timed for step in steps):
        for name, seconds in phases.items():
            totals[name] = totals.get(name, 0.0) + seconds
    if not totals:
        return ""
    named = _layers(totals)
    layers = [
        Series(
            name=name,
            points=[[(step, sum(phases.get(n, 0.0) for n in members)) for step, phases in steps] for steps in timed],
            color=color,
        )
        for color, (name, members) in enumerate(named.items(), 1)
    ]
    scale = linear([0.0, *(sum(phases.values()) for steps in timed for _, phases in steps)])
    whole = sum(totals.values()) or 1.0
    legend = "".join(_key(layer.color, layer.name, f"{sum(layer.values) / whole:.0%}") for layer in layers)
    chart = area_chart(layers, scale, _spans(history, stages))
    return _framed("Time per phase", "seconds of each step; the shares are of the whole run", legend, chart)


def _layers(totals: dict[str, float]) -> dict[str, list[str]]:
    """Phases from the bottom up: the largest first, on top those that most steps do not have; at most eight layers."""
    aside = [phase.removeprefix("time/") for phase in rows.ASIDE if phase.removeprefix("time/") in totals]
    steady = sorted((name for name in totals if name not in aside), key=lambda name: -totals[name])
    shown, small = steady[: 7 - len(aside)], steady[7 - len(aside) :]
    layers = {name: [name] for name in shown} | ({"others": small} if small else {})
    return layers | {name: [name] for name in aside}


def _legend(series: Sequence[Series], scale: Scale) -> str:
    write = percent if scale.write is percent else number
    return "".join(_key(line.color, line.name, write(line.values[-1])) for line in series)


def _key(color: int, name: str, value: str) -> str:
    return f'<span class="key"><i style="background:var(--c{color})"></i>{escape(name)} <b>{escape(value)}</b></span>'


def _framed(title: str, note: str, legend: str, chart: str) -> str:
    noted = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure class="card"><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>{noted}{chart}</figure>'
