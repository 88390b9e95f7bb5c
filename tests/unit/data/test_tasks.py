"""Tasks: every source gives the same rows in the same order, no bad row passes, and held-out problems stay held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.config.recipe import TasksConfig
from strop.data.tasks import TaskSet, load_tasks
from strop.errors import ConfigError, DataError

ROWS = [{"prompt": f"{i} + 1?", "answer": i + 1, "level": i % 2} for i in range(8)]


def write_lines(file: Path, rows: Sequence[object]) -> None:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def load(base: Path, source: str = "jsonl", path: str = "rows.jsonl", **keys: Any) -> TaskSet:
    return load_tasks(TasksConfig.model_validate({"source": source, "path": path} | keys), base)


def messages(tasks: TaskSet) -> list[str]:
    return [task.messages[-1].get("content", "") for task in tasks.train]


def make_source(base: Path, source: str) -> str:
    """ROWS, as each kind of source keeps them; returns its path."""
    match source:
        case "jsonl":
            write_lines(base / "rows.jsonl", ROWS)
            return "rows.jsonl"
        case "parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(ROWS), base / "rows.parquet")
            return "rows.parquet"
        case "datasets":
            import datasets

            datasets.Dataset.from_list(ROWS).save_to_disk(base / "saved")
            return "saved"
        case _:
            (base / "rows.py").write_text(f"def make(n: int):\n    return {ROWS!r}[:n]\n")
            return "rows.py:make"


@pytest.mark.parametrize("source", ["jsonl", "parquet", "datasets", "python"])
def test_every_source_gives_the_same_tasks(tmp_path: Path, source: str) -> None:
    path = make_source(tmp_path, source)
    arguments = {"n": 8} if source == "python" else {}
    tasks = load(tmp_path, source, path, arguments=arguments).train
    assert [task.messages for task in tasks] == [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    assert [task.answer for task in tasks] == [str(row["answer"]) for row in ROWS]
    assert [task.meta["level"] for task in tasks] == [row["level"] for row in ROWS]
    assert tasks[2].id == f"{path}:3"
    assert {task.source for task in tasks} == {f"{source}/{path}"}
    limited = load(tmp_path, source, path, arguments=arguments, limit=3)
    assert limited.train == tasks[:3]


def test_files_of_a_folder_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    """D13: b is written first; rows keep their order within a file, text and messages mixed."""
    folder = tmp_path / "many"
    folder.mkdir()
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "two"}]
    write_lines(folder / "b.jsonl", [{"prompt": "three", "answer": "3"}])
    write_lines(folder / "a.jsonl", [{"prompt": "one", "answer": "1"}, {"prompt": chat, "answer": "2"}])
    (folder / "notes.txt").write_text("not a row")
    tasks = load(tmp_path, path="many")
    assert messages(tasks) == ["one", "two", "three"]
    assert tasks.train[1].messages == chat
    assert [task.id for task in tasks.train] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]


def test_ids_are_unique_across_files_and_rows(tmp_path: Path) -> None:
    """G13: two files with one row id, and two rows with one text, stay apart."""
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"id": 0, "prompt": "x", "answer": "1"}] * 2)
    ids = [task.id for name in ("a", "b") for task in load(tmp_path, path=f"{name}.jsonl").train]
    assert len(set(ids)) == 4


def test_reasoning_gym_scores_its_own_entries(tmp_path: Path) -> None:
    """The entry travels whole: the package's scorer gives the right answer 1 and a wrong one less."""
    import reasoning_gym

    tasks = load(tmp_path, "reasoning_gym", "chain_sum", arguments={"size": 5, "seed": 1}, reward="reasoning_gym").train
    assert len(tasks) == 5
    score: Callable[..., float] = reasoning_gym.get_score_answer_fn("chain_sum")
    assert [score(answer=task.answer, entry=task.meta) for task in tasks] == [1.0] * 5
    assert all(score(answer="no", entry=task.meta) < 1.0 for task in tasks)
    assert tasks[0].messages == [{"role": "user", "content": tasks[0].meta["question"]}]
    assert load(tmp_path, "reasoning_gym", "chain_sum", arguments={"size": 5, "seed": 1}).train == tasks
    assert load(tmp_path, "reasoning_gym", "chain_sum", limit=5).train != tasks


def test_reasoning_gym_entries_without_an_answer_are_scored_by_the_package(tmp_path: Path) -> None:
    arguments = {"size": 2, "seed": 0}
    own = load(tmp_path, "reasoning_gym", "propositional_logic", arguments=arguments, reward="reasoning_gym")
    assert [task.answer for task in own.train] == [None, None]
    with pytest.raises(DataError, match="reasoning_gym propositional_logic, entry 0, field 'answer'"):
        load(tmp_path, "reasoning_gym", "propositional_logic", arguments=arguments)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{'prompt': 1}", r"rows.jsonl, line 2: not JSON \(Expecting property name"),
        ("[1, 2]", r"line 2: a row must be an object with named fields, and this is \[1, 2\] \(list\)"),
        (
            {"question": "x", "answer": "1"},
            r"line 2: no field 'prompt' among \['answer', 'question'\]; set tasks.prompt",
        ),
        (
            {"prompt": "x", "target": "1"},
            r"line 2: no field 'answer' among \['prompt', 'target'\]; set tasks.answer_key",
        ),
        ({"prompt": "  ", "answer": "1"}, r"line 2, field 'prompt': it is empty"),
        ({"prompt": 5, "answer": "1"}, r"line 2, field 'prompt': 5 \(int\) is no prompt"),
        ({"prompt": [], "answer": "1"}, r"field 'prompt': \[\] \(list\) is no prompt"),
        ({"prompt": ["x"], "answer": "1"}, r"field 'prompt': message 0: 'x' \(str\) is no message"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, r"message 0: no field 'content' in"),
        ({"prompt": [{"role": "user", "content": 3}], "answer": "1"}, r"message 0: content is 3 \(int\)"),
        ({"prompt": [{"role": "user", "contents": "x"}], "answer": "1"}, r"message 0: unknown fields \['contents'\]"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, "the last message is the assistant's"),
        (
            {"prompt": "x", "answer": None},
            r"line 2, field 'answer': None \(NoneType\) is no answer; tasks.reward",
        ),
        ({"prompt": "x", "answer": ""}, r"field 'answer': '' \(str\) is no answer"),
        ({"prompt": "x", "answer": True}, r"field 'answer': True \(bool\) is no answer"),
        ({"prompt": "x", "answer": ["1"]}, r"field 'answer': \['1'\] \(list\) is no answer"),
        ('{"prompt": "x", "answer": NaN}', r"field 'answer': nan \(float\) is no answer"),
    ],
)
def test_a_bad_row_is_named_with_its_line_field_and_value(tmp_path: Path, row: object, says: str) -> None:
    write_lines(tmp_path / "rows.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(DataError, match=says):
        load(tmp_path)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "x", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"line 2: not UTF-8 \(byte 12 is 0xff\)"):
        load(tmp_path)


def test_bad_rows_are_reported_together(tmp_path: Path) -> None:
    """The first twenty, and how many there are beyond; the limit counts bad rows too."""
    write_lines(tmp_path / "rows.jsonl", [ROWS[0], *[{"prompt": "x"}] * 25])
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("rows.jsonl, line 2") and lines[19].startswith("rows.jsonl, line 21")
    assert lines[20] == "... and 5 more rows like these"
    assert len(load(tmp_path, limit=1).train) == 1


def test_blank_lines_are_no_rows_and_line_numbers_count_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [ROWS[0], "", "  ", ROWS[1]])
    assert [task.id for task in load(tmp_path).train] == ["rows.jsonl:1", "rows.jsonl:4"]


def test_line_separators_inside_text_do_not_end_a_row(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": text, "answer": "1"}, ensure_ascii=False), "utf-8")
    assert messages(load(tmp_path)) == [text]


def test_numbers_become_text_as_they_are_written(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "x", "answer": a} for a in (7, -2.5, "07", 0)])
    assert [task.answer for task in load(tmp_path).train] == ["7", "-2.5", "07", "0"]


def test_an_own_reward_needs_no_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": "y", "answer": {"tests": [1]}}])
    tasks = load(tmp_path, reward="mine.py:score").train
    assert [task.answer for task in tasks] == [None, None]
    assert tasks[1].meta["answer"] == {"tests": [1]}


def test_columns_fill_in_what_a_message_does_not_have(tmp_path: Path) -> None:
    """Parquet gives every message every field, None where it had none."""
    import pyarrow
    from pyarrow import parquet

    chat = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u", "name": "me"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": chat, "answer": "1"}]), tmp_path / "rows.parquet")
    (task,) = load(tmp_path, "parquet", "rows.parquet").train
    assert task.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "me"}]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"path": "none.jsonl"}, "tasks.path: there is no file or folder"),
        ({"path": "empty"}, r"the folder .*empty has no \*.jsonl files"),
        ({"source": "datasets", "path": "none"}, "tasks.path: there is no folder"),
        ({"source": "datasets", "path": "empty"}, "was not saved by Dataset.save_to_disk"),
        ({"source": "reasoning_gym", "path": "chain_sun"}, "no generator 'chain_sun'; did you mean chain_sum?"),
        (
            {"source": "reasoning_gym", "path": "chain_sum", "arguments": {"min_trems": 2}},
            "tasks.arguments: the generator chain_sum does not take .*'min_trems'",
        ),
        (
            {"source": "reasoning_gym", "path": "chain_sum", "arguments": {"min_terms": 0}},
            "min_terms must be positive",
        ),
        ({"source": "python", "path": "mine.py:make"}, r"mine.py:make takes \(n\) and not \{\}: missing a required"),
        ({"source": "python", "path": "mine.py:one"}, r"must return a list of rows, and returned 1 \(int\)"),
        ({"holdout": 9}, "tasks.holdout is 9 and rows.jsonl has 8 distinct problems"),
        ({"holdout": 8}, "lower it to 7 at most"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text("def make(n):\n    return []\n\ndef one():\n    return 1\n")
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, **keys)


def test_the_splits_of_a_saved_dataset_are_named(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="holds the splits train, test; name one of them, like saved/train"):
        load(tmp_path, "datasets", "saved")
    assert len(load(tmp_path, "datasets", "saved/test").train) == 8


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"rows.parquet is not a Parquet file"):
        load(tmp_path, "parquet", "rows.parquet")


def test_an_empty_file_holds_no_tasks(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no tasks"):
        load(tmp_path)


def test_an_error_in_the_users_function_shows_their_line(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("def make():\n    return [1 / 0]\n")
    with pytest.raises(ZeroDivisionError) as caught:
        load(tmp_path, "python", "rows.py:make")
    assert caught.traceback[-1].path == tmp_path / "rows.py"


def test_held_out_problems_are_never_trained_on(tmp_path: Path) -> None:
    """Rows that repeat a held-out problem are in neither part, and counted; training keeps its own repeats."""
    rows = [*ROWS, *ROWS, {"prompt": ROWS[3]["prompt"], "answer": "another"}]
    write_lines(tmp_path / "rows.jsonl", rows)
    for seed in range(4):
        tasks = load(tmp_path, holdout=3, holdout_seed=seed)
        held_out = [task.messages[0].get("content") for task in tasks.held_out]
        assert len(held_out) == len(set(held_out)) == 3
        assert not set(held_out) & set(messages(tasks))
        assert len(set(messages(tasks))) == 5
        assert len(tasks.train) + len(tasks.held_out) + tasks.repeated == len(rows)
        assert tasks.repeated == 3 + (ROWS[3]["prompt"] in held_out)


def test_the_held_out_part_is_that_of_its_seed(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", ROWS)
    parts = [[task.id for task in load(tmp_path, holdout=4, holdout_seed=seed).held_out] for seed in range(8)]
    assert parts[0] == [task.id for task in load(tmp_path, holdout=4).held_out]
    assert len({tuple(part) for part in parts}) > 4
    assert load(tmp_path).held_out == []


PAIR = {"prompt": "1 + 1?", "good": "2", "bad": "3", "by": 0.5}


def test_a_row_of_two_replies_is_a_pair_and_is_answered_by_the_better_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [PAIR, PAIR | {"answer": "two", "by": 2}])
    first, second = load(tmp_path, chosen_key="good", rejected_key="bad", margin_key="by").train
    assert (first.chosen, first.rejected, first.margin, first.answer) == ("2", "3", 0.5, "2")
    assert (second.chosen, second.rejected, second.margin, second.answer) == ("2", "3", 2.0, "two")
    assert load(tmp_path, chosen_key="good", rejected_key="bad").train[0].margin == 0.0
    write_lines(tmp_path / "rows.jsonl", ROWS)
    assert load(tmp_path).train[0].chosen is None and load(tmp_path).train[0].rejected is None


def test_a_row_of_one_reply_and_a_label_is_good_or_bad_and_needs_an_answer_only_when_measured(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "says": str(i), "right": i % 2 == 0} for i in range(3)]
    write_lines(tmp_path / "rows.jsonl", rows)
    tasks = load(tmp_path, reply_key="says", label_key="right").train
    assert [(task.chosen, task.rejected, task.answer) for task in tasks] == [
        ("0", None, None),
        (None, "1", None),
        ("2", None, None),
    ]
    with pytest.raises(DataError, match="no field 'answer'"):
        load(tmp_path, reply_key="says", label_key="right", holdout=1)


@pytest.mark.parametrize(
    ("row", "keys", "says"),
    [
        ({"good": None}, {}, "line 1, field 'good': None .NoneType. is no reply; tasks.chosen_key names one as text"),
        ({"bad": ["x"]}, {}, "line 1, field 'bad'"),
        ({"by": "far"}, {}, "line 1, field 'by': 'far' .str. is no margin; it must be a number"),
        ({"by": True}, {}, "is no margin"),
        ({}, {"margin_key": "much"}, "no field 'much' among .* set tasks.margin_key"),
        ({}, {"rejected_key": "worse"}, "no field 'worse' among .* set tasks.rejected_key"),
    ],
)
def test_a_bad_preference_is_named(tmp_path: Path, row: dict[str, object], keys: dict[str, str], says: str) -> None:
    write_lines(tmp_path / "rows.jsonl", [PAIR | row])
    with pytest.raises(DataError, match=says):
        load(tmp_path, **({"chosen_key": "good", "rejected_key": "bad", "margin_key": "by"} | keys))
    write_lines(tmp_path / "rows.jsonl", [PAIR | {"right": 1}])
    with pytest.raises(DataError, match=r"field 'right': 1 .int. is no label; it must be true or false"):
        load(tmp_path, reply_key="good", label_key="right")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"chosen_key": "a"}, "chosen_key and rejected_key go together"),
        ({"label_key": "a"}, "reply_key and label_key go together"),
        ({"chosen_key": "a", "rejected_key": "b", "reply_key": "c", "label_key": "d"}, "not all"),
        ({"margin_key": "a"}, "give chosen_key and rejected_key too"),
    ],
)
def test_keys_of_preferences_that_are_not_whole_are_refused(keys: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TasksConfig.model_validate({"source": "jsonl", "path": "rows.jsonl"} | keys)
