"""Flags that are given more than once. Of those with one value the last counts, as in vLLM. These are the others."""

from __future__ import annotations

import argparse
from typing import Any


class EachCounts(argparse.Action):
    """Of a flag with a list: the values of each time count. They replace the default."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None):
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*values] if before is self.default else [*before, *values])


class Once(argparse.Action):
    """Of a flag with a secret: the last time would drop the first one in silence, so it is refused."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None):
        if getattr(namespace, self.dest) is not self.default:
            parser.error(f"{flag}: it is given twice, and there can be one only")
        setattr(namespace, self.dest, values)
