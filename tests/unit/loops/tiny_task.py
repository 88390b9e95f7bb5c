"""A user's file, as a test's recipe names it: tasks, a reward, an environment, a tokenizer."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strop.data.tasks import Task
from strop.envs.base import EnvStep
from strop.types import Message

LETTERS = "0123456789+=?"


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<pad>": 13, "<eos>": 14}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")


def sums(largest: int = 9) -> list[dict[str, str]]:
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(largest + 1) for b in range(largest + 1)]


def pairs(largest: int = 9) -> list[dict[str, str]]:
    """Sums with two replies: the better one is even digits alone."""
    return [row | {"chosen": "24", "rejected": "357"} for row in sums(largest)]


def labelled(largest: int = 9) -> list[dict[str, object]]:
    """Sums with one reply each, and whether it is good."""
    return [
        {"prompt": row["prompt"], "reply": "357" if number % 3 else "24", "good": number % 3 == 0}
        for number, row in enumerate(sums(largest))
    ]


def even_digits(task: Task, reply: str) -> float:
    """A reward that an untrained model meets by chance: the fraction of even digits."""
    digits = [letter for letter in reply if letter.isdigit()]
    return sum(int(digit) % 2 == 0 for digit in digits) / max(len(digits), 1)


class Again:
    """Two turns: the second asks the same question again."""

    def __init__(self, task: Task) -> None:
        self._task, self._turn = task, 0

    async def start(self) -> list[Message]:
        return self._task.messages

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        reward = even_digits(self._task, reply.get("content", ""))
        return EnvStep(reward=reward, done=self._turn == 2, messages=[{"role": "user", "content": "="}])


def broken(task: Task, reply: str) -> float:
    raise KeyError(f"no score for {task.id}")
