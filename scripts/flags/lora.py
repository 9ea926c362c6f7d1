"""The adapters of `--lora-modules`: NAME=PATH, or vLLM's JSON objects, or JSON lists of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from model.inputs.paths import place
from model.inputs.words import shown
from server.engine.adapters import check_name

FLAG = "--lora-modules"


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is loaded at the start."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(given: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[LoraModule]:
    """The adapters, in their order. Raises ValueError, with the flag's name, for a value that does not name one."""
    modules = [module for item in ([given] if isinstance(given, str | Mapping) else given) for module in _each(item)]
    names: set[str] = set()
    for module in modules:
        check_name(module.name, FLAG)
        if module.name in names:
            raise ValueError(f"{FLAG}: two adapters have the name {module.name!r}")
        names.add(module.name)
        if not module.path:
            raise ValueError(f"{FLAG}: the adapter {module.name!r} has no path")
        place(module.path, FLAG)
    return modules


def check_not_of_model(modules: Sequence[LoraModule], model_names: Sequence[str]) -> None:
    """Raises ValueError if an adapter has one of the model's names."""
    for module in modules:
        if module.name in model_names:
            raise ValueError(f"{FLAG}: {module.name!r} is the name of the model (--served-model-name)")


def _each(item: str | Mapping[str, Any]) -> Iterator[LoraModule]:
    if isinstance(item, str) and not item.lstrip().startswith(("{", "[")):
        name, equals, path = item.partition("=")
        if not equals:
            raise ValueError(f"{FLAG} {item!r}: write NAME=PATH, or a JSON object with `name` and `path`")
        yield LoraModule(name, path)
        return
    try:
        found = msgspec.json.decode(item) if isinstance(item, str) else item
        objects = found if isinstance(found, list) else [found]
        yield from (msgspec.convert(fields, LoraModule) for fields in objects)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{FLAG} {shown(item)}: {error}") from error
