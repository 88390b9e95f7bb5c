"""Which cache pages are free, who shares them, and what they hold.

A page holds the keys and values of `PAGE` consecutive tokens. A full page is known by a digest of every token up to its
end, so two requests whose texts begin alike find each other's pages, while both run or after. A page that nobody holds
keeps its contents until the space is needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from strop.errors import RolloutError
from strop.ops.paged import PAGE
from strop.types import Int32s

Digest = bytes


def pages_for(num_tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // PAGE)


def extend_digests(digests: list[Digest], tokens: Int32s, num_pages: int) -> None:
    """Append the digests of full pages `len(digests)` to `num_pages - 1` of a text [T]; each covers all before it."""
    for page in range(len(digests), num_pages):
        before = digests[-1] if digests else b""
        digests.append(blake2b(before + tokens[page * PAGE : (page + 1) * PAGE].tobytes(), digest_size=16).digest())


class PagePool:
    """A fixed number of pages: the free ones, the holders of the others, and the digests of full ones."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free = OrderedDict[int, None].fromkeys(range(num_pages))  # first out first
        self._digest_of: dict[int, Digest] = {}
        self._page_of: dict[Digest, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `take` could give, remembered contents included."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages; what they remembered is forgotten. RolloutError when there are not so many."""
        if count > len(self._free):
            raise RolloutError(f"{count} cache pages were taken but {len(self._free)} are free")
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._forget(page)
        return pages

    def match(self, digests: list[Digest]) -> list[int]:
        """Hold the pages of the longest known beginning of a text with these page digests."""
        pages: list[int] = []
        for digest in digests:
            if digest not in self._page_of:
                break
            pages.append(self._page_of[digest])
        self.share(pages)
        return pages

    def share(self, pages: list[int]) -> None:
        """Hold these pages once more."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Let go of a request's pages, given in the order of its text: its end is reused before its beginning."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None
                self._free.move_to_end(page, last=page in self._digest_of)

    def publish(self, page: int, digest: Digest) -> None:
        """Say what a full page holds, or will hold before it is read. Of equal pages, the first is found."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget_all(self) -> None:
        """No page's contents will be found again: the weights that made them are gone.

        The first pages go first again, so that a cache with room to spare never touches all of its memory.
        """
        self._page_of.clear()
        self._digest_of.clear()
        self._free = OrderedDict.fromkeys(sorted(self._free))

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
