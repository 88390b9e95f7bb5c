"""Every knob of a run, declared once: name, type, unit, default and meaning. A recipe file is one `Recipe`.

The command line reads these, the reference page is generated from them, and the resolved recipe in a run folder is one
of them written back. Each description sits beside its field; sizes are in tokens and times in seconds unless a name
says otherwise.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.activations import ActivationsConfig
from strop.config.adapter import AdapterConfig
from strop.config.imitation import BestOfNConfig, DistillConfig
from strop.config.loops import LoopConfig, SFTConfig
from strop.config.model import ModelConfig
from strop.config.parallel import ParallelConfig, RuntimeConfig
from strop.config.policy import AsyncGRPOConfig, GRPOConfig
from strop.config.ppo import PPOConfig
from strop.config.preferences import DPOConfig, RewardModelConfig
from strop.config.section import Fraction, GroupName, NonNegative, Plain, Positive, Section
from strop.config.sglang import SglangConfig
from strop.config.vllm import VllmConfig


class RendererConfig(Section):
    """How messages become tokens."""

    kind: Literal["template", "plain"] = "template"
    """`template` uses the tokenizer's own chat template; `plain` joins the contents as they are."""
    system: str | None = None
    """A system message put before every conversation."""


class TooLong(StrEnum):
    ERROR = "error"
    DROP = "drop"


class TasksConfig(Section):
    """Where tasks come from and how answers are scored."""

    source: Literal["jsonl", "parquet", "datasets", "reasoning_gym", "python"]
    """`jsonl` and `parquet` are files, `datasets` a folder that Hugging Face datasets saved, `reasoning_gym` a
    generator of that package by name, `python` a function that returns tasks."""
    path: str
    """The file or folder, the generator's name, or file.py:function. Files are relative to the recipe's folder."""
    arguments: Plain = {}
    """Keyword arguments of the generator or function."""
    prompt_key: str = "prompt"
    """Field of a row that holds the question: text, or a list of messages."""
    answer_key: str = "answer"
    """Field of a row that holds the expected answer. A row without it is answered by its chosen reply."""
    chosen_key: str | None = None
    """Field of a row that holds the better of two replies, as text; null: rows hold no pairs."""
    rejected_key: str | None = None
    """Field of a row that holds the worse one, as text."""
    margin_key: str | None = None
    """Field of a row that says by how much the chosen reply is better, a number, for `reward_model`; null: 0."""
    reply_key: str | None = None
    """Field of a row that holds one reply, good or bad, as text, for `dpo` of kind `kto`; instead of pairs."""
    label_key: str | None = None
    """Field of a row that says whether its one reply is good: true or false."""
    limit: Positive | None = None
    """Take only this many tasks."""
    holdout: NonNegative = 0
    """This many tasks, drawn by `holdout_seed`, are kept for evaluation and never trained on."""
    holdout_seed: int = 0
    """Draws the held-out tasks; independent of the run's seed, so that runs can be compared."""
    env: str = "single_turn"
    """`single_turn`, or file.py:Class, called with a task, for your own environment."""
    reward: str = "exact"
    """`exact`, `number`, `math`, the source's own `reasoning_gym`, or file.py:function(task, reply) -> float."""
    max_turns: Positive = 1
    """Replies in one episode at the most."""
    episode_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """An episode that has not ended after so long has failed; it is counted, as any that fails."""
    too_long: Annotated[TooLong, Field(strict=False)] = TooLong.ERROR
    """What happens to a sequence longer than `engine.pack_tokens`: stop and name its task, or drop and count it."""

    @property
    def has_pairs(self) -> bool:
        """Whether every row holds a chosen and a rejected reply."""
        return self.chosen_key is not None

    @property
    def has_labels(self) -> bool:
        """Whether every row holds one reply, and whether it is good."""
        return self.label_key is not None

    @model_validator(mode="after")
    def _preferences_are_whole(self) -> Self:
        if (self.chosen_key is None) != (self.rejected_key is None):
            raise ValueError("chosen_key and rejected_key go together: a pair has both replies")
        if (self.reply_key is None) != (self.label_key is None):
            raise ValueError("reply_key and label_key go together: a reply, and whether it is good")
        if self.has_pairs and self.has_labels:
            raise ValueError("give chosen_key and rejected_key for rows of pairs, or reply_key and label_key, not all")
        if self.margin_key is not None and not self.has_pairs:
            raise ValueError("margin_key is the distance of two replies: give chosen_key and rejected_key too")
        return self


class ParamGroupConfig(Section):
    """Parameters that get a name of their own, so that a schedule or a hand-written loop can address them."""

    match: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Patterns of parameter names: `*` stands for characters of one dotted part, `**` for any number of parts."""
    decay: bool = True
    """Whether weight decay reaches them without their being named."""


class EngineConfig(Section):
    """The training backend."""

    kind: Literal["fsdp2"] = "fsdp2"
    """Which backend trains: `fsdp2` is plain PyTorch, in this process."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of hidden matrices; embeddings, heads, norms and biases stay with AdamW."""
    param_groups: dict[GroupName, ParamGroupConfig] = {}
    """Named groups of parameters, each {match: [patterns], decay: true or false}, beside `adamw/decay`,
    `adamw/no_decay` (biases and norm weights) and `muon/hidden`; group `x` is `adamw/x`, and `muon/x` where Muon takes
    its matrices."""
    pack_tokens: Positive = 4096
    """Tokens in one forward pass; memory for activations grows with it, results do not depend on it."""
    share_prefixes: bool = True
    """Compute a group's prompt once for all its attempts."""
    head: Literal["plain", "chunked", "fused", "triton", "liger"] = "chunked"
    """`plain` keeps the logits of a whole batch; `chunked` streams over them and computes them again in the backward
    pass; `fused` computes them once, and is `chunked` for losses of whole sequences; `triton` is `chunked` in kernels
    for a GPU; `liger` is liger-kernel's."""
    head_rows: Positive = 256
    """Tokens whose logits are in flight at once in a `chunked`, `fused` or `triton` head: 4 bytes times this and 2048,
    and the whole vocabulary instead in `fused`."""
    parallel: ParallelConfig = ParallelConfig()
    """The ranks that hold the model together; one rank by default, in this process."""
    runtime: RuntimeConfig = RuntimeConfig()
    """What starts those ranks and watches over them."""
    adapter: AdapterConfig = AdapterConfig()
    """A low-rank adapter that is trained instead of the whole model; the model itself then serves as the reference."""
    activations: ActivationsConfig = ActivationsConfig()
    """What a forward pass keeps for its backward pass, and where."""
    max_skipped_steps: Positive = 3
    """Stop after this many optimizer steps in a row were skipped for non-finite gradients."""


class SamplerConfig(Section):
    """What draws the attempts."""

    kind: Literal["builtin", "vllm", "sglang"] = "builtin"
    """Which sampler draws: `builtin` batches continuously over the trainer's own model code, in this process; `vllm` is
    vLLM in a process and a Python of its own; `sglang` is a running sglang server."""
    vllm: VllmConfig | None = None
    """How vLLM is started or reached, for kind vllm."""
    sglang: SglangConfig | None = None
    """How an sglang server is reached, for kind sglang."""
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """The number format that it draws in; `model` is the trainer's. A coarser one draws from a slightly other policy:
    see max_gap, and a loop's ratio_to, correction and router_replay."""
    actors: NonNegative = 0
    """Samplers in processes of their own, as actors of the Ray cluster at engine.runtime.address; 0 draws in this
    process."""
    publish: Literal["full", "delta", "broadcast", "disk"] = "full"
    """How actors, or vLLM, get new weights, in the format of `dtype`: `full` sends all of them; `delta` what changed in
    each, where that is less, and the trainer and every receiver keep a copy to compare with. For actors alone:
    `broadcast` sends them to all at once, over gloo; `disk` is a folder in run.folder, which every machine must see."""
    max_running: Positive = 256
    """Requests decoded together; at an sglang server at once, which has its own --max-running-requests."""
    cache_tokens: Positive = 65_536
    """Size of the paged key-value cache; requests wait when it is full. An sglang server sizes its own."""
    max_gap: Annotated[float, Field(gt=0)] = 1e-3
    """Stop when the sampler's logprobs and the trainer's, for the same tokens and weights, differ by more than this
    anywhere."""

    @property
    def serves_adapter(self) -> bool:
        """Whether it draws with an adapter over the trainer's own model. All others are sent whole models, and the
        adapter is merged into them."""
        return self.kind == "builtin" and not self.actors

    def model(self, trained: ModelConfig) -> ModelConfig:
        """The model that it draws with: the trained one, in its own number format."""
        return trained if self.dtype == "model" else trained.model_copy(update={"dtype": self.dtype})


class DrawConfig(Section):
    """How attempts are drawn."""

    max_tokens: Positive = 256
    """Sampled tokens in one reply at the most."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits. Training needs it above 0."""
    top_k: NonNegative = 0
    """Draw from the k likeliest tokens only; 0 takes all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of likeliest tokens that has this much probability."""
    min_p: Fraction = 0.0
    """Draw only tokens at least this fraction as likely as the likeliest."""
    stop: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Strings that end a reply, beside the renderer's own stop tokens."""


class EvaluateConfig(Section):
    """Held-out accuracy: before, after and along the way. A task is solved when its reward is at least `solved_at`."""

    every: NonNegative = 0
    """Steps between evaluations; 0 evaluates before and after only."""
    attempts: Positive = 4
    """Sampled attempts at each held-out task."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of the sampled attempts; `greedy` adds the answer at temperature 0."""
    greedy: bool = True
    """Also answer each task once at temperature 0."""
    solved_at: float = 1.0
    """The reward from which on a task counts as solved."""
    keep_best: bool = True
    """Keep the checkpoint with the best sampled accuracy beside the newest ones."""


class RunConfig(Section):
    """The run folder and what is written into it."""

    folder: str = "runs/{recipe}"
    """Where everything goes, relative to the current folder; {recipe} is the recipe file's name without its ending."""
    save_every: NonNegative = 0
    """Steps between checkpoints; 0 keeps only the last, and the best."""
    keep: Positive = 2
    """Newest checkpoints to keep."""
    restarts: NonNegative = 0
    """Times that a run goes on from its newest checkpoint by itself after a rank of its engine was lost."""
    samples_per_step: NonNegative = 4
    """Attempts written to samples.jsonl at each step."""
    track: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()
    """Write for these too, beside metrics.jsonl: TensorBoard event files, an offline Weights & Biases run."""
    live: bool = True
    """Draw progress in the terminal when there is one."""


LOOPS = ("sft", "dpo", "reward_model", "grpo", "async_grpo", "ppo", "distill", "best_of_n")
"""The sections of a recipe that are loops, in the order in which they run."""
NO_LOOP = f"there is no loop to run: add one or more of the sections {', '.join(LOOPS)}"


class Recipe(Section):
    """One run: its parts, and the loops to run, in the order in which they stand here. At least one."""

    seed: int = 0
    """Draws tasks, samples and fresh weights."""
    threads: NonNegative = 0
    """Threads for arithmetic; 0 takes every core."""
    model: ModelConfig
    """The model that is trained."""
    renderer: RendererConfig = RendererConfig()
    """How messages become tokens."""
    tasks: TasksConfig
    """Where tasks come from and how answers are scored."""
    draw: DrawConfig = DrawConfig()
    """How attempts are drawn, in training and in evaluation (which has its own temperature)."""
    engine: EngineConfig = EngineConfig()
    """The training backend."""
    sampler: SamplerConfig = SamplerConfig()
    """What draws the attempts."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Held-out accuracy."""
    sft: SFTConfig | None = None
    """Supervised fine-tuning; null leaves it out."""
    dpo: DPOConfig | None = None
    """Learning from preferences; null leaves it out."""
    reward_model: RewardModelConfig | None = None
    """A reward model, instead of a policy; null leaves it out."""
    grpo: GRPOConfig | None = None
    """Group-relative policy optimisation; null leaves it out."""
    async_grpo: AsyncGRPOConfig | None = None
    """The same with attempts drawn ahead; null leaves it out."""
    ppo: PPOConfig | None = None
    """Proximal policy optimisation, with a critic; null leaves it out."""
    distill: DistillConfig | None = None
    """On-policy distillation; null leaves it out."""
    best_of_n: BestOfNConfig | None = None
    """Best-of-n fine-tuning, or rejection sampling; null leaves it out."""
    run: RunConfig = RunConfig()
    """The run folder and what is written into it."""

    @model_validator(mode="after")
    def _has_a_loop(self) -> Self:
        if not self.loops():
            raise ValueError(NO_LOOP)
        if self.engine.adapter.rank and "reward_model" in self.loops():
            raise ValueError("engine.adapter.rank is above 0: a reward model is trained whole, so set it to 0")
        if self.sft is not None and self.sft.stop_at_accuracy is not None and not self.evaluate.every:
            raise ValueError("sft.stop_at_accuracy needs evaluate.every above 0: accuracy is known only where measured")
        return self

    def loops(self) -> dict[str, LoopConfig]:
        """The loops that this recipe runs, by name, in the order in which they run."""
        named: dict[str, LoopConfig | None] = {
            "sft": self.sft,
            "dpo": self.dpo,
            "reward_model": self.reward_model,
            "grpo": self.grpo,
            "async_grpo": self.async_grpo,
            "ppo": self.ppo,
            "distill": self.distill,
            "best_of_n": self.best_of_n,
        }
        return {name: loop for name, loop in named.items() if loop is not None}

    def _spread_adapter_conflicts(self) -> list[str]:
        problems: list[str] = []
        if self.engine.parallel.tensor > 1:
            problems.append(
                f"engine.parallel.tensor is {self.engine.parallel.tensor}, and an adapter's base is not cut by tensor: "
                "set it to 1, or engine.adapter.rank to 0"
            )
        if "experts" in self.engine.adapter.targets:
            problems.append("engine.adapter.targets: over ranks adapters have no experts; leave them out")
        if self.ppo is not None and self.ppo.critic.model is None:
            problems.append(
                "ppo.critic copies the policy, which over ranks is the model without its adapter: name a "
                "ppo.critic.model, or set engine.adapter.rank to 0"
            )
        return problems

    def _vllm_conflicts(self) -> list[str]:
        vllm, problems = self.sampler.vllm, list[str]()
        if vllm is None or bool(vllm.python) == bool(vllm.address):
            problems.append(
                "sampler.kind is vllm: set sampler.vllm.python to the Python of an environment that has vLLM, or "
                "sampler.vllm.address to where one was started, and not both"
            )
        elif vllm.address and not vllm.key_file:
            problems.append("sampler.vllm.address is set: set sampler.vllm.key_file, whose text both ends know")
        if self.reward_model is not None:
            problems.append("sampler.kind vllm holds a model that speaks: set it to builtin for reward models")
        return problems

    def _sglang_conflicts(self) -> list[str]:
        sglang, problems = self.sampler.sglang, list[str]()
        if sglang is None or not sglang.address:
            problems.append("sampler.kind is sglang: set sampler.sglang.address to where a server listens")
        else:
            problems.extend(sglang.problems())
        if self.reward_model is not None:
            problems.append("sampler.kind sglang holds a model that speaks: set it to builtin for reward models")
        if self.sampler.actors:
            problems.append("sampler.actors would all ask the one sglang server: set it to 0")
        if self.draw.min_p:
            problems.append("draw.min_p is above 0, which sglang does not draw with and a seed: set it to 0")
        if self.draw.top_p < 1 and not self.draw.top_k:
            problems.append(
                "draw.top_p is below 1: sglang tells the logprobs of such draws for a given top_k only, so set "
                "draw.top_k too, or draw.top_p to 1"
            )
        return problems

    def conflicts(self) -> list[str]:
        """What the loops ask of each other and of the tasks, and do not get: a sentence each."""
        problems: list[str] = []
        coarser = self.sampler.dtype not in ("model", self.model.dtype)
        if self.engine.adapter.rank and self.sampler.serves_adapter and coarser:
            problems.append(
                f"sampler.dtype is {self.sampler.dtype}, but under engine.adapter the builtin sampler draws with the "
                "trainer's own model: set it to model, or sampler.actors above 0"
            )
        ranks = self.engine.parallel.ranks
        if ranks > 1 and self.engine.adapter.rank:
            problems.extend(self._spread_adapter_conflicts())
        if self.sampler.actors and self.reward_model is not None:
            problems.append("sampler.actors hold models that speak: set it to 0 for reward models")
        publish = self.sampler.publish
        if publish != "full" and not self.sampler.actors and (publish, self.sampler.kind) != ("delta", "vllm"):
            problems.append(
                f"sampler.publish is {publish}, which is for sampler.actors, and there are none: set it to full, or "
                "set sampler.actors"
            )
        if self.sampler.kind == "vllm":
            problems.extend(self._vllm_conflicts())
        elif self.sampler.vllm is not None:
            kind = self.sampler.kind
            problems.append(f"sampler.vllm is given, but sampler.kind is {kind}: set it to vllm, or leave it out")
        if self.sampler.kind == "sglang":
            problems.extend(self._sglang_conflicts())
        elif self.sampler.sglang is not None:
            kind = self.sampler.kind
            problems.append(f"sampler.sglang is given, but sampler.kind is {kind}: set it to sglang, or leave it out")
        if self.reward_model is not None and len(self.loops()) > 1:
            problems.append(
                "reward_model makes a model that gives scores and no text, so it is the only loop of its recipe: take "
                "the others out, and give model.path the folder that they export"
            )
        single = self.dpo is not None and self.dpo.loss.kind == "kto"
        pairs = [name for name in ("dpo", "reward_model") if name in self.loops() and not (name == "dpo" and single)]
        if pairs and not self.tasks.has_pairs:
            problems.append(f"{pairs[0]} learns from pairs of replies: set tasks.chosen_key and tasks.rejected_key")
        if single and not (self.tasks.has_pairs or self.tasks.has_labels):
            problems.append(
                "dpo.loss.kind kto learns from better and worse replies: set tasks.chosen_key and tasks.rejected_key, "
                "or tasks.reply_key and tasks.label_key"
            )
        return problems
