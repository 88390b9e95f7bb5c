"""Chat templates as renderers: what was sampled stays, what follows it is the template's, and rewriting is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.recipe import RendererConfig
from strop.envs.base import EnvStep
from strop.errors import ConfigError, DataError
from strop.rollout.base import play
from strop.tokens.build import build_renderer
from strop.tokens.example import encode_example
from strop.tokens.plain import PlainRenderer
from strop.tokens.template import TemplateRenderer
from strop.types import Completion, Int32s, Message, Prompt, SamplingParams, Segment, Stop

# The rule of Qwen3: reasoning is shown in replies after the last user message, and dropped from those before it.
THINKING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
<s>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<e>
{% endfor -%}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""
OPENED = THINKING.replace("<s>assistant\n{% endif %}", "<s>assistant\n<think>\n{% endif %}")
PARTS = (
    "{% for m in messages %}<s>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
STRICT_PARTS = PARTS.replace(
    "{% for p in m.content %}",
    "{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}{% for p in m.content %}",
)
CALLS = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


CHAT_WITH_ANOTHER_HEADER = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>bot\n{% endif %}"
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def sampled(renderer: TemplateRenderer, tokenizer, text: str) -> Int32s:
    """The tokens of a reply as a model would draw them, its end of turn included."""
    return np.array([*tokenizer.encode(text, add_special_tokens=False), renderer.stop_tokens[0]], np.int32)


def acted(tokens: Int32s) -> Completion:
    n = len(tokens)
    zeros = np.zeros(n, np.float32)
    return Completion(
        tokens=tokens, logprobs=zeros, sampling_logprobs=zeros, versions=np.zeros(n, np.int32), stop=Stop.TOKEN
    )


@pytest.fixture(scope="module")
def toy(make_tokenizer):
    tokenizer = make_tokenizer()
    return tokenizer, TemplateRenderer(tokenizer, end_tokens=[2])


def test_start_is_the_rendered_text(toy) -> None:
    tokenizer, renderer = toy
    tokens = renderer.start([user("hi")])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s>user\nhi<e>\n<s>assistant\n"
    assert tokens.dtype == np.int32 and tokens[0] == 0
    assert renderer.stop_tokens == (1, 2)  # the template's end of turn, then the model's own


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.text(max_size=8), st.sampled_from(["user", "tool"]), st.text(max_size=8)), max_size=4))
def test_increments_add_up_to_the_whole_render(toy, turns: list[tuple[str, str, str]]) -> None:
    """B01, B20: tokens gathered turn by turn are those of the full render, and separators are not the policy's."""
    tokenizer, renderer = toy
    history = [user("go")]
    segment = Segment()
    segment.observe(renderer.start(history))
    for reply, role, text in turns:
        tokens = sampled(renderer, tokenizer, reply)
        segment.act(acted(tokens))
        history = [*history, said(reply)]
        new = [Message(role=role, content=text)]
        delta = renderer.observe(history, new, tokens)
        assert delta is not None
        segment.observe(delta)
        history += new
    assert segment.tokens.tolist() == renderer.start(history).tolist()
    ends = np.flatnonzero(segment.sampled & (segment.tokens == 1))
    assert len(ends) == len(turns)
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    assert all(segment.tokens[end + 1] == newline and not segment.sampled[end + 1] for end in ends)


def test_what_follows_an_end_token_begins_with_the_separator(toy) -> None:
    """B04: the prompt ends with end and line feed, the sample with the end alone; the line feed is not lost."""
    tokenizer, renderer = toy
    delta = renderer.observe([user("x"), said("y")], [user("z")], sampled(renderer, tokenizer, "y"))
    assert tokenizer.decode(delta, skip_special_tokens=False) == "\n<s>user\nz<e>\n<s>assistant\n"


def test_a_reply_without_its_end_token_is_closed_by_the_template(toy) -> None:
    """A stop string ended it: the turn still needs its end, which the policy did not draw."""
    tokenizer, renderer = toy
    tokens = np.array(tokenizer.encode("y"), np.int32)
    delta = renderer.observe([user("x"), said("y")], [user("z")], tokens)
    assert delta is not None and delta[0] == 1
    assert tokenizer.decode(delta, skip_special_tokens=False) == "<e>\n<s>user\nz<e>\n<s>assistant\n"


def test_sampled_tokens_are_never_encoded_again(toy) -> None:
    """B05: "ab" has a token of its own, the model drew "a" and "b": those stay, and nothing shifts."""
    tokenizer, renderer = toy
    assert len(tokenizer.encode("ab")) == 1
    drawn = np.array([tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b"), 1], np.int32)
    segment = Segment()
    segment.observe(renderer.start([user("x")]))
    segment.act(acted(drawn))
    reply = renderer.parse(drawn)
    assert reply == said("ab")
    delta = renderer.observe([user("x"), reply], [user("z")], drawn)
    assert delta is not None
    segment.observe(delta)
    assert segment.tokens[segment.sampled].tolist() == drawn.tolist()
    assert len(segment) == len(renderer.start([user("x"), reply, user("z")])) + 1  # one more than the canonical form


def test_dropped_reasoning_is_noticed(make_tokenizer) -> None:
    """B06: a user's next message makes this template drop the reasoning before it; a tool's result does not."""
    tokenizer = make_tokenizer(THINKING)
    renderer = TemplateRenderer(tokenizer)
    tokens = sampled(renderer, tokenizer, "<think>\nhm\n</think>\n\nyes")
    reply = renderer.parse(tokens)
    assert reply == Message(role="assistant", content="yes", reasoning_content="hm")
    assert renderer.observe([user("x"), reply], [user("z")], tokens) is None
    delta = renderer.observe([user("x"), reply], [Message(role="tool", content="r")], tokens)
    assert delta is not None
    assert tokenizer.decode(delta, skip_special_tokens=False) == "\n<s>tool\nr<e>\n<s>assistant\n"
    # The same one turn later: the first reply's reasoning goes, though the last one had none.
    plain = sampled(renderer, tokenizer, "ok")
    history = [user("x"), reply, Message(role="tool", content="r"), said("ok")]
    assert renderer.observe(history, [user("z")], plain) is None
    # A reply without reasoning extends as ever.
    assert renderer.observe([user("x"), said("ok")], [user("z")], plain) is not None


class Scripted:
    """A sampler that draws what it is told."""

    version = 0

    def __init__(self, replies: list[Int32s]) -> None:
        self.replies = list(replies)
        self.prompts: list[list[int]] = []

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.prompts.append(prompt.tokens.tolist())
        return acted(self.replies.pop(0))


class Asks:
    """Asks again and again."""

    async def start(self) -> list[Message]:
        return [user("one")]

    async def step(self, reply: Message) -> EnvStep:
        return EnvStep(done=False, messages=[user("more")])


def test_an_episode_splits_where_the_template_rewrites(make_tokenizer) -> None:
    """B06: each segment holds what its own samples were drawn after, and every sample is in one of them."""
    import asyncio

    tokenizer = make_tokenizer(THINKING)
    renderer = TemplateRenderer(tokenizer)
    replies = [sampled(renderer, tokenizer, t) for t in ("<think>\na\n</think>\n\nb", "c", "d")]
    sampler = Scripted(replies)
    trajectory = asyncio.run(play(Asks(), sampler, renderer, SamplingParams(max_tokens=9), max_turns=3))  # pyright: ignore[reportArgumentType]
    assert len(trajectory.segments) == 2
    first, second = trajectory.segments
    assert first.tokens[first.sampled].tolist() == replies[0].tolist()
    assert second.tokens[second.sampled].tolist() == [*replies[1].tolist(), *replies[2].tolist()]
    text = tokenizer.decode(second.tokens, skip_special_tokens=False)
    assert "<think>" not in text and text.startswith("<s>user\none<e>\n<s>assistant\nb<e>\n<s>user\nmore<e>")
    for prompt, segment in zip(sampler.prompts, [first, second, second], strict=True):
        assert segment.tokens[: len(prompt)].tolist() == prompt


def test_half_open_reasoning(make_tokenizer) -> None:
    """B07: the prompt holds the opening tag, the reply only the closing one."""
    tokenizer = make_tokenizer(OPENED)
    renderer = TemplateRenderer(tokenizer)
    reply = renderer.parse(sampled(renderer, tokenizer, "2+2=4\n</think>\n\n4"))
    assert reply == Message(role="assistant", content="4", reasoning_content="2+2=4")
    again = renderer.start([user("x"), reply, Message(role="tool", content="r")])
    text = tokenizer.decode(again, skip_special_tokens=False).removesuffix("<s>assistant\n<think>\n")
    assert text.count("<think>") == 1 and text.count("</think>") == 1
    cut_off = renderer.parse(np.array(tokenizer.encode("still thinking 42"), np.int32))
    assert cut_off == Message(role="assistant", content="", reasoning_content="still thinking 42")
    # What was sampled after the opening tag is extended, and the tag is not doubled.
    tokens = sampled(renderer, tokenizer, "2+2=4\n</think>\n\n4")
    delta = renderer.observe([user("x"), reply], [Message(role="tool", content="r")], tokens)
    assert delta is not None and tokenizer.decode(delta, skip_special_tokens=False).startswith("\n<s>tool")


def test_think_tags_are_text_for_models_that_do_not_think(toy) -> None:
    tokenizer, renderer = toy
    assert renderer.parse(sampled(renderer, tokenizer, "junk</think>4")) == said("junk</think>4")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}",  # counts the messages at the top
        "{% for m in messages[-2:] %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}",  # shows the last two only
        "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}(old) {% endif %}"
        "{{ m.content }}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}",  # marks old replies
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% if m.role == 'user' or loop.last %}<e>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}",  # ends the last message only
    ],
)
def test_every_way_of_rewriting_is_noticed(make_tokenizer, template: str) -> None:
    """B06, B21"""
    tokenizer = make_tokenizer(template)
    renderer = TemplateRenderer(tokenizer, end_tokens=[2])
    tokens = sampled(renderer, tokenizer, "y")
    assert renderer.observe([user("x"), said("y")], [user("z")], tokens) is None


def test_a_template_that_only_trims_keeps_the_tokens(make_tokenizer) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}<s>{{ m.role }} {{ m.content | trim }}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant{% endif %}"
    )
    renderer = TemplateRenderer(tokenizer)
    tokens = sampled(renderer, tokenizer, "  y ")
    delta = renderer.observe([user("x"), said("  y ")], [user("z")], tokens)
    assert delta is not None and tokenizer.decode(delta, skip_special_tokens=False).startswith("\n<s>user z<e>")


@pytest.mark.parametrize("template", [PARTS, STRICT_PARTS])
def test_templates_that_take_lists_of_parts(make_tokenizer, template: str) -> None:
    """B02: found by trying, without a crash; and contents given as parts are the same as text, either way."""
    tokenizer = make_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    assert tokenizer.decode(renderer.start([user("hi")]), skip_special_tokens=False) == "<s>user\nhi<e>\n<s>assistant\n"
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    for made in (renderer, TemplateRenderer(make_tokenizer())):
        assert made.start(in_parts).tolist() == made.start([user("hi")]).tolist()  # pyright: ignore[reportArgumentType]
        with pytest.raises(DataError, match="a list of text parts; this one has"):
            made.start([{"role": "user", "content": [{"type": "image"}]}])  # pyright: ignore[reportArgumentType]


def test_a_template_that_shows_no_content_is_refused(make_tokenizer) -> None:
    with pytest.raises(
        ConfigError, match="given text, it leaves the text out; given a list of parts, it leaves the text out"
    ):
        TemplateRenderer(make_tokenizer("{% for m in messages %}<s>{{ m.role }}{% endfor %}"))


def test_calls_without_content_and_arguments_in_either_form(make_tokenizer) -> None:
    """B17: content None is "", and arguments as JSON text are the object they describe."""
    renderer = TemplateRenderer(make_tokenizer(CALLS))
    renders: list[list[int]] = []
    for content in (None, ""):
        for arguments in ('{"a": 1}', {"a": 1}):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            renders.append(renderer.start([user("x"), message, Message(role="tool", content="1")]).tolist())  # pyright: ignore[reportArgumentType]
    assert len({tuple(render) for render in renders}) == 1
    text = renderer._decode(renders[0])
    assert '<tool_call>f {"a": 1}</tool_call>' in text and "None" not in text


def test_only_the_answer_and_its_end_are_trained(toy) -> None:
    """B12, B09, B10: by position, one end token, though the pad token's id is the end token's."""
    tokenizer, renderer = toy
    tokens, trained = encode_example(renderer, [user("1+1=")], "x")
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s>user\n1+1=<e>\n<s>assistant\nx<e>\n"
    x = tokenizer.encode("x")[0]
    assert tokens[trained].tolist() == [x, 1]
    assert trained.tolist()[-5:] == [False, False, True, True, False] and trained.sum() == 2
    assert np.count_nonzero(tokens == 1) == 2  # the user's and the answer's


def test_end_tokens_are_found_by_place_when_pad_is_eos(make_tokenizer) -> None:
    """B10: ids [5, 6, 2, 2, 2] with eos = pad = 2 have one real end; other ids may end a reply as well."""
    tokenizer = make_tokenizer(eos="<e>", pad="<e>")
    renderer = TemplateRenderer(tokenizer, end_tokens=[1, 2])
    assert renderer.stop_tokens == (1, 2)
    a = tokenizer.encode("a")[0]
    assert renderer.parse(np.array([a, a, 1], np.int32)) == said("aa")
    assert renderer.parse(np.array([a, 1, 1], np.int32)) == said("a<e>")  # only the last one ended it
    _, trained = encode_example(renderer, [user("q")], "aa")
    assert trained.sum() == 3


def test_a_reply_may_end_with_any_end_token(toy) -> None:
    """B11: the template ends turns with id 1, the model's list says 2: both end a reply, only the first can go on."""
    tokenizer, renderer = toy
    a = tokenizer.encode("a")[0]
    ended = np.array([a, 2], np.int32)
    assert renderer.parse(ended) == said("a")
    assert renderer.observe([user("x"), said("a")], [user("z")], ended) is None


def test_an_answer_with_an_end_token_inside_is_refused(toy) -> None:
    """B09: rows that carry the end token's text would be ended twice."""
    _, renderer = toy
    with pytest.raises(DataError, match="holds a token that ends a reply"):
        encode_example(renderer, [user("q")], "4<e>")
    with pytest.raises(DataError, match="a task without an answer"):
        encode_example(renderer, [user("q")], None)


def test_a_template_whose_turns_have_no_end_token(make_tokenizer) -> None:
    """Plain-text headers: the model's own end token ends a reply, once, and is trained."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = TemplateRenderer(tokenizer, end_tokens=[2])
    assert renderer.stop_tokens == (2,)
    tokens, trained = encode_example(renderer, [user("q")], "x")
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "user: q\nassistant: x<eos>\n"
    assert tokens[trained].tolist() == [tokenizer.encode("x")[0], 2]
    delta = renderer.observe([user("q"), said("x")], [user("z")], sampled(renderer, tokenizer, "x"))
    assert delta is not None
    assert tokenizer.decode(delta, skip_special_tokens=False) == "\nuser: z\nassistant: "
    with pytest.raises(ConfigError, match="no token ends a reply"):
        TemplateRenderer(tokenizer)


def test_a_template_that_closes_thinking_in_answers(make_tokenizer) -> None:
    """Qwen3 shows the last answer behind an empty thought, which its prompt does not begin: the answer includes it."""
    template = THINKING.replace(
        "{{ m.content }}<e>",
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<e>",
    )
    tokenizer = make_tokenizer(template)
    tokens, trained = encode_example(TemplateRenderer(tokenizer), [user("q")], "x")
    assert tokenizer.decode(tokens[trained], skip_special_tokens=False) == "<think>\n\n</think>\n\nx<e>"


def test_an_answer_that_the_prompt_does_not_lead_to_is_refused(make_tokenizer) -> None:
    renderer = TemplateRenderer(make_tokenizer(CHAT_WITH_ANOTHER_HEADER))
    with pytest.raises(DataError, match="cannot be shown"):
        encode_example(renderer, [user("q")], "x")


def test_the_system_message_comes_first_and_only_once(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    renderer = build_renderer(RendererConfig(system="be brief"), tokenizer, [2])
    assert tokenizer.decode(renderer.start([user("hi")]), skip_special_tokens=False).startswith(
        "<s>system\nbe brief<e>\n<s>user\nhi<e>"
    )
    with pytest.raises(DataError, match="has a system message of its own"):
        renderer.start([Message(role="system", content="other"), user("hi")])


def test_refusals_of_a_template_are_errors_with_its_words(make_tokenizer) -> None:
    alternate = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('take turns') }}{% endif %}<s>{{ m.content }}<e>{% endfor %}"
    )
    renderer = TemplateRenderer(make_tokenizer(alternate))
    with pytest.raises(DataError, match="refuses a conversation of roles user, user: take turns"):
        renderer.start([user("a"), user("b")])


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        TemplateRenderer(make_tokenizer(None), end_tokens=[2])


def test_messages_may_hold_any_words(toy) -> None:
    """The probe that stands for a reply is a word that no message contains."""
    tokenizer, renderer = toy
    history = [user("probe0x probe1x"), said("probe2x")]
    delta = renderer.observe(history, [user("probe3x thoughtprobe4x")], sampled(renderer, tokenizer, "probe2x"))
    assert delta is not None
    assert tokenizer.decode(delta, skip_special_tokens=False) == (
        "\n<s>user\nprobe3x thoughtprobe4x<e>\n<s>assistant\n"
    )


def test_prompts_are_cached_and_cannot_be_changed(toy) -> None:
    _, renderer = toy
    first = renderer.start([user("same")])
    assert renderer.start([user("same")]) is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 7
    assert renderer.start([user("other")]).tolist() != first.tolist()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 264), max_size=12))
def test_any_tokens_give_a_message(toy, ids: list[int]) -> None:
    _, renderer = toy
    message = renderer.parse(np.array(ids, np.int32))
    assert message.get("role") == "assistant" and isinstance(message.get("content"), str)


def test_plain_rendering(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None)
    renderer = build_renderer(RendererConfig(kind="plain", system="sum:"), tokenizer, [2, 1])
    assert isinstance(renderer, PlainRenderer) and renderer.stop_tokens == (2, 1)
    assert tokenizer.decode(renderer.start([user("12+"), user("34=")])) == "sum:12+34="
    tokens, trained = encode_example(renderer, [user("q")], "ab")
    assert tokens[trained].tolist() == [*tokenizer.encode("ab"), 2] and trained.tolist()[-2:] == [True, True]
    assert not trained[: len(renderer.start([user("q")]))].any()
    assert renderer.parse(tokens[trained]) == said("ab")
    delta = renderer.observe([user("q"), said("ab")], [user("cd")], tokens[trained])
    assert delta is not None and tokenizer.decode(delta) == "cd"
    with pytest.raises(DataError, match="holds a token that ends a reply"):
        encode_example(renderer, [user("q")], "a<eos>")
    with pytest.raises(ConfigError, match="needs a tokenizer with an eos token"):
        build_renderer(RendererConfig(kind="plain"), tokenizer, [])
