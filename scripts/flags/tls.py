"""The flags of TLS. They have uvicorn's and vLLM's names and meaning."""

from __future__ import annotations

import argparse

from model.inputs.paths import local_path
from scripts.flags.parsing import Once
from server.settings import TlsFiles


def add_tls_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags. The files are in PEM form."""
    group.add_argument(
        "--ssl-certfile", type=local_path, metavar="FILE", help="The server's certificate; with it, HTTPS is served."
    )
    group.add_argument(
        "--ssl-keyfile", type=local_path, metavar="FILE", help="The certificate's key (default: in --ssl-certfile)."
    )
    group.add_argument(
        "--ssl-keyfile-password", action=Once, metavar="TEXT", help="The password of an encrypted --ssl-keyfile."
    )
    group.add_argument(
        "--ssl-ca-certs", type=local_path, metavar="FILE", help="The authorities that sign clients' certificates."
    )
    group.add_argument(
        "--ssl-cert-reqs", type=int, default=0, choices=(0, 1, 2), metavar="N",
        help="A client's certificate is not asked for (0), checked if there is one (1) or required (2) (default: 0).",
    )  # fmt: skip
    group.add_argument(
        "--ssl-ciphers", metavar="NAMES", help="The ciphers of TLS 1.2, in OpenSSL's notation (default: Python's)."
    )
    group.add_argument(
        "--enable-ssl-refresh", action="store_true", help="These files are loaded again when they change."
    )


_FLAGS = {
    "keyfile": "ssl_keyfile", "keyfile_password": "ssl_keyfile_password", "ca_certs": "ssl_ca_certs",
    "cert_reqs": "ssl_cert_reqs", "ciphers": "ssl_ciphers", "refresh": "enable_ssl_refresh",
}  # fmt: skip


def tls_files(args: argparse.Namespace) -> TlsFiles | None:
    """The TLS files of the flags; None: plain HTTP. Raises ValueError for a flag without the flags that it needs."""
    given = {field: getattr(args, flag) for field, flag in _FLAGS.items()}
    if args.ssl_certfile is not None:
        return TlsFiles(certfile=args.ssl_certfile, **given)
    for field, value in given.items():
        if value:
            raise ValueError(f"--{_FLAGS[field].replace('_', '-')} has no effect without --ssl-certfile")
    return None
