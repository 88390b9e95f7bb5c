"""What is said to an sglang server for one completion, and what its answer means: plain functions, JSON to arrays.

    tokens, SamplingParams -> the body of /generate          its answer -> Drawn: tokens, logprobs, labels, why it ended

Tokens are taken as numbers from `meta_info.output_token_logprobs`, with their logprobs; text is never encoded again.
Fields are those of sglang 0.5.23 (`GenerateReqInput` and `SamplingParams` there, and what its tokenizer manager
answers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from strop.errors import RolloutError
from strop.rollout.base import check_bounds
from strop.types import Float32s, Int32s, SamplingParams, Stop

GREEDY_BELOW = 1e-6  # sglang takes lower temperatures for 0
SEEDS = 1 << 63  # sglang takes seeds of 64 bits with a sign

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What one answer holds. `stop` is None where the server ended at an end token of its model that the request does
    not name: the request goes on behind it."""

    tokens: Int32s
    logprobs: Float32s
    sampling_logprobs: Float32s
    labels: list[str]  # of the weights that drew each token
    stop: Stop | None

    def first(self, count: int, stop: Stop) -> Drawn:
        """The first `count` tokens, as all there is."""
        return Drawn(
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            sampling_logprobs=self.sampling_logprobs[:count],
            labels=self.labels[:count],
            stop=stop,
        )


def check_params(params: SamplingParams) -> None:
    """Raise RolloutError for what nobody can draw, and for what this server cannot."""
    if params.max_tokens < 1:
        raise RolloutError(f"max_tokens={params.max_tokens}: a completion has at least one token")
    if params.routes:
        raise RolloutError("the sglang sampler does not tell which experts were taken: leave router_replay off")
    check_bounds(params)
    if 0 < params.temperature < GREEDY_BELOW:
        raise RolloutError(f"temperature {params.temperature}: sglang takes it for 0; set 0 for greedy")
    if params.temperature == 0:
        return
    if params.min_p:
        raise RolloutError(f"min_p {params.min_p}: sglang does not draw with min_p and a seed; set it to 0")
    if params.top_p < 1 and not params.top_k:
        raise RolloutError(
            f"top_p {params.top_p} without top_k: sglang tells the logprobs of a truncated draw for a given top_k "
            "only; set top_k too, or top_p to 1"
        )


def generate_body(name: str, tokens: list[int], params: SamplingParams, max_tokens: int) -> Json:
    """A request to go on behind `tokens`, of at most `max_tokens`; `name` is unique."""
    sampling: Json = {
        "max_new_tokens": max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "sampling_seed": params.seed % SEEDS,
        "ignore_eos": not params.stop_tokens,  # ignored too would be the stop tokens
        "skip_special_tokens": False,
    }
    if params.temperature == 0:  # greedy: the others say nothing, and a server may refuse them
        sampling |= {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    if params.stop_tokens:
        sampling["stop_token_ids"] = list(params.stop_tokens)
    if params.stop_strings:
        sampling |= {"stop": list(params.stop_strings), "no_stop_trim": True}
    body: Json = {"rid": name, "input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
    if _truncates(params):
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def score_body(name: str, tokens: list[int]) -> Json:
    """A request for the logprob of each prompt token, which draws nothing."""
    sampling: Json = {"max_new_tokens": 0, "temperature": 1.0}
    return {
        "rid": name,
        "input_ids": tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_drawn(answer: Json, params: SamplingParams, max_tokens: int) -> Drawn:
    """RolloutError for an answer that is not whole, not finite, or that ended for anything but a stop or the limit."""
    meta = _field(answer, "meta_info", dict)
    ended, stop = _why(_field(meta, "finish_reason", dict))
    tokens, logprobs = _columns(meta, "output_token_logprobs")
    count = len(tokens)
    if _field(meta, "completion_tokens", int) != count or not 0 < count <= max_tokens:
        raise RolloutError(
            f"sglang drew {meta['completion_tokens']} tokens of at most {max_tokens}, with {count} logprobs"
        )
    drawn = Drawn(
        tokens=tokens,
        logprobs=logprobs,
        sampling_logprobs=_sampling_logprobs(meta, params, logprobs),
        labels=_labels(meta, count),
        stop=stop,
    )
    if stop is Stop.LENGTH:
        if count < max_tokens:
            raise RolloutError(f"sglang stopped after {count} of {max_tokens} tokens at a limit of its own ({ended})")
        return drawn
    if isinstance(ended, str):  # it found a stop string; "NaN happened" comes this way too
        if ended not in params.stop_strings:
            raise RolloutError(f"sglang ended a request after {count} tokens for {ended!r}, which nobody asked for")
        return drawn
    if int(tokens[-1]) in params.stop_tokens:
        return drawn
    return replace(drawn, stop=Stop.LENGTH if count == max_tokens else None)


def read_scores(answer: Json, prompt: Int32s) -> Float32s:
    """Logprob of each prompt token [T]; 0 for the first. RolloutError when the answer is of another prompt."""
    meta = _field(answer, "meta_info", dict)
    _why(_field(meta, "finish_reason", dict))
    rows = _field(meta, "input_token_logprobs", list)
    if rows:  # nothing comes before the first token: the server has null there
        rows = [[0.0, *rows[0][1:]], *rows[1:]]
    tokens, logprobs = _columns({"input_token_logprobs": rows}, "input_token_logprobs")
    if tokens.tolist() != prompt.tolist():
        raise RolloutError(f"sglang scored {len(tokens)} tokens that are not the {len(prompt)} that it was given")
    return logprobs


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and bool(params.top_k)


def _why(reason: Json) -> tuple[Any, Stop]:
    """What ended it, as the server says, and what that means."""
    kind = reason.get("type")
    if kind == "length":
        return reason.get("length"), Stop.LENGTH
    if kind == "stop":
        return reason.get("matched"), Stop.TOKEN
    if kind == "abort":
        raise RolloutError(f"sglang aborted a request: {reason.get('message')}")
    raise RolloutError(f"sglang ended a request for a reason that strop does not know: {reason}")


def _columns(meta: Json, name: str) -> tuple[Int32s, Float32s]:
    """Tokens and logprobs [T] of rows [logprob, token, text]."""
    rows = _field(meta, name, list)
    try:
        logprobs, tokens = [row[0] for row in rows], [row[1] for row in rows]
        broken = any(logprob is None for logprob in logprobs)  # how its JSON writes NaN
        found = np.array(tokens, np.int32), np.array([0.0] if broken else logprobs, np.float32)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise RolloutError(f"sglang's {name} are not rows of a logprob and a token: {str(rows)[:200]}") from error
    if broken or not np.isfinite(found[1]).all():
        raise RolloutError("the model's logits were not finite numbers; look at its weights")
    return found


def _sampling_logprobs(meta: Json, params: SamplingParams, logprobs: Float32s) -> Float32s:
    """Of the distribution that each token was really drawn from [T]."""
    if params.temperature == 0:
        return np.zeros_like(logprobs)
    if not _truncates(params):
        return logprobs.copy()
    told = _field(meta, "output_token_sampling_logprobs", list)
    if len(told) != len(logprobs) or not all(isinstance(value, int | float) for value in told):
        raise RolloutError(f"sglang gave {len(told)} sampling logprobs for {len(logprobs)} tokens: {str(told)[:200]}")
    return np.array(told, np.float32)


def _labels(meta: Json, count: int) -> list[str]:
    """Which weights drew each token: spans that follow each other from the first token to the last."""
    labels: list[str] = []
    for span in _field(meta, "weight_versions", list):
        start, end = (_field(span, key, int) for key in ("start", "end"))
        if start != len(labels) or end <= start:
            raise RolloutError(f"sglang's weight_versions do not follow each other: {meta['weight_versions']}")
        labels += [_field(span, "version", str)] * (end - start)
    if len(labels) != count:
        raise RolloutError(f"sglang's weight_versions are of {len(labels)} tokens, and {count} were drawn")
    return labels


def _field(record: Any, name: str, kind: type[Any]) -> Any:
    """A field of an answer, which must be there and be a `kind`."""
    value: Any = cast("Json", record).get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        shown = str(cast("object", record))[:200]
        raise RolloutError(f"sglang's answer has no {name} of kind {kind.__name__}: {shown}")
    return value
