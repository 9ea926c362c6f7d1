"""Programs that were made elsewhere for this chip with `scripts.precompile`, and the list that is next to them.

A program is looked up by a digest, which cannot say why it is not there. So the list has all facts that decide the
programs, and a start reports the facts that differ. One fact is the number of K/V pages, which depends on the free
memory: a start uses the list's number if the memory has room for it. A GPU's programs are traced. They are compiled if
XLA's choices of kernels are in the folder, from a start on such a GPU, and more facts decide whether a start uses them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import msgspec

from model.inputs.json_file import read_fields
from model.inputs.paths import Place, write_whole
from model.inputs.private_folders import make_folder
from model.inputs.schema import TEXT, described_as
from scripts.building.described_chips import topology_of

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner

logger = logging.getLogger("pallas_serve")

FOLDER = "precompiled"  # inside the folder of compiled programs
PAGES = "K/V pages"
CODE = "the code, or an option of jax"  # the digest also holds most other facts
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables from which XLA reads options
CHOICES = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's folder of a GPU's choices, inside that of compiled programs
VERSIONS = ("CUDA of the driver", "CUDA of the runtime", "CUDA of the compiler", "cuDNN")  # as XLA describes a GPU
MOST_SHOWN = 160  # characters of a fact in a message
LEAST_SHARE = 0.95  # of the pages that there is room for: programs that have fewer pages are not used


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The list of the programs of one start."""

    target: TEXT  # the target of `scripts.precompile`
    facts: Annotated[dict[str, str], described_as("an object of texts")]
    programs: Annotated[int, described_as("an integer")]
    compiled: Annotated[int, described_as("an integer")] = 0  # of a GPU's programs; the others are traced
    compiled_for: Annotated[dict[str, str], described_as("an object of texts")] = {}  # more facts of a GPU's

    @property
    def num_pages(self) -> int:
        """The number of K/V pages; -1: the list does not have it."""
        return int(self.facts.get(PAGES, "-1"))

    def write(self, folder: Place) -> None:
        """Stores the list in the folder of compiled programs. Raises OSError."""
        path = _list(folder, self.facts)
        if isinstance(path, Path):
            make_folder(path.parent)
        write_whole(path, msgspec.json.encode(self))

    def differences(self, facts: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """The facts that differ, each as (the list's value, the value here)."""
        different = _differences(self.facts, facts)
        if len(different) > 1:
            different.pop(CODE, None)
        return different

    def remark(self) -> str:
        """What a start finds."""
        made = f"{self.programs} programs for {self.num_pages} K/V pages were made elsewhere, for {self.target}"
        if not self.compiled_for:
            return made
        different = _differences(self.compiled_for, facts_of_compiled())
        if different:
            return f"{made}; they are compiled anew: {_reasons(different)}"
        return f"{made}, {self.compiled} of them compiled"


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (there.get(name, "none"), here.get(name, "none")) for name in dict.fromkeys([*there, *here])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def facts_of_compiled() -> dict[str, str]:
    """The facts that decide compiled programs, besides those that decide the traced ones."""
    import jax

    from model.compiling.program_store import topology

    compresses = importlib.util.find_spec("zstandard") is not None  # JAX then compresses programs
    chips = topology()
    if jax.devices()[0].platform == "gpu":  # its description has the versions of CUDA and, last, the host's processor
        texts = re.findall("[ -~]{4,}", topology_of(jax.devices()).serialize().decode("latin-1"))
        versions = filter(re.compile(r"\d+(\.\d+)+").fullmatch, texts)
        named = [" ".join(pair) for pair in zip(VERSIONS, versions, strict=False)]
        chips = ", ".join([*named, f"processor {texts[-1]}", chips])
    return {
        "the package zstandard": "there" if compresses else "missing",
        "the chips' topology": chips,
        **{name: " ".join(sorted(os.environ.get(name, "").split())) for name in FLAGS},
    }


def program_facts(runner: ModelRunner, shapes: Mapping[str, str]) -> dict[str, str]:
    """All facts that decide the programs of a start, by their names in messages.

    Args:
        shapes: the facts about the model, its attention and its steps.
    """
    import flax
    import jax
    import jaxlib

    from model.compiling.program import compiler_of

    device, limits = runner.described.device, runner.described.config
    of_compiled = {"the chips": str(len(jax.devices()))} if device.platform == "gpu" else facts_of_compiled()
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "the compiler": compiler_of(device),
        "the chip": device.device_kind,
        **of_compiled,
        **shapes,
        "the limits": str(replace(limits, num_pages=None, kv_bytes=None, max_models=0, memory_utilization=1.0)),
        PAGES: str(runner.capacity().num_pages),
        CODE: runner.programs.fingerprint(),
    }


@dataclass(frozen=True)
class Found:
    """Programs that were compiled elsewhere."""

    num_pages: int | None  # K/V pages that they need; None: they cannot be used
    remark: str  # for the report: what they are, or why they cannot be used


def made_for(folder: Place, runner: ModelRunner, shapes: Mapping[str, str]) -> Found | None:
    """Looks for programs that were compiled elsewhere for this start. None: there is no list.

    Args:
        folder: the folder of compiled programs.
        shapes: the facts about the model, its attention and its steps.
    """
    if not (known := _read(folder)):
        return None
    facts = program_facts(runner, shapes)
    room = int(facts[PAGES])
    least = room if runner.described.config.num_pages is not None else LEAST_SHARE * room
    usable = [made for made in known if made.differences(facts).keys() <= {PAGES} and least <= made.num_pages <= room]
    if usable:
        made = max(usable, key=lambda made: made.num_pages)
        return Found(made.num_pages, made.remark())
    nearest = min(known, key=lambda made: len(made.differences(facts)))
    reasons = _reasons(nearest.differences(facts))
    return Found(None, f"the programs made elsewhere for {nearest.target} are not used: {reasons}")


def made_before(folder: Place, facts: Mapping[str, str]) -> Made | None:
    """The list of the programs of a start with these facts; None: they have not been made."""
    return next((made for made in _read(folder) if made.facts == facts), None)


def _read(folder: Place) -> list[Made]:
    """Reads all lists. A list that cannot be read is logged as a warning."""
    lists: list[Made] = []
    paths: list[Place] = [*(folder / FOLDER).glob("*.json")]
    for path in sorted(paths, key=str):
        try:
            lists.append(read_fields(path, Made))
        except (OSError, ValueError) as error:
            logger.warning("a list of programs that were made elsewhere cannot be read: %s", error)
    return lists


def _reasons(different: Mapping[str, tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {_told_apart(*pair)}" for name, pair in different.items())


def _told_apart(there: str, here: str) -> str:
    """The differing parts of two texts, which have commas between their parts."""
    parts = [text.split(", ") for text in (there, here)]
    own = (", ".join(part for part in parts[i] if part not in parts[1 - i]) or "nothing more" for i in range(2))
    return " there, ".join(shorten(text, MOST_SHOWN, placeholder="...") for text in own) + " here"


def _list(folder: Place, facts: Mapping[str, str]) -> Place:
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    return folder / FOLDER / f"{digest[:32]}.json"
