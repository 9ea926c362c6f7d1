"""Long prompts that other servers compute for this one (`--prefill-url`), so that its own steps stay short.

1. This server sends the token ids to one of the others over HTTP. The other server computes the prompt, keeps its full
   pages, and answers with a token and the port of its engine.
2. The request goes to this server's engine with that `PageSource`. The engine fetches the pages and computes the rest
   of the prompt, which has at least one token. So every token of the output is drawn here.

After any failure the prompt is computed here. A server that has failed is not asked again for `PAUSE_S`.

A prompt is not sent if this server has had most of it before. The engine may have evicted that beginning meanwhile, and
then computes it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
import msgspec

from batcher.page_store import PageSource
from server.api.http_counts import Prefill
from server.engine.curve import KEY_CHARS
from server.engine.page_server import TOKEN_BYTES
from server.engine.routing import BLOCK_TOKENS, beginnings_of
from server.engine.wire import EngineInfo
from server.flag import MOST_SECONDS
from server.logs import ThrottledLog
from server.settings import Settings
from server.shared_counts import PROMISED, PrefixTable

PATH = "/kv/prefill"
PAUSE_S = 5.0
MOST_WORDS = 300  # characters of another server's error that are shown
MOST_ANSWER_BYTES = 1 << 16  # the size limit of another server's answer
_Digest = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PrefillRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request to compute a prompt. The bytes are base64 in JSON."""

    tokens: bytes  # i32[n]
    cache_salt: _Digest
    model: str | None  # the name of the LoRA adapter or the model; None: the first model
    adapter: _Digest  # the identity of its weights; 0: those of the first model
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]
    identity: dict[str, str]  # `EngineInfo.page_identity` of who asks


class Prefilled(msgspec.Struct, kw_only=True, frozen=True):
    """The prompt has been computed."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[str, msgspec.Meta(min_length=KEY_CHARS, max_length=KEY_CHARS)]  # the key of the socket at the port
    keep_s: Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)]


class PrefillError(Exception):
    """Another server has not computed a prompt. The message says why."""


class RemotePrefills:
    """Sends prompts to the other servers.

    Args:
        info: returns the engine's info, which is known when the engine is ready.
        count: called with the outcome of each prompt that is long enough.
    """

    def __init__(
        self,
        settings: Settings,
        info: Callable[[], EngineInfo],
        count: Callable[[Prefill], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls: Sequence[str] = [url.rstrip("/") for url in settings.prefill_url or ()]
        self._threshold = settings.prefill_threshold
        self._timeout_s = settings.transfer_timeout_s
        self._headers = {"Authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
        self._info, self._count, self._clock = info, count, clock
        self._log = ThrottledLog(logging.getLogger("pallas_serve"))
        self._known = KnownBeginnings()
        self._num_open = dict.fromkeys(self._urls, 0)
        self._paused_until = dict.fromkeys(self._urls, -PAUSE_S)

    async def sources(
        self, prompts: Sequence[bytes], timeout_s: float | None, *, salt: int, adapter: int, model: str, priority: int
    ) -> list[PageSource | None]:
        """The source of each prompt's pages; None: this server computes the prompt. A prompt is i32[n]."""

        def request(prompt: bytes) -> PrefillRequest:
            return PrefillRequest(
                tokens=prompt,
                cache_salt=salt,
                model=model if adapter else None,
                adapter=adapter,
                priority=priority,
                identity=self._info().page_identity,
            )

        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        return await asyncio.gather(*[self._source(request(prompt), timeout_s) for prompt in prompts])

    def forget(self) -> None:
        """Forgets all beginnings, because the engine's prefix cache is empty."""
        self._known.clear()

    async def _source(self, asked: PrefillRequest, timeout_s: float) -> PageSource | None:
        num_tokens = len(asked.tokens) // 4
        digests = _beginnings(asked)
        num_new = num_tokens - self._known.count(digests) * BLOCK_TOKENS
        try:
            return None if num_new < self._threshold else await self._computed(asked, timeout_s)
        finally:
            self._known.add(digests)  # not before: requests with the same prompt meanwhile also ask

    async def _computed(self, asked: PrefillRequest, timeout_s: float) -> PageSource | None:
        url = min(self._ready(), key=self._num_open.__getitem__, default=None)
        if url is None:
            self._count(Prefill.SKIPPED)
            return None
        self._num_open[url] += 1
        try:
            done = await self._ask(url, asked, timeout_s)
        except PrefillError as error:
            self._log.warning("%s has not computed a prompt, and it is computed here: %s", url, error)
            self._paused_until[url] = self._clock() + PAUSE_S
            self._count(Prefill.FAILED)
            return None
        finally:
            self._num_open[url] -= 1
        self._count(Prefill.DONE)
        keep_s = min(done.keep_s, self._timeout_s)
        return PageSource(address=_address(url, done.port), key=done.key, token=done.token, keep_s=keep_s)

    def _ready(self) -> Iterator[str]:
        now = self._clock()
        return (url for url in self._urls if self._paused_until[url] <= now)

    async def _ask(self, url: str, asked: PrefillRequest, timeout_s: float) -> Prefilled:
        body = msgspec.json.encode(asked)
        headers = {"Content-Type": "application/json", **self._headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url + PATH, data=body, headers=headers, allow_redirects=False) as response,
            ):
                content = bytearray()
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > MOST_ANSWER_BYTES:
                        raise PrefillError(f"the answer has more than {MOST_ANSWER_BYTES} bytes")
                if response.status != 200:
                    raise PrefillError(f"{response.status} {_words(content)}")
                return msgspec.json.decode(content, type=Prefilled)
        except TimeoutError as error:
            raise PrefillError(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # the last of what is no such answer
            raise PrefillError(f"{type(error).__name__}: {error}") from error


class KnownBeginnings(PrefixTable):
    """The beginnings of earlier prompts, block by block."""

    def count(self, digests: Sequence[int]) -> int:
        """The number of a prompt's beginnings that are known, from the first one on."""
        return next((index for index, digest in enumerate(digests) if not self.get(digest)), len(digests))

    def add(self, digests: Sequence[int]) -> None:
        """Adds the beginnings of a prompt."""
        for digest in digests:
            self.put(digest, 0, PROMISED)


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The names of the facts that differ between two identities of pages."""
    return ", ".join(sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)))


def _beginnings(asked: PrefillRequest) -> list[int]:
    """The digests of the prompt's beginnings, each one block longer than the one before."""
    num_tokens = len(asked.tokens) // 4
    return [digest for _, digest in beginnings_of(asked.tokens, asked.cache_salt ^ asked.adapter, num_tokens)]


def _address(url: str, port: int) -> str:
    host = urlsplit(url).hostname or ""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _words(content: bytes | bytearray) -> str:
    """The message of an error's body, or the body's beginning."""
    try:
        message = msgspec.json.decode(content)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        message = content.decode(errors="replace")
    return str(message)[:MOST_WORDS]
