"""Stop strings are found the moment they are complete, wherever they begin and end inside tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from strop.errors import ConfigError
from strop.tokens.stops import StopStrings


def first_stop(stops: StopStrings, ids: list[int]) -> int | None:
    """After how many tokens a stop string is complete."""
    state = stops.start()
    return next((n for n, token in enumerate(ids, 1) if state.push(token)), None)


def expected_stop(stops: StopStrings, ids: list[int]) -> int | None:
    """The same by decoding everything each time."""
    for n in range(1, len(ids) + 1):
        if any(s in stops.decode(ids[:n]) for s in stops.strings):
            return n
    return None


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="module")
def decode(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_a_string_over_several_tokens(tokenizer, decode) -> None:
    ids = tokenizer.encode("xx</answer>yy")
    stops = StopStrings(("</answer>",), decode)
    n = first_stop(stops, ids)
    assert n is not None and decode(ids[:n]) == "xx</answer>"


def test_a_string_that_ends_inside_a_token(tokenizer, decode) -> None:
    """ "ab" is one token; the stop "xa" ends in its middle."""
    ids = tokenizer.encode("xab")
    assert len(ids) == 2
    assert first_stop(StopStrings(("xa",), decode), ids) == 2
    assert first_stop(StopStrings(("ab",), decode), ids) == 2
    assert first_stop(StopStrings(("b",), decode), ids) == 2


def test_characters_of_several_bytes(tokenizer, decode) -> None:
    """Each byte of é and of the face is a token; nothing matches before the last one."""
    ids = tokenizer.encode("né\N{GRINNING FACE}!")
    assert len(ids) == 1 + 2 + 4 + 1
    assert first_stop(StopStrings(("é",), decode), ids) == 3
    assert first_stop(StopStrings(("\N{GRINNING FACE}",), decode), ids) == 7
    assert first_stop(StopStrings(("é\N{GRINNING FACE}!",), decode), ids) == 8
    assert first_stop(StopStrings(("e",), decode), ids) is None


def test_special_tokens_and_first_of_several(tokenizer, decode) -> None:
    ids = [*tokenizer.encode("one two"), 1, *tokenizer.encode("three")]
    assert first_stop(StopStrings(("three", "<e>"), decode), ids) == ids.index(1) + 1
    assert first_stop(StopStrings(("three",), decode), ids) == len(ids) - tokenizer.encode("three")[::-1].index(ids[-1])


def test_requests_do_not_share_their_text(tokenizer, decode) -> None:
    stops = StopStrings(("xyz",), decode)
    x, y, z = tokenizer.encode("xyz")
    first, second = stops.start(), stops.start()
    assert not first.push(x) and not first.push(y)
    assert not second.push(z)
    assert first.push(z)


def test_an_empty_stop_string_is_refused(decode) -> None:
    with pytest.raises(ConfigError, match="a stop string is empty"):
        StopStrings(("a", ""), decode)


@given(
    st.text("ab<>/er\n t\u00e9", max_size=60),
    st.lists(st.text("ab<>/er\n t\u00e9", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_as_if_everything_were_decoded_each_time(tokenizer, decode, text: str, strings: list[str]) -> None:
    stops = StopStrings(tuple(strings), decode)
    ids = tokenizer.encode(text)
    assert first_stop(stops, ids) == expected_stop(stops, ids)


@given(st.lists(st.integers(0, 264), max_size=120), st.text("ab<>/er t", min_size=1, max_size=4))
def test_any_bytes(tokenizer, decode, ids: list[int], string: str) -> None:
    stops = StopStrings((string,), decode)
    assert first_stop(stops, ids) == expected_stop(stops, ids)


def test_leading_spaces_that_decoders_drop() -> None:
    """A Metaspace decoder drops the space of its first token: alone, " b" decodes to "b"."""
    made = Tokenizer(
        models.BPE({"\u2581": 0, "a": 1, "b": 2, "\u2581b": 3, "\u2581a": 4}, [("\u2581", "b"), ("\u2581", "a")])
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    ids = made.encode("a b a b").ids
    assert ids == [4, 3, 4, 3] and made.decode([3]) == "b"
    assert first_stop(StopStrings(("a b",), made.decode), ids) == 2
    assert first_stop(StopStrings((" b",), made.decode), ids) == 2
    many = ids * 40 + [1]
    assert first_stop(StopStrings(("ba",), made.decode), many) == len(many)
    assert first_stop(StopStrings(("b ",), made.decode), many) == 3


def test_what_is_kept_is_bounded(tokenizer, decode) -> None:
    """Long replies cost no more a token than short ones: the decoded stretch does not grow."""
    longest = 0

    def watched(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    stops = StopStrings(("</answer>",), watched)
    ids = tokenizer.encode("a > b and so on " * 300)
    assert first_stop(stops, ids) is None and len(ids) > 4000
    assert longest <= 4 * stops.reach
    assert first_stop(StopStrings(("</answer>",), decode), [*ids, *tokenizer.encode("</answer>")]) == len(ids) + len(
        tokenizer.encode("</answer>")
    )


def test_most_tokens_are_not_decoded(tokenizer, decode) -> None:
    calls = 0

    def counted(ids: list[int]) -> str:
        nonlocal calls
        calls += 1
        return decode(ids)

    stops = StopStrings(("</answer>",), counted)
    first_stop(stops, tokenizer.encode("plain words " * 100))
    assert calls < 150  # 1200 tokens: one look at each different one, and now and then a shortening
