"""The listener's TLS context. It is made from files, and loads them again when they change.

Errors name the flag of the file. Open connections keep the certificate with which they were opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

from server.settings import TlsFiles

logger = logging.getLogger("pallas_serve")

VERIFY_MODES = {0: ssl.CERT_NONE, 1: ssl.CERT_OPTIONAL, 2: ssl.CERT_REQUIRED}  # by --ssl-cert-reqs
CHECK_S = 1.0  # between two checks of the files
# The inode, the time of the last change and the size of each file. None: there is no such file.
Stamps = list[tuple[int, int, int] | None]


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context for TLS 1.2 and 1.3 with Python's secure defaults. Raises ValueError for a file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _check_certificates("--ssl-certfile", files.certfile)
    _load_key(context, files)
    if files.ca_certs is not None:
        _check_certificates("--ssl-ca-certs", files.ca_certs)
        context.load_verify_locations(files.ca_certs)
    if files.ciphers is not None:
        _choose_ciphers(context, files.ciphers)
    context.verify_mode = VERIFY_MODES[files.cert_reqs]
    return context


def _check_certificates(flag: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{flag} {path}: there is no certificate in PEM form in it") from error
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error


def _choose_ciphers(context: ssl.SSLContext, ciphers: str) -> None:
    """Sets the ciphers of TLS 1.2. TLS 1.3 keeps OpenSSL's."""
    try:
        context.set_ciphers(ciphers)
    except ssl.SSLError as error:
        raise ValueError(f"--ssl-ciphers {ciphers!r}: OpenSSL knows no cipher of this name") from error


def _load_key(context: ssl.SSLContext, files: TlsFiles) -> None:
    path = files.keyfile or files.certfile
    where = f"{'--ssl-certfile' if files.keyfile is None else '--ssl-keyfile'} {path}"
    is_encrypted = False

    def password() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        if files.keyfile_password is None:  # OpenSSL would ask at the terminal
            raise ValueError(f"{where}: the key is encrypted; --ssl-keyfile-password opens it")
        return files.keyfile_password

    try:
        context.load_cert_chain(files.certfile, path, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{where}: the key does not match --ssl-certfile {files.certfile}") from error
        if is_encrypted:
            raise ValueError(f"--ssl-keyfile-password does not open the key in {path}") from error
        note = "" if files.keyfile else "; --ssl-keyfile names the key's own file"
        raise ValueError(f"{where}: there is no private key in PEM form in it{note}") from error
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from error


class TlsContext:
    """The TLS context for new connections. Raises ValueError if the files cannot be used at the start."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = _stamps(files)
        self.context = server_context(files)

    @classmethod
    async def when_usable(cls, files: TlsFiles) -> Self:
        """Waits until the files can be used, because they may be in the middle of a change."""
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
        """Loads changed files while the context is open, if the settings ask for it."""
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
            if await asyncio.to_thread(self._have_changed):  # the files may be on a network
                self._load()

    def _have_changed(self) -> bool:
        """Whether a file has changed since the last call, and all can be used. If they cannot, the old certificates
        stay."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        with self._unused_in_log():
            server_context(self._files)
            return True
        return False

    def _load(self) -> None:
        """Loads the files on the thread of the handshakes: between a new certificate and its key, one would fail. New
        authorities for clients' certificates are added; authorities that were removed from the files are trusted until
        a restart."""
        with self._unused_in_log():
            _load_key(self.context, self._files)
            if self._files.ca_certs is not None:
                self.context.load_verify_locations(self._files.ca_certs)
            logger.info("the TLS files have changed and are loaded")

    @contextlib.contextmanager
    def _unused_in_log(self) -> Iterator[None]:
        """Logs an error of the files, such as a certificate without its key yet: the next change counts."""
        try:
            yield
        except (ValueError, OSError) as error:
            logger.warning("the changed TLS files are not used: %s", error)


def _stamps(files: TlsFiles) -> Stamps:
    stamps: Stamps = []
    for path in (files.certfile, files.keyfile, files.ca_certs):
        try:
            status = None if path is None else path.stat()
        except OSError:
            status = None
        stamps.append(status and (status.st_ino, status.st_mtime_ns, status.st_size))
    return stamps
