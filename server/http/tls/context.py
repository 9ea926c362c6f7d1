"""Makes the TLS context of the listener from files. Faults are reported in words, with the flag of the file."""

from __future__ import annotations

import ssl
from pathlib import Path

from server.settings import TlsFiles

VERIFY_MODES = {0: ssl.CERT_NONE, 1: ssl.CERT_OPTIONAL, 2: ssl.CERT_REQUIRED}  # by --ssl-cert-reqs


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 and 1.3, with Python's secure defaults. Raises ValueError for a file that cannot be used."""
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
    """Those of TLS 1.3 stay as they are."""
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
