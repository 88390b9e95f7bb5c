"""The free list, the holders and the contents of cache pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import RolloutError
from strop.ops.paged import PAGE
from strop.rollout.builtin.pages import PagePool, extend_digests, pages_for


def digests_of(tokens: np.ndarray) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, tokens.astype(np.int32), len(tokens) // PAGE)
    return digests


def fill(pool: PagePool, tokens: np.ndarray) -> list[int]:
    """Hold pages for a text and say what they hold."""
    pages = pool.take(len(tokens) // PAGE)
    for page, digest in zip(pages, digests_of(tokens), strict=True):
        pool.publish(page, digest)
    return pages


def test_pages_for_counts_whole_pages():
    assert [pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


def test_digests_cover_everything_before():
    """Two texts with one equal page in the middle share nothing once their beginnings differ."""
    a, b = np.arange(3 * PAGE), np.arange(3 * PAGE)
    b[0] += 1
    assert digests_of(a) == digests_of(a.copy())
    assert not set(digests_of(a)) & set(digests_of(b))
    assert digests_of(a)[:2] == digests_of(a[: 2 * PAGE])


def test_a_known_beginning_is_shared_while_held_and_after():
    pool, text = PagePool(8), np.arange(3 * PAGE)
    pages = fill(pool, text)
    longer = np.concatenate((text[: 2 * PAGE], np.full(2 * PAGE, 7)))
    assert pool.match(digests_of(longer)) == pages[:2]
    assert pool.num_free == 5
    pool.release(pages[:2])
    pool.release(pages)
    assert pool.num_free == 8
    assert pool.match(digests_of(text)) == pages
    assert pool.num_free == 5


def test_the_least_recently_used_contents_go_first_and_their_ends_before_their_beginnings():
    pool = PagePool(5)
    old, new = np.arange(2 * PAGE), np.arange(2 * PAGE) + 100
    old_pages, new_pages = fill(pool, old), fill(pool, new)
    pool.release(old_pages)
    pool.release(new_pages)
    (blank,) = set(range(5)) - set(old_pages) - set(new_pages)
    assert pool.take(1) == [blank]  # a page that remembers nothing costs nothing
    assert pool.take(1) == [old_pages[1]]
    assert pool.match(digests_of(old)) == old_pages[:1]
    assert pool.match(digests_of(new)) == new_pages


def test_forget_all_finds_nothing_and_loses_nothing():
    """E14: contents made by other weights are not found, and every page can still be used."""
    pool, text = PagePool(4), np.arange(2 * PAGE)
    held = fill(pool, text)
    pool.forget_all()
    assert pool.match(digests_of(text)) == []
    pool.release(held)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_after_an_update_the_same_pages_are_used_again():
    """A roomy cache keeps to the memory that it has touched."""
    pool, used = PagePool(1000), set[int]()
    for update in range(20):
        pages = fill(pool, np.arange(10 * PAGE) + update)
        used.update(pages)
        pool.release(pages)
        pool.forget_all()
    assert used == set(range(10))


def test_taking_more_than_there_is_raises_and_takes_nothing():
    pool = PagePool(2)
    with pytest.raises(RolloutError, match="3 cache pages were taken but 2 are free"):
        pool.take(3)
    assert pool.num_free == 2


@given(
    st.lists(st.tuples(st.sampled_from(["hold", "drop", "forget"]), st.integers(0, 5), st.integers(1, 4)), max_size=60)
)
def test_no_page_is_lost_or_given_twice(actions):
    """Whatever happens: held and free pages add up, and a text is only found on pages that were filled with it."""
    pool, contents = PagePool(9), {}
    held: list[list[int]] = []
    for action, which, length in actions:
        text = np.repeat(np.arange(length) * 10 + which % 3, PAGE)
        digests = digests_of(text)
        if action == "hold":
            pages = pool.match(digests)
            assert [contents[page] for page in pages] == digests[: len(pages)]
            if pool.num_free < length - len(pages):
                pool.release(pages)
                continue
            new = pool.take(length - len(pages))
            for page, digest in zip(new, digests[len(pages) :], strict=True):
                pool.publish(page, digest)
                contents[page] = digest
            held.append(pages + new)
        elif action == "drop" and held:
            pool.release(held.pop(which % len(held)))
        elif action == "forget":
            pool.forget_all()
        in_use = {page for pages in held for page in pages}
        assert pool.num_free == 9 - len(in_use)
