"""Toy tokenizers, made on the fly: bytes with a few merges, special tokens, and a chat template."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<s>", "<e>", "<eos>", "<pad>")
MERGES = [("a", "b"), ("Ġ", "t"), ("Ċ", "Ċ"), ("<", "/"), ("e", "r")]

# Ends of turns are followed by a line feed, as in ChatML.
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    def make(template: str | None = CHAT, *, eos: str = "<eos>", pad: str = "<pad>") -> PreTrainedTokenizerFast:
        vocabulary = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, MERGES))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(SPECIALS))
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)
        made.chat_template = template  # pyright: ignore[reportAttributeAccessIssue]
        return made

    return make
