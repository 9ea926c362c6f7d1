"""Prompts whose pages stay in the host's memory until another engine has taken them, or for some time.

The engine's thread keeps and drops them. Another thread looks for pages meanwhile (`KeptPrompt.find`).
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
        until_s: by the clock.
        pages: on the device. They are held there until none is to be saved any more.
    """

    def __init__(self, until_s: float, pages: Sequence[DevicePage]) -> None:
        self.until_s = until_s
        self.on_device = [page.page for page in pages]  # held
        self.hosts: list[HostPage] = []  # of the first pages
        self._pages = pages
        self._num_pages = len(pages)

    @property
    def num_to_come(self) -> int:
        """Pages that are not in the host's memory, nor on their way there."""
        return self._num_pages - len(self.hosts)

    def next(self) -> DevicePage:
        """The first one of them."""
        return self._pages[len(self.hosts)]

    def cut(self, digest: bytes | None = None) -> None:
        """A page that is not saved is not to be trusted, or, without `digest`, none is: it ends before that page."""
        for index in range(len(self.hosts), self._num_pages):
            if digest in (None, self._pages[index].digest):
                self._num_pages = index
                return

    def find(self, index: int) -> HostPage | NoPage:
        """A page that has been copied to the host's memory. Any thread may call it."""
        if index >= self._num_pages:
            return NoPage.NEVER
        if index >= len(self.hosts):
            return NoPage.NOT_YET
        host = self.hosts[index]
        if not host.is_trusted:
            return NoPage.NEVER
        return NoPage.NOT_YET if host.checksum is None else host


class KeptPrompts:
    """The prompts by their tokens.

    Args:
        most: pages that are kept, of all prompts together.
        release: is called with the pages of the device that are held no longer.
    """

    def __init__(self, most: int, release: Callable[[Sequence[int]], None]) -> None:
        self.num_pages = 0  # of the host's memory that are kept
        self._most = most
        self._release = release
        self._prompts: dict[bytes, KeptPrompt] = {}  # by their deadlines, since all are kept equally long
        self._unsaved: dict[bytes, KeptPrompt] = {}  # of these, those that hold pages on the device

    def add(self, token: bytes, until_s: float, pages: Sequence[DevicePage]) -> None:
        """A prompt whose pages are held on the device."""
        self.drop(token)
        self._prompts[token] = self._unsaved[token] = KeptPrompt(until_s, pages)

    def find(self, token: bytes, index: int) -> HostPage | NoPage:
        """A page that is kept. Any thread may call it."""
        prompt = self._prompts.get(token)
        return NoPage.NEVER if prompt is None else prompt.find(index)

    def unsaved(self) -> Iterator[KeptPrompt]:
        """The prompts with pages to come. Those without any let their pages on the device go."""
        for token, prompt in list(self._unsaved.items()):
            if prompt.num_to_come:
                yield prompt
            if not prompt.num_to_come:
                self._release(prompt.on_device)
                prompt.on_device = []
                del self._unsaved[token]

    def has_room_for(self, host: HostPage | None) -> bool:
        """Whether one more page may be kept: this one, or, without `host`, one that is not in the host's memory."""
        return self.num_pages < self._most or (host is not None and host.num_keepers > 0)

    def keep(self, prompt: KeptPrompt, host: HostPage) -> None:
        """The prompt's next page is in the host's memory, or on its way there."""
        self.num_pages += not host.num_keepers
        host.num_keepers += 1
        prompt.hosts.append(host)

    def cut(self, digest: bytes | None = None) -> None:
        """See `KeptPrompt.cut`."""
        for prompt in self._prompts.values():
            prompt.cut(digest)

    def drop(self, token: bytes) -> None:
        """The prompt has been taken, or will not be. A token that is not known is ignored."""
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
