"""Which projections the config of a LoRA adapter targets, and with which ranks and alphas.

The rules are those of the package peft (0.21). A projection is targeted by the end of its name or by a pattern. Ranks
and alphas of single projections have patterns for the end of the name, of which the first that matches counts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec

from model.config import LlamaConfig
from model.inputs.schema import TEXT, TRUTH, described_as, integer, number
from model.inputs.words import shown

NO_PROJECTIONS = ("lm_head", "model.embed_tokens")  # an adapter of these can only be merged
_MATCHING_S = 5.0  # for all patterns of a config; a pattern can be written that takes years

_Names = Annotated[list[str] | str, described_as("a list of names or a pattern")]


class AdapterConfig(msgspec.Struct):
    """`adapter_config.json`."""

    peft_type: TEXT
    r: Annotated[int, integer(1, 1 << 16)]
    lora_alpha: Annotated[float, number(-1e6, 1e6)]
    target_modules: _Names
    exclude_modules: _Names | None = None
    rank_pattern: Annotated[dict[str, int], described_as("ranks by patterns")] | None = None
    alpha_pattern: Annotated[dict[str, float], described_as("numbers by patterns")] | None = None
    use_rslora: TRUTH | None = None
    layers_to_transform: Annotated[int | list[int], described_as("an integer or a list of integers")] | None = None
    layers_pattern: _Names | None = None
    modules_to_save: Annotated[list[str], described_as("a list of names")] | None = None


def targets_of(
    file: AdapterConfig, config: LlamaConfig, *, merges: bool = False
) -> tuple[dict[str, int], dict[str, float], list[str]]:
    """The ranks and alphas of the modules that the config targets, and what is wrong with it. With `merges` the head
    and the embedding may be among them."""
    names = (*config.projections, *NO_PROJECTIONS)
    ranks, alphas = file.rank_pattern or {}, file.alpha_pattern or {}
    layers = [file.layers_pattern] if isinstance(file.layers_pattern, str) else file.layers_pattern or []
    for field in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"):
        entries = getattr(file, field)
        if not isinstance(entries, str | None) and len(entries) > len(names):
            return {}, {}, [f"{field} has {len(entries)} entries, and the model {len(names)} modules"]
    numbers = file.layers_to_transform
    wanted = {numbers} if isinstance(numbers, int) else {*(numbers or ())}
    is_all = isinstance(file.target_modules, str) and file.target_modules.lower() == "all-linear"
    try:
        matches = _matches({x for x in (file.target_modules, file.exclude_modules) if isinstance(x, str)}, names)
        suffixes = _matches({*ranks, *alphas}, names, r"(?:.*\.)?(?:{})")
        in_layers = _matches({*filter(None, layers)}, names, r"(?:.*\.)?{}\.\d+\..*")
    except ValueError as error:
        return {}, {}, [str(error)]

    def named(by: list[str] | str | None, name: str) -> bool:
        if not by:
            return False
        return name in matches[by] if isinstance(by, str) else any(name == x or name.endswith(f".{x}") for x in by)

    def is_target(name: str) -> bool:
        if named(file.exclude_modules, name):
            return False
        if is_all:
            return name not in NO_PROJECTIONS
        if not named(file.target_modules, name):
            return False
        if isinstance(file.target_modules, str) or not wanted:
            return True
        if layers and not any(name in in_layers[pattern] for pattern in layers if pattern):
            return False
        return name not in NO_PROJECTIONS and layer_of(name) in wanted

    def first[T](patterns: Mapping[str, T], name: str, default: T) -> T:
        return next((value for key, value in patterns.items() if name in suffixes[key]), default)

    targets = [name for name in names if is_target(name)]
    refused = [] if merges else [name for name in targets if name in NO_PROJECTIONS]
    problems = [f"adapters of {name} are not supported" for name in refused]
    targets = [name for name in targets if name not in refused]
    if not targets:
        problems.append(f"target_modules={shown(file.target_modules)} names no projection of the model")
    return (
        {name: first(ranks, name, file.r) for name in targets},
        {name: first(alphas, name, file.lora_alpha) for name in targets},
        problems,
    )


_MATCH = """
import json, re, sys
patterns, names, form = json.load(sys.stdin)
for pattern in patterns:
    try:
        compiled = re.compile(form.replace("{}", pattern))
    except Exception as error:
        sys.exit(f"{pattern[:100]!r} is not a regular expression: {error}")
    print(json.dumps([name for name in names if compiled.fullmatch(name)]))
"""


def _matches(patterns: Collection[str], names: Sequence[str], form: str = "{}") -> dict[str, Collection[str]]:
    """The names that each pattern matches as a whole. ValueError if that takes too long or one is malformed.

    Patterns with repetitions are matched by another process. One of them can take years, in which no other thread of
    this process would run.
    """
    if all(re.fullmatch(r"[\w.-]*", pattern) for pattern in patterns):
        compiled = {pattern: re.compile(form.replace("{}", pattern)) for pattern in patterns}
        return {key: {name for name in names if pattern.fullmatch(name)} for key, pattern in compiled.items()}
    given = json.dumps([list(patterns), names, form])
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_MATCHING_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"patterns that take more than {_MATCHING_S:g} s: {shown(list(patterns))}") from error
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"patterns that cannot be matched: {shown(list(patterns))}")
    return dict(zip(patterns, map(json.loads, done.stdout.splitlines()), strict=True))


def layer_of(module: str) -> int:
    """The number of a projection's layer."""
    return int(module.split(".")[2])
