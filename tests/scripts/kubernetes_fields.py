"""The fields of the Kubernetes resources that the manifests use, with their types. An unknown field is an error.

Kubernetes ignores or refuses a misspelt field only when it is applied. The fields are in `kubernetes_fields.yaml`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FIELDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

CHECKS = {
    "text": lambda value: isinstance(value, str),
    "int": lambda value: type(value) is int,
    "bool": lambda value: isinstance(value, bool),
    "name": lambda value: isinstance(value, str) and re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", value),
    "port": lambda value: isinstance(value, str) or (type(value) is int and 0 < value < 65536),
    "map": lambda value: isinstance(value, dict) and all(isinstance(x, str) for pair in value.items() for x in pair),
}


def problems(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource, a line each."""
    kind = str(resource.get("kind"))
    return _problems(resource, kind, kind) if kind in FIELDS else [f"{kind}: an unknown kind"]


def _problems(value: Any, kind: Any, place: str) -> list[str]:
    if isinstance(kind, list):
        if not isinstance(value, list) or not value:
            return [f"{place}: not a list of {kind[0]}"]
        return [line for i, item in enumerate(value) for line in _problems(item, kind[0], f"{place}[{i}]")]
    if isinstance(kind, dict):
        texts = kind["one of"]
        return [] if value in texts else [f"{place}: {value!r} is none of {texts}"]
    if kind in CHECKS:
        return [] if CHECKS[kind](value) else [f"{place}: {value!r} is not a {kind}"]
    if kind not in FIELDS:  # a constant
        return [] if value == kind else [f"{place}: {value!r} is not {kind}"]
    if not isinstance(value, dict):
        return [f"{place}: {value!r} is not a {kind}"]
    types = {name.rstrip("!"): type_ for name, type_ in FIELDS[kind].items()}
    required = {name[:-1] for name in FIELDS[kind] if name.endswith("!")}
    lines = [f"{place}.{name}: missing" for name in sorted(required - set(value))]
    for name, item in value.items():
        where = f"{place}.{name}"
        lines += _problems(item, types[name], where) if name in types else [f"{where}: an unknown field"]
    return lines
