"""The renderer that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.config.recipe import RendererConfig
from strop.tokens.base import Renderer
from strop.tokens.plain import PlainRenderer
from strop.tokens.template import TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_renderer(config: RendererConfig, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> Renderer:
    """Raises ConfigError when the tokenizer has no chat template to render with, or nothing ends a reply."""
    if config.kind == "plain":
        return PlainRenderer(tokenizer, end_tokens, config.system)
    return TemplateRenderer(tokenizer, config.system, end_tokens)
