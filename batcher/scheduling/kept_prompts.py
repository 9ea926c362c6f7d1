"""Prompts whose pages stay in the host's memory until another engine has taken them, or until a deadline.

The engine's thread adds and drops prompts. Other threads look for pages (`KeptPrompt.find`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from batcher.page_store import NoPage
from batcher.scheduling.page_moves import HostPage


class DevicePage(NamedTuple):
    """A full page of a prompt."""

    page: int
    digest: bytes
    tokens: bytes


class KeptPrompt:
    """The first full pages of a prompt.

    Args:
        until_s: the deadline, by the clock.
        pages: the pages on the device. They are held there until all have been saved or given up.
    """

    def __init__(self, until_s: float, pages: Sequence[DevicePage]) -> None:
        self.until_s = until_s
        self.on_device = [page.page for page in pages]  # pages that are held on the device
        self.hosts: list[HostPage] = []  # the first pages, in the host's memory or on their way there
        self._pages = pages
        self._num_pages = len(pages)

    @property
    def num_to_come(self) -> int:
        """The number of pages that are neither in the host's memory nor on their way there."""
        return self._num_pages - len(self.hosts)

    def next(self) -> DevicePage:
        """The first page that is neither in the host's memory nor on its way there."""
        return self._pages[len(self.hosts)]

    def cut(self, digest: bytes | None = None) -> None:
        """Shortens the prompt: it ends before its first unsaved page with this digest. Without `digest`, it ends before
        its first unsaved page."""
        for index in range(len(self.hosts), self._num_pages):
            if digest in (None, self._pages[index].digest):
                self._num_pages = index
                return

    def find(self, index: int) -> HostPage | NoPage:
        """The page `index`, if it has been copied to the host's memory; otherwise, why there is none. Any thread may
        call it."""
        if index >= self._num_pages:
            return NoPage.NEVER
        if index >= len(self.hosts):
            return NoPage.NOT_YET
        host = self.hosts[index]
        if not host.is_trusted:
            return NoPage.NEVER
        return NoPage.NOT_YET if host.checksum is None else host


class KeptPrompts:
    """The kept prompts. A prompt is found by its token, which is a name and no token of text.

    Args:
        most: the most pages that are kept, for all prompts together.
        release: is called with pages of the device that are no longer held.
    """

    def __init__(self, most: int, release: Callable[[Sequence[int]], None]) -> None:
        self.num_pages = 0  # kept pages of the host's memory
        self._most = most
        self._release = release
        self._prompts: dict[bytes, KeptPrompt] = {}  # sorted by deadline, because all are kept equally long
        self._unsaved: dict[bytes, KeptPrompt] = {}  # the prompts that hold pages on the device

    def add(self, token: bytes, until_s: float, pages: Sequence[DevicePage]) -> None:
        """Adds a prompt. The caller has acquired its pages on the device, and `release` gets them later."""
        self.drop(token)
        self._prompts[token] = self._unsaved[token] = KeptPrompt(until_s, pages)

    def find(self, token: bytes, index: int) -> HostPage | NoPage:
        """The page `index` of the prompt `token`, or why there is none. Any thread may call it."""
        prompt = self._prompts.get(token)
        return NoPage.NEVER if prompt is None else prompt.find(index)

    def unsaved(self) -> Iterator[KeptPrompt]:
        """The prompts with pages that are not saved yet. The pages on the device of all other prompts are released."""
        for token, prompt in list(self._unsaved.items()):
            if prompt.num_to_come:
                yield prompt
            if not prompt.num_to_come:
                self._release(prompt.on_device)
                prompt.on_device = []
                del self._unsaved[token]

    def has_room_for(self, host: HostPage | None) -> bool:
        """Whether one more page may be kept. `host` is the page in the host's memory; None: it is not there yet."""
        return self.num_pages < self._most or (host is not None and host.num_keepers > 0)

    def keep(self, prompt: KeptPrompt, host: HostPage) -> None:
        """Keeps the prompt's next page, which is in the host's memory or on its way there."""
        self.num_pages += not host.num_keepers
        host.num_keepers += 1
        prompt.hosts.append(host)

    def cut(self, digest: bytes | None = None) -> None:
        """Shortens all prompts (`KeptPrompt.cut`)."""
        for prompt in self._prompts.values():
            prompt.cut(digest)

    def drop(self, token: bytes) -> None:
        """Drops a prompt and releases its pages. An unknown token is ignored."""
        prompt = self._prompts.pop(token, None)
        if prompt is None:
            return
        self._unsaved.pop(token, None)
        for host in prompt.hosts:
            host.num_keepers -= 1
            self.num_pages -= not host.num_keepers
        self._release(prompt.on_device)

    def drop_overdue(self, now_s: float) -> None:
        while (deadline_s := self.next_deadline()) is not None and deadline_s <= now_s:
            self.drop(next(iter(self._prompts)))

    def next_deadline(self) -> float | None:
        return next((prompt.until_s for prompt in self._prompts.values()), None)

    def held(self) -> list[list[int]]:
        """The pages of the device that each prompt holds."""
        return [prompt.on_device for prompt in self._prompts.values()]
