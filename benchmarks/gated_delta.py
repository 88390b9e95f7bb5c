"""Linear attention by the gated delta rule, on one thread: python -m benchmarks.gated_delta

float32, CPU seconds of this process, the best of several rounds in which the forms take turns; results are compared in
the same run. `rule` is the rule alone, named by its key heads, value heads and channels (Qwen3-Next has twice as many
value heads as key heads); `layer` a whole layer of Qwen3.5 with its projections and its convolution.

First the packed chunked form beside the definition, token by token (which keeps a gigabyte for its backward pass, and
has one round there). Then beside transformers' own eager form, which
takes no packs: it gets the texts one after the other, or as a padded batch (`padded`), whichever it is faster at, and
repeats a prompt for each of its attempts where strop shares it.

The last line is ratio= the smallest speed-up over transformers, recurrent= the smallest over the definition forward and
backward, and recurrent_forward= the smallest forward alone.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule
from transformers.utils import logging

from strop.models.attention import PackedAttention
from strop.models.linear_attention import hook
from strop.ops.gated_delta import gated_delta_rule, recurrent_gated_delta_rule
from strop.ops.select import Impl, resolve
from strop.types import Layout

CHANNELS = 128
LARGEST_GAP = 1e-4  # between two forms' results, of the largest number among them
Form = Callable[[], list[Tensor]]


@dataclass
class Report:
    """Prints rows as they come and keeps the speed-ups."""

    rounds: int
    ratios: list[float] = field(default_factory=list)

    def row(self, name: str, ours: Form, others: dict[str, Form]) -> None:
        """Time strop's form beside the others', of which the fastest counts."""
        forms = {"strop": ours, **others}
        results = {label: form() for label, form in forms.items()}
        for label in others:
            _agree(f"{name}, {label}", results["strop"], results[label])
        del results
        best = dict.fromkeys(forms, float("inf"))
        for _ in range(self.rounds):
            for label, form in forms.items():
                start = time.process_time()
                form()
                best[label] = min(best[label], time.process_time() - start)
        fastest = min(others, key=lambda label: best[label])
        self.ratios.append(best[fastest] / best["strop"])
        times = "  ".join(f"{label} {seconds * 1e3:8.1f} ms" for label, seconds in best.items())
        print(f"{name:44} {times}  x{self.ratios[-1]:.2f}", flush=True)


def _agree(name: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        gap = float((a - b).abs().max()) / float(b.abs().max())
        if gap > LARGEST_GAP:
            raise SystemExit(f"{name}: results differ by {gap:.1e} of the largest")


@dataclass(frozen=True)
class Rule:
    """Inputs of the rule, and a fixed gradient of its outputs."""

    layout: Layout
    inputs: list[Tensor]  # q, k, v, decay, beta
    seed_THC: Tensor

    @classmethod
    def random(cls, layout: Layout, J: int, H: int, C: int = CHANNELS) -> Rule:
        T = layout.num_tokens
        q, k = (nn.functional.normalize(torch.randn(T, J, C), dim=-1) for _ in range(2))
        decay, beta = -nn.functional.softplus(torch.randn(T, H) - 2.0), torch.rand(T, H)
        inputs = [q * C**-0.5, k, torch.randn(T, H, C), decay, beta]
        return cls(layout, [x.requires_grad_() for x in inputs], torch.randn(T, H, C))

    def ours(self, learn: bool) -> list[Tensor]:
        with torch.set_grad_enabled(learn):
            q, k, v, decay, beta = self.inputs
            out_THC, _ = gated_delta_rule(q, k, v, decay, beta, self.layout, impl=Impl.TORCH)
        return [*torch.autograd.grad(out_THC, self.inputs, self.seed_THC)] if learn else [out_THC]

    def definition(self, learn: bool) -> list[Tensor]:
        with torch.set_grad_enabled(learn):
            q, k, v, decay, beta = self.inputs
            out_THC, _ = recurrent_gated_delta_rule(q, k, v, decay, beta, self.layout)
        return [*torch.autograd.grad(out_THC, self.inputs, self.seed_THC)] if learn else [out_THC]

    def one_by_one(self) -> list[Tensor]:
        """transformers' form, forward and backward, text by text."""
        grads = [torch.zeros_like(x) for x in self.inputs]
        for first, length in zip(self.layout.starts_S.tolist(), self.layout.lengths, strict=True):
            own = slice(first, first + length)
            parts = [x.detach()[own][None].requires_grad_() for x in self.inputs]
            out = _transformers(parts)
            for grad, part in zip(grads, torch.autograd.grad(out, parts, self.seed_THC[own][None]), strict=True):
                grad[own] = part[0]
        return grads

    def padded(self) -> list[Tensor]:
        lengths = list(self.layout.lengths)

        def batch(x: Tensor) -> Tensor:
            return nn.utils.rnn.pad_sequence(list(x.split(lengths)), batch_first=True)

        parts = [batch(x.detach()).requires_grad_() for x in self.inputs]
        grads = torch.autograd.grad(_transformers(parts), parts, batch(self.seed_THC))
        return [torch.cat([row[:n] for row, n in zip(grad, lengths, strict=True)]) for grad in grads]


def _transformers(inputs: list[Tensor]) -> Tensor:
    q, k, v, decay, beta = inputs
    return torch_chunk_gated_delta_rule(q * q.shape[-1] ** 0.5, k, v, g=decay, beta=beta)[0]


def shared_and_repeated(prompt: int, replies: list[int]) -> tuple[Layout, Layout]:
    shared = Layout((prompt, *replies), (-1, *[0] * len(replies)))
    return shared, Layout(tuple(prompt + n for n in replies))


def layer(report: Report, name: str, shared: Layout, texts: Layout, hidden: int, impl: Impl) -> None:
    """A whole layer: `shared` is packed for strop, `texts` are what transformers gets, one by one or padded."""
    config: Any = Qwen3_5TextConfig(
        hidden_size=hidden, linear_num_key_heads=16, linear_num_value_heads=16, num_hidden_layers=1
    )
    torch.manual_seed(0)
    plain, hooked = Qwen3_5GatedDeltaNet(config, 0), Qwen3_5GatedDeltaNet(config, 0)
    hooked.load_state_dict(plain.state_dict())
    hook(hooked, impl)
    x_TD = torch.randn(shared.num_tokens, hidden)
    prefix = x_TD[: shared.lengths[0]] if max(shared.parents) >= 0 else x_TD[:0]
    own = x_TD[len(prefix) :].split([n - len(prefix) for n in texts.lengths])
    rows = [torch.cat((prefix, part)) for part in own]

    def learn(module: nn.Module, outs: list[Tensor]) -> list[Tensor]:
        """The gradient of the sum of squares of what is not a shared prompt."""
        loss = torch.stack([out.square().sum() for out in outs]).sum()
        return [*torch.autograd.grad(loss, list(module.parameters()))]

    def ours() -> list[Tensor]:
        out_TD = hooked(x_TD[None], attention=PackedAttention(shared, impl))[0]
        return learn(hooked, [out_TD[len(prefix) :]])

    def one_by_one() -> list[Tensor]:
        return learn(plain, [plain(row[None])[0, len(prefix) :] for row in rows])

    def padded() -> list[Tensor]:
        out = plain(nn.utils.rnn.pad_sequence(rows, batch_first=True))
        return learn(plain, [out[s, len(prefix) : len(row)] for s, row in enumerate(rows)])

    report.row(
        name, ours, {"transformers": one_by_one, "padded": padded} if len(rows) > 1 else {"transformers": one_by_one}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each form; the best counts")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    impl = resolve("auto", dtype=torch.float32, device=torch.device("cpu"))
    short = Layout(tuple(rng.randint(40, 130) for _ in range(12)))
    shared, repeated = shared_and_repeated(220, [rng.randint(60, 110) for _ in range(8)])

    training, scoring = Report(1), Report(arguments.rounds)
    group = Layout((512, *[448] * 8), (-1, *[0] * 8))
    for name, layout in (("one text of 4096", Layout((4096,))), ("512 + 8 x 448 shared", group)):
        rule = Rule.random(layout, 1, 2)
        for learn, defined in ((True, training), (False, scoring)):
            defined.row(
                f"rule 1/2/{CHANNELS}, {name}, {'fwd+bwd' if learn else 'forward'}",
                lambda rule=rule, learn=learn: rule.ours(learn),
                {"definition": lambda rule=rule, learn=learn: rule.definition(learn)},
            )

    report = Report(arguments.rounds)
    for heads in ((4, 4), (4, 8)):
        for name, layout in (("one text of 1024", Layout((1024,))), ("12 of 40-130", short)):
            rule = Rule.random(layout, *heads)
            others = {"transformers": rule.one_by_one, "padded": rule.padded}
            report.row(
                f"rule {heads[0]}/{heads[1]}/{CHANNELS}, {name}, fwd+bwd",
                lambda rule=rule: rule.ours(True),
                others if len(layout.lengths) > 1 else {"transformers": rule.one_by_one},
            )
    layer(report, "layer 1024, one text of 1024, fwd+bwd", Layout((1024,)), Layout((1024,)), 1024, impl)
    layer(report, "layer 1024, 12 of 40-130, fwd+bwd", short, short, 1024, impl)
    layer(report, "layer 1024, 220 + 8 x 85 shared, fwd+bwd", shared, repeated, 1024, impl)
    print(
        f"ratio={min(report.ratios):.2f} recurrent={min(training.ratios):.1f} "
        f"recurrent_forward={min(scoring.ratios):.1f}"
    )


if __name__ == "__main__":
    main()
