"""Answers read out of replies, in whatever form they come: F01, F02, F05-F07, F10, F13."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.tasks import Task
from strop.envs.rewards.answers import boxed, final_answer, last_number
from strop.envs.rewards.format import has_box, in_order
from strop.envs.rewards.match import exact, number
from strop.envs.rewards.score import Invalid
from strop.errors import DataError


def task(answer: str | None) -> Task:
    return Task(id="t", messages=[], answer=answer, source="test", meta={})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 42\n" + "z" * 301, 42),  # F01
        ("#### 42.", 42),
        ("#### $42", 42),
        ("#### 42.00", 42),
        ("#### +42", 42),
        ("#### 1,234", 1234),
        ("#### -3", -3),
        ("the total is 72 clips, altogether.", 72),  # F02
        ("-3", -3),
        ("\N{MINUS SIGN}3", -3),
        ("[8.1,12.8]", Fraction("12.8")),
        ("10-3", 3),
        ("(2+5)-3", 3),
        ("10 - 3 = 7", 7),
        ("-$42", -42),
        ("$-42", -42),
        ("\\$42", 42),
        ("Reward: 10", 10),  # F05
        ("Reward: 1e-1", Fraction(1, 10)),
        ("Reward: -2", -2),
        ("Answer: \\boxed{5}", 5),  # F06
        ("**Answer:** 42", 42),  # F13
        ("Answer: 42.", 42),
        ("Answer: 1/2", Fraction(1, 2)),
        ("\\boxed{\\frac{1}{2}}", Fraction(1, 2)),
        ("\\dfrac{-3}{4}", Fraction(-3, 4)),
        ("1{,}234,567.5", Fraction("1234567.5")),
        ("1,2345", 2345),
        ("12 m^2", 12),
        ("x = .5", Fraction(1, 2)),
        ("5kg", 5),
    ],
)
def test_last_number(text: str, value: int | Fraction) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize("text", ["", "none", "Reward: nan", "1/0", "1e9999", "9" * 5000, "v1.2.3", ",", "H2O", "..-"])
def test_no_number(text: str) -> None:
    """F02, F05, F10: nothing is made up, and nothing is raised."""
    assert last_number(text) is None


def test_the_number_reward() -> None:
    assert number(task("42"), "I think it is 42.0 apples.") == 1.0
    assert number(task("3"), "-3") == 0.0  # F02
    assert number(task("Half of it is 21, so #### 42"), "42") == 1.0
    assert number(task("0.5"), "Answer: 1/2") == 1.0
    assert number(task("2"), "\\frac{1}{2}") == 0.0
    assert isinstance(number(task("42"), "no idea"), Invalid)
    with pytest.raises(DataError, match="task t: its answer 'many' holds no number"):
        number(task("many"), "42")
    with pytest.raises(DataError, match="task t has no answer"):
        number(task(None), "42")


def test_the_exact_reward() -> None:
    assert exact(task("64"), " 64\n") == 1.0
    assert exact(task("64"), "64.") == 0.0
    assert exact(task("64"), "") == 0.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{5}", "5"),  # F06
        ("\\boxed{\\frac{1}{2}} or so", "\\frac{1}{2}"),
        ("\\boxed{1} no, \\boxed{ 2 }", "2"),
        ("\\boxed{1} and \\boxed{", "1"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("} \\boxed{5}", "5"),
        ("\\boxed{}", ""),
        ("boxed{5}", None),
        ("\\boxed", None),
        ("", None),
    ],
)
def test_boxes(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("**Answer:** 42", "42"),  # F13
        ("Answer: 42.", "42"),
        ("Answer: 1/2", "1/2"),
        ("some steps\n#### 42\n" + "z" * 301, "42"),
        ("first the answer is 3, no:\nanswer: 4\nDone", "4"),
        ("The answer is **7**.", "7"),
        ("steps\nso \\boxed{5}, surely.", "5"),
        ("$x^2$", "x^2"),
        ("42", "42"),
        ("two\nlines", None),
        ("\\boxed{}", None),
        ("", None),
        ("Answer:", None),
    ],
)
def test_final_answers(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_only_the_reply_counts_for_its_form() -> None:
    """F07: the prompt asks for a box; an empty reply has none."""
    asked = Task(id="t", messages=[{"role": "user", "content": "use \\boxed{}"}], answer="5", source="test", meta={})
    assert has_box(asked, "") == 0.0 and has_box(asked, "\\boxed{}") == 0.0
    assert has_box(asked, "it is \\boxed{5}") == 1.0


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a</think>\n<answer>b</answer>\n", True),
        ("<think>a</think>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think><answer>b", False),
        ("<think>a</think><answer>b</answer> and more", False),
        ("<think><think>a</think><answer>b</answer>", False),
        ("x<think>a</think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_tags_in_order(reply: str, right: bool) -> None:
    assert in_order(reply, "think", "answer") is right


@given(st.lists(st.sampled_from([*"0123456789.,-+$/eE{} \n", "\\frac", "\\boxed{", "answer:", "####", "\\sqrt", "é"])))
def test_any_text_can_be_read(pieces: list[str]) -> None:
    """F10: no text raises."""
    text = "".join(pieces)
    value = last_number(text)
    assert value is None or isinstance(value, Fraction)
    inside = boxed(text)
    assert inside is None or inside in text
    assert final_answer(text) != ""


@pytest.mark.parametrize(
    "unit",
    ["1,", "1,234", "\\frac{", "9", "\\boxed{", "answer ", "-", "1.", "$", "\\frac{1}{", "\\frac ", "{", "1e", "1/"],
)
def test_long_texts_are_read_in_one_pass(unit: str) -> None:
    """200,000 characters of whatever a pattern could stumble over again and again; quadratic time would be minutes."""
    text = unit * (200_000 // len(unit))
    assert last_number(text + " so 7") == 7
    assert boxed(text + "\\boxed{8}") == "8"
    assert final_answer(text + "\n#### 9") == "9"
