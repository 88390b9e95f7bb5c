"""Addition for a model that starts from nothing: a tokenizer of characters, and the problems. For `scratch.yaml`.

With a wrong answer beside the right one they are preferences, for `dpo.yaml` and `reward_model.yaml`.
"""

from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strop.data.tasks import Task

END, PAD = "<end>", "<pad>"


def tokenizer() -> PreTrainedTokenizerFast:
    """Digits, + and =, each a token of its own; `<end>` ends an answer."""
    vocabulary = {character: i for i, character in enumerate("0123456789+=")}
    vocabulary |= {END: len(vocabulary), PAD: len(vocabulary) + 1}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="none: other characters are errors"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()  # join without spaces
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=END, pad_token=PAD)


def addition(digits: int = 2) -> list[dict[str, str]]:
    """Every sum of two numbers of so many digits: "12+34=" is answered by "64", the digits of 46 in reverse.

    That is the order in which one carries, so each digit follows from what stands there already.
    """
    numbers = [f"{number:0{digits}d}" for number in range(10**digits)]
    return [{"prompt": f"{a}+{b}=", "answer": str(int(a) + int(b))[::-1]} for a in numbers for b in numbers]


def preferences(digits: int = 2) -> list[dict[str, str]]:
    """The same problems, each with two answers: `chosen` is right, and `rejected` differs from it in one digit."""
    rows, dice = addition(digits), Random(0)
    for row in rows:
        right = row["answer"]
        place = dice.randrange(len(right))
        wrong = (int(right[place]) + dice.randrange(1, 10)) % 10
        row |= {"chosen": right, "rejected": f"{right[:place]}{wrong}{right[place + 1 :]}"}
    return rows


def score(task: Task, reply: str) -> float:
    """1 for the right digits and nothing else."""
    return float(reply == task.answer)
