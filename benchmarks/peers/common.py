"""The workloads, the same for every system that runs them: models, tokenizer, prompts, reward, and how memory is read.

A system reads the assets folder that `python -m benchmarks.peers.common --assets DIR` makes (random weights of a fixed
seed, so only the amount of work is real), does GRPO steps, and prints what `report_step` and `report_result` print.
Nothing here imports strop: this file also runs in the other systems' environments.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

PAD, EOS, UNK = 0, 1, 2
LETTERS = [chr(code) for code in range(33, 126)]  # the tokens that prompts are made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A random Qwen3 with an untied head."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_channels: int
    feed_forward: int

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def body_parameters(self) -> int:
        """Those that multiply every token: all but the embedding and the head."""
        queries = 2 * self.heads * self.head_channels * self.hidden  # and the output projection
        keys_values = 2 * self.key_value_heads * self.head_channels * self.hidden
        return self.layers * (queries + keys_values + 3 * self.hidden * self.feed_forward)


MODELS = {
    # The end token has probability near 1/128: replies are ragged, 85 tokens in the mean.
    "tiny": Model(vocabulary=128, hidden=256, layers=4, heads=8, key_value_heads=4, head_channels=32, feed_forward=768),
    # Nearly every reply runs to the limit, and matrix products take most of the time.
    "small": Model(
        vocabulary=4096, hidden=512, layers=8, heads=8, key_value_heads=4, head_channels=64, feed_forward=1536
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One GRPO step: `tasks` prompts, `group` attempts at each, one optimizer update.

    Fixed for all: temperature 1, no truncation of the distribution, at most 128 new tokens, learning rate 1e-6, AdamW,
    gradients clipped at 1, token mean over the step, no reference model, float32, one thread.
    """

    model: str
    tasks: int
    group: int = 8
    shortest: int  # prompt length in tokens, drawn evenly between these two
    longest: int
    max_tokens: int = 128
    micro_batch: int = 32  # sequences, for systems that pad; others may pack the same sequences as they like

    def prompts(self) -> list[str]:
        """Texts of whitespace-separated tokens, the same on every call."""
        draw = random.Random(0)
        letters = LETTERS[: MODELS[self.model].vocabulary - 3]
        return [
            " ".join(letters[draw.randrange(len(letters))] for _ in range(draw.randint(self.shortest, self.longest)))
            for _ in range(self.tasks)
        ]

    def floor_flop(self, completion_tokens: int) -> float:
        """The arithmetic that no system can leave out: 2 operations per parameter and token to sample, 6 to train.

        Each prompt counts once per group, the head only at sampled tokens, attention's own products not at all.
        """
        model = MODELS[self.model]
        tokens = sum(len(prompt.split()) for prompt in self.prompts()) + completion_tokens
        return 8.0 * (model.body_parameters * tokens + model.head_parameters * completion_tokens)


WORKLOADS = {
    "A": Workload(model="tiny", tasks=32, shortest=16, longest=64),
    "B": Workload(model="tiny", tasks=32, shortest=192, longest=256),
    "C": Workload(model="small", tasks=8, shortest=16, longest=64),
}


def reward(token_ids: list[int]) -> float:
    """Fraction of even token ids: deterministic, and different for nearly every reply."""
    return sum(1 for token in token_ids if token % 2 == 0) / max(1, len(token_ids))


def build(name: str, assets: Path) -> Path:
    """The folder of one model and its tokenizer, made if it is not there. Returns its path."""
    folder = assets / name
    if folder.exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    model = MODELS[name]
    tokens = ["<pad>", "<eos>", "<unk>", *LETTERS[: model.vocabulary - 3]]
    tokens += [f"t{index}" for index in range(model.vocabulary - len(tokens))]
    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_channels,
        intermediate_size=model.feed_forward,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    network = Qwen3ForCausalLM(config).float()
    assets.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=assets) as scratch:
        made = Path(scratch) / name
        tokenizer.save_pretrained(made)
        network.save_pretrained(made)
        made.rename(folder)
    return folder


def memory_mb(field: str) -> int:
    """This process's memory in MiB, from Linux: `VmRSS` is now, `VmHWM` the most it ever was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) >> 10
    raise RuntimeError(f"/proc/self/status has no {field}: these benchmarks read memory on Linux only")


def report_step(*, rollout: float, learn: float, step: float, wall: float, completion_tokens: int) -> None:
    """Print one step: `rollout`, `learn` and the whole `step` in CPU seconds of this process, `wall` in seconds."""
    record = {"rollout": rollout, "learn": learn, "step": step, "wall": wall, "completion_tokens": completion_tokens}
    print("STEP", json.dumps({name: round(value, 3) for name, value in record.items()}), flush=True)


def report_result(*, base_rss_mb: int) -> None:
    """Print the last line; `base_rss_mb` is the memory held before the first step, the model loaded."""
    print("RESULT", json.dumps({"peak_rss_mb": memory_mb("VmHWM"), "base_rss_mb": base_rss_mb}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the models and tokenizers that the benchmarks run.")
    parser.add_argument("--assets", type=Path, required=True, help="folder to make them in")
    for name in MODELS:
        print(build(name, parser.parse_args().assets))


if __name__ == "__main__":
    main()
