"""The form of the log's lines, in all processes that serve HTTP."""

from __future__ import annotations

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FORMAT_OF_SEVERAL = "%(asctime)s %(levelname)s %(name)s [http {number}]: %(message)s"
