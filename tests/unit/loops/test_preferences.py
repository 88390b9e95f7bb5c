"""Whole runs of the loops that learn from preferences: each loss teaches, and reward models are for everybody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.data.tasks import Task
from strop.data.user_code import load_object
from strop.errors import ConfigError, DataError

HERE = Path(__file__).parent
RECIPES = HERE.parents[2] / "recipes"
RECIPE = f"""
seed: 3
threads: 1
model:
  fresh: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64, tie_word_embeddings: false}}
  tokenizer: '{HERE}/tiny_task.py:tokenizer'
renderer: {{kind: plain}}
draw: {{max_tokens: 6}}
engine: {{pack_tokens: 256}}
evaluate: {{every: 2, attempts: 2, solved_at: 0.5}}
"""
PAIRS = f"""
tasks: {{source: python, path: '{HERE}/tiny_task.py:pairs', holdout: 8, reward: '{HERE}/tiny_task.py:even_digits',
        chosen_key: chosen, rejected_key: rejected}}
"""
LABELLED = f"""
tasks: {{source: python, path: '{HERE}/tiny_task.py:labelled', reply_key: reply, label_key: good}}
"""
DPO = "dpo: {steps: 8, tasks_per_step: 12, schedule: {lr: 1e-2}}"
REWARD_MODEL = "reward_model: {steps: 8, tasks_per_step: 12, schedule: {lr: 1e-2}}"


def run(folder: Path, sections: str, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    path = folder / "tiny.yaml"
    path.write_text(RECIPE + sections + "\n")
    runner.train(load_recipe(path, [f"run.folder={folder}/run", *overrides]), path, resume=resume)
    return rows(folder)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


@pytest.mark.parametrize(
    "loss",
    [
        "{kind: dpo}",
        "{kind: dpo, label_smoothing: 0.1, per_token: true, beta: 1.0}",
        "{kind: robust, label_smoothing: 0.1}",
        "{kind: hinge}",
        "{kind: ipo}",
        "{kind: simpo}",
        "{kind: orpo}",
    ],
)
def test_a_pairwise_loss_teaches_to_tell_replies_apart(tmp_path: Path, loss: str) -> None:
    found = run(tmp_path, PAIRS + DPO, f"dpo.loss={loss}", "evaluate.every=0")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert found[-1]["preference/accuracy"] == 1.0
    assert found[-1]["loss/preference"] < found[0]["loss/preference"]
    assert found[-1]["preference/margin"] > found[0]["preference/margin"] + 0.05
    assert all(row["data/dropped"] == 0 for row in found)
    with_reference = "simpo" not in loss and "orpo" not in loss
    assert ("time/reference" in found[0]) == with_reference
    if with_reference:  # nothing has been learned yet: the policy is the reference
        assert abs(found[0]["preference/margin"]) < 1e-5 and found[0]["preference/accuracy"] == 0.5


@pytest.mark.parametrize("tasks", [PAIRS, LABELLED])
def test_kto_learns_from_pairs_and_from_single_replies(tmp_path: Path, tasks: str) -> None:
    found = run(tmp_path, tasks + DPO, "dpo.loss={kind: kto, beta: 0.5}", "evaluate.every=0")
    assert found[0]["preference/baseline"] < 1e-5, "at the start the policy is the reference"
    assert found[-1]["preference/baseline"] >= 0.0
    assert found[0]["loss/preference"] == pytest.approx(0.5, abs=1e-4)
    assert found[-1]["loss/preference"] < 0.45
    assert found[-1]["preference/chosen_reward"] > found[-1]["preference/rejected_reward"] + 0.1


def test_preferred_replies_are_what_it_then_writes(tmp_path: Path) -> None:
    run(tmp_path, PAIRS + DPO, "dpo.loss={kind: orpo, beta: 1.0}", "dpo.steps=25", "evaluate.every=0")
    before, after = rows(tmp_path, "evaluations.jsonl")
    assert after["mean_reward"] > before["mean_reward"] + 0.3


def test_the_reference_is_where_the_stage_began_also_after_a_resume(tmp_path: Path) -> None:
    """After supervised steps; the run ends in the middle of dpo and goes on to the same numbers."""
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    sft = "sft: {steps: 3, tasks_per_step: 8, schedule: {lr: 1e-2}}\n"
    given = ("run.save_every=1", "evaluate.every=0")
    whole = run(tmp_path / "whole", PAIRS + sft + DPO, *given)
    numbers = [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in whole]
    assert numbers[3]["stage"] == "dpo" and abs(numbers[3]["preference/margin"]) < 1e-5
    run(tmp_path / "halves", PAIRS + sft + DPO, *given)
    # What was saved after step 5 of dpo is what a run that was killed then has.
    folder = tmp_path / "halves" / "run" / "checkpoints"
    for checkpoint in folder.iterdir():
        if checkpoint.is_dir() and "dpo" in checkpoint.name and checkpoint.name.endswith("8"):
            for file in sorted(checkpoint.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            checkpoint.rmdir()
    again = run(tmp_path / "halves", PAIRS + sft + DPO, *given, resume=True)
    assert [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in again] == numbers


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    run(folder, PAIRS + REWARD_MODEL)
    return folder


def test_a_reward_model_is_measured_by_held_out_pairs(reward_model: Path) -> None:
    found = rows(reward_model)
    assert found[0]["preference/accuracy"] == 0.5 and found[0]["loss/preference"] == pytest.approx(0.6931472)
    assert found[-1]["preference/accuracy"] == 1.0 and found[-1]["loss/preference"] < 0.2
    measured = rows(reward_model, "evaluations.jsonl")
    assert [row["step"] for row in measured] == [0, 2, 4, 6, 8]
    assert {row["measured"] for row in measured} == {"pairs"}
    assert (measured[0]["sampled_accuracy"], measured[-1]["sampled_accuracy"]) == (0.5, 1.0)
    assert measured[-1]["mean_reward"] > 1.0 and len(measured[-1]["answers"]) == 8
    assert measured[-1]["mean_tokens"] == 3.5, "24 and 357, and an end token each"
    page = (reward_model / "run" / "report.html").read_text()
    assert "held-out accuracy (pairs)" in page and "share of pairs told apart" in page


def test_an_exported_reward_model_is_a_classifier_and_the_reward_of_a_recipe(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = reward_model / "run" / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    made = AutoTokenizer.from_pretrained(export)
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.config.pad_token_id == made.pad_token_id
    assert json.loads((export / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
    best = max(rows(reward_model, "evaluations.jsonl"), key=lambda row: row["sampled_accuracy"])  # the first of them
    shown = best["answers"][0]
    scored = {line.split()[1]: float(line.split()[0]) for line in shown["reply"].splitlines()}
    texts = [f"{shown['prompt']}{reply}<eos>" for reply in scored]
    with torch.no_grad():
        together = model(**made(texts, return_tensors="pt", padding=True)).logits[:, 0].tolist()
    assert together == pytest.approx(list(scored.values()), abs=2e-3)
    score = load_object("learned_reward.py:score", RECIPES)
    monkeypatch.setitem(score.__globals__, "FOLDER", str(export))
    task = Task(id="t", messages=[{"role": "user", "content": shown["prompt"]}], answer=None, source="s", meta={})
    assert [score(task, reply) for reply in scored] == pytest.approx(list(scored.values()), abs=2e-3)


def test_a_reward_model_is_evaluated_and_goes_on_from_its_own_export(reward_model: Path, tmp_path: Path) -> None:
    path = reward_model / "tiny.yaml"
    given = [f"model={{path: '{reward_model}/run/export'}}", "reward_model.head=loaded", f"run.folder={tmp_path}/run"]
    found = runner.evaluate(load_recipe(path, given), path)
    assert found["pair_accuracy"] == 1.0 and found["mean_margin"] > 1.0


def test_what_the_loops_need_is_asked_for_before_anything_runs(tmp_path: Path) -> None:
    sums = f"tasks: {{source: python, path: '{HERE}/tiny_task.py:sums'}}\n"
    with pytest.raises(ConfigError, match=r"dpo learns from pairs of replies: set tasks\.chosen_key"):
        run(tmp_path, sums + DPO)
    with pytest.raises(ConfigError, match=r"kto learns from better and worse replies.*label_key"):
        run(tmp_path, sums + DPO, "dpo.loss={kind: kto}")
    with pytest.raises(ConfigError, match=r"dpo learns from pairs"):
        run(tmp_path, LABELLED + DPO)
    with pytest.raises(ConfigError, match=r"the only loop of its recipe"):
        run(tmp_path, PAIRS + DPO + "\n" + REWARD_MODEL)
    with pytest.raises(ConfigError, match="kind simpo has no label_smoothing"):
        run(tmp_path, PAIRS + DPO, "dpo.loss={kind: simpo, label_smoothing: 0.1}")
    with pytest.raises(ConfigError, match="kind robust needs label_smoothing"):
        run(tmp_path, PAIRS + DPO, "dpo.loss={kind: robust}")
    with pytest.raises(ConfigError, match="tasks_per_step of 2 or more"):
        run(tmp_path, PAIRS + DPO, "dpo.loss={kind: kto}", "dpo.tasks_per_step=1")


def test_pairs_that_do_not_fit_are_named_or_counted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"take 12 tokens together, the most of \d+ such, and a batch has 9"):
        run(tmp_path / "a", PAIRS + DPO, "engine.pack_tokens=9", "evaluate.every=0")
    with pytest.raises(DataError, match="held-out pairs are longer"):
        run(tmp_path / "b", PAIRS + REWARD_MODEL, "engine.pack_tokens=9", "tasks.too_long=drop")
