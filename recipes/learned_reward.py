"""A trained reward model as the reward of a recipe: `tasks.reward: learned_reward.py:score`.

Copy this file, and say where the exported folder is, from where `strop` is called.
"""

from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from strop.config.recipe import RendererConfig
from strop.data.tasks import Task
from strop.tokens.base import Renderer
from strop.tokens.build import build_renderer

FOLDER = "runs/reward_model/export"
RENDERER = RendererConfig(kind="plain")  # as in the reward model's recipe


@cache
def loaded() -> tuple[Renderer, PreTrainedModel]:
    """(the renderer, the model), read once."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER).eval()
    return build_renderer(RENDERER, tokenizer, [tokenizer.eos_token_id]), model


def score(task: Task, reply: str) -> float:
    """What the reward model gives the reply: it was trained on replies that end as the tokenizer's do."""
    renderer, model = loaded()
    tokens = [*renderer.start(task.messages), *renderer.answer(task.messages, reply)[0]]
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits.item()
