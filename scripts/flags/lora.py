"""The adapters of `--lora-modules` and the models of `--models`: names, each with a path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from model.inputs.paths import place
from model.inputs.words import shown
from server.engine.adapters import check_name

FLAG = "--lora-modules"
MODELS = "--models"
Given = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


class NamedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is loaded at the start, or a model besides `--model`."""

    name: str
    path: str
    base_model_name: str | None = None  # of an adapter


def lora_modules(given: Given) -> list[NamedWeights]:
    """The adapters, in their order: NAME=PATH, vLLM's JSON objects, or JSON lists of them. Raises ValueError, with the
    flag's name, for a value that does not name one."""

    def read(found: Any) -> Iterable[NamedWeights]:
        return msgspec.convert(found if isinstance(found, list) else [found], list[NamedWeights])

    return _checked(FLAG, "adapter", _each(FLAG, given, read, "`name` and `path`"))


def named_models(given: Given) -> list[NamedWeights]:
    """The models, in their order: NAME=PATH, or JSON objects of paths by names. Raises ValueError, with the flag's
    name, for a value that does not name one."""

    def read(found: Any) -> Iterable[NamedWeights]:
        return (NamedWeights(*item) for item in msgspec.convert(found, dict[str, str]).items())

    return _checked(MODELS, "model", _each(MODELS, given, read, "paths by their names"))


def check_names_differ(
    models: Sequence[NamedWeights], modules: Sequence[NamedWeights], served_names: Sequence[str]
) -> None:
    """Raises ValueError if a model has one of the names of `--model`, or an adapter one of a model's."""
    for flag, named, names in ((MODELS, models, served_names), (FLAG, modules, served_names)):
        for each in named:
            if each.name in names:
                raise ValueError(f"{flag}: {each.name!r} is the name of the model (--served-model-name)")
    if both := {each.name for each in models} & {each.name for each in modules}:
        raise ValueError(f"{FLAG}: {min(both)!r} is the name of a model (--models)")


def _checked(flag: str, kind: str, found: Iterable[NamedWeights]) -> list[NamedWeights]:
    named: dict[str, NamedWeights] = {}
    for each in found:
        check_name(each.name, flag)
        if each.name in named:
            raise ValueError(f"{flag}: two {kind}s have the name {each.name!r}")
        if not each.path:
            raise ValueError(f"{flag}: the {kind} {each.name!r} has no path")
        place(each.path, flag)
        named[each.name] = each
    return list(named.values())


def _each(
    flag: str, given: Given, read: Callable[[Any], Iterable[NamedWeights]], fields: str
) -> Iterator[NamedWeights]:
    for item in [given] if isinstance(given, str | Mapping) else given:
        if isinstance(item, str) and not item.lstrip().startswith(("{", "[")):
            name, equals, path = item.partition("=")
            if not equals:
                raise ValueError(f"{flag} {item!r}: write NAME=PATH, or a JSON object with {fields}")
            yield NamedWeights(name, path)
            continue
        try:
            yield from read(msgspec.json.decode(item) if isinstance(item, str) else item)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{flag} {shown(item)}: {error}") from error
