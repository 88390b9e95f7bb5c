"""A workload's prompts as token ids, for samplers that take ids: what the workload's tokenizer makes of its texts."""

from __future__ import annotations

from benchmarks.peers import common

FIRST_LETTER = common.UNK + 1


def prompt_ids(workload: common.Workload) -> list[list[int]]:
    id_of = {letter: FIRST_LETTER + index for index, letter in enumerate(common.LETTERS)}
    return [[id_of[word] for word in prompt.split()] for prompt in workload.prompts()]
