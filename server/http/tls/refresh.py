"""Loads the TLS files again when they change. Open connections keep the certificate that they were opened with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Self

from server.http.tls.context import server_context
from server.settings import TlsFiles

logger = logging.getLogger("pallas_serve")

CHECK_S = 1.0  # between two looks at the files

# Of each file: its inode, the time of its last change, its size. None: there is no such file.
Stamps = list[tuple[int, int, int] | None]


class TlsContexts:
    """The context of new connections: `current`. Raises ValueError for files that cannot be used at the start."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = _stamps(files)
        self.current: ssl.SSLContext = server_context(files)

    @classmethod
    async def when_usable(cls, files: TlsFiles) -> Self:
        """Waits until the files can be used: they may be in the middle of a change."""
        said = ""
        while True:
            try:
                return await asyncio.to_thread(cls, files)
            except (ValueError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("this process waits for TLS files that can be used: %s", said)
            await asyncio.sleep(CHECK_S)

    @contextlib.asynccontextmanager
    async def refreshed(self) -> AsyncIterator[None]:
        """Within the context, `current` follows the files, if the settings ask for it."""
        if not self._files.refresh:
            yield
            return
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.load_changes)  # the files may be on a network

    def load_changes(self) -> None:
        """Makes a new context if a file has changed. With files that cannot be used, the context stays."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.current = server_context(self._files)
        except (ValueError, OSError) as error:  # such as a certificate without its key yet: the next change counts
            logger.warning("the changed TLS files are not used: %s", error)
        else:
            logger.info("the TLS files have changed and are loaded")


def _stamps(files: TlsFiles) -> Stamps:
    stamps: Stamps = []
    for path in (files.certfile, files.keyfile, files.ca_certs):
        try:
            status = None if path is None else path.stat()
        except OSError:
            status = None
        stamps.append(status and (status.st_ino, status.st_mtime_ns, status.st_size))
    return stamps
