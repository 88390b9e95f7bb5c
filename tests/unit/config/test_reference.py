"""The generated page and the commented recipe say what the declarations say, and CI sees when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import reference
from strop.config.imitation import BestOfNConfig, TeacherConfig
from strop.config.loader import all_keys, read_recipe, section_of
from strop.config.loops import LoopConfig, SFTConfig
from strop.config.policy import AsyncGRPOConfig, GRPOConfig
from strop.config.ppo import CriticConfig, PPOConfig
from strop.config.preferences import DPOConfig, RewardModelConfig
from strop.config.recipe import EngineConfig, ModelConfig, Recipe, SamplerConfig, TasksConfig
from strop.config.section import Section
from strop.config.sglang import SglangConfig
from strop.config.vllm import VllmConfig

ROOT = Path(__file__).parents[3]


def sections(section: type[Section] = Recipe) -> list[type[Section]]:
    inner = [section_of(field.annotation) for field in section.model_fields.values()]
    return [section, *(found for part in inner if part is not None for found in sections(part))]


@pytest.mark.parametrize("section", dict.fromkeys(sections()), ids=lambda section: section.__name__)
def test_every_field_has_a_text_beside_it(section: type[Section]) -> None:
    assert section.__doc__
    missing = [name for name, field in section.model_fields.items() if not field.description]
    assert missing == []


def test_the_files_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert reference.main(["--check"]) == 0


def test_check_fails_when_a_file_is_stale_and_write_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "recipes").mkdir()
    assert reference.main(["--check"]) == 1
    assert "docs/configuration.md is stale" in capsys.readouterr().err
    assert reference.main(["--write"]) == 0
    assert reference.main(["--check"]) == 0
    page = tmp_path / "docs" / "configuration.md"
    page.write_text(page.read_text().replace("G: attempts", "attempts"))
    assert reference.main(["--check"]) == 1


def test_the_reference_recipe_loads_and_holds_every_default() -> None:
    """C08: the generated files cannot hold other defaults than the declarations."""
    recipe = read_recipe(reference.commented_yaml(), "reference.yaml")
    model = ModelConfig(path="models/base")
    assert (recipe.model, recipe.tasks) == (model, TasksConfig(source="jsonl", path="tasks.jsonl"))
    assert recipe.ppo == PPOConfig(critic=CriticConfig(model=model))
    assert recipe.distill is not None and len(recipe.distill.teachers) == 1
    shown = SamplerConfig(vllm=VllmConfig(), sglang=SglangConfig())
    assert recipe.sampler == shown, "sections that a run may be without are shown"
    assert recipe.engine == EngineConfig()
    given = {"model", "tasks", "ppo", "distill", "sampler", "engine"}
    defaults: dict[str, LoopConfig] = {
        "sft": SFTConfig(),
        "grpo": GRPOConfig(),
        "async_grpo": AsyncGRPOConfig(),
        "dpo": DPOConfig(),
        "best_of_n": BestOfNConfig(),
    }
    defaults["reward_model"] = RewardModelConfig()
    for name, field in Recipe.model_fields.items():
        if name not in given:
            assert getattr(recipe, name) == defaults.get(name, field.default), name


def test_the_page_names_every_key_with_its_default_and_bounds() -> None:
    page = reference.page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(all_keys()) + len(all_keys(TeacherConfig)), "a list of sections has a table of its own"
    assert "| `group_size` | whole number ≥ 1 | `8` | G: attempts at each task" in page
    assert "| `source` | `jsonl`, `parquet`, `datasets`, `reasoning_gym`, `python` | required |" in page
    assert "| `top_p` | number > 0, ≤ 1 | `1.0` |" in page
    assert "| `max_grad_norm` | number > 0 or `null` | `1.0` |" in page
    assert "| `betas` | list of 2: number ≥ 0, < 1 | `[0.9, 0.95]` |" in page


def test_a_section_shows_the_defaults_that_it_has_in_its_place() -> None:
    sft, grpo = reference.page().split("## `sft.schedule`")[1].split("## `grpo.schedule`")
    assert "| `lr` | number ≥ 0 | `1e-05` |" in sft
    assert "| `lr` | number ≥ 0 | `1e-06` |" in grpo
