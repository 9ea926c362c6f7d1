"""Certificates that the tests make."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from server.settings import TlsFiles


class Authority:
    """A certificate authority, and files that it has made."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        folder.mkdir()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def files(self, name: str, **options: object) -> TlsFiles:
        """A certificate for 127.0.0.1 and its key."""
        certificate = self._ca.issue_cert("127.0.0.1", common_name=name)
        certfile, keyfile = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        certfile.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(keyfile)
        return TlsFiles(certfile=certfile, keyfile=keyfile, **options)

    def context(self, own: TlsFiles | None = None) -> ssl.SSLContext:
        """A client's context: it trusts this authority, and shows its `own` certificate."""
        context = ssl.create_default_context(cafile=self.file)
        if own is not None:
            context.load_cert_chain(own.certfile, own.keyfile)
        return context
