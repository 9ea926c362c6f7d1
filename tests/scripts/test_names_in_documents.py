"""What documents, docstrings and comments name is there: files, modules and what is in them, instruments of the lab."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("pallas_kernels", "model", "batcher", "server", "scripts", "tests")
FOLDERS = (ROOT, *(ROOT / room for room in (*ROOMS, ".github")))
FILES = [
    path
    for path in (*ROOT.iterdir(), *(path for folder in FOLDERS[1:] for path in folder.rglob("*")))
    if path.is_file()
]
DOCUMENTS = [path for path in FILES if path.suffix in (".md", ".py")]
WORDS = re.compile(r'"""(?:.*?)"""|(?<!\S)#[^\n]*', re.DOTALL)  # docstrings and comments
PATH = re.compile(rf"(?<![\w./@:{{-])((?:{'|'.join(ROOMS)}|\.github|\.ci)(?:/[\w.@-]+)+)")
IN_A_DOCUMENT = re.compile(r"`([a-z_.]+(?:/[\w.@-]+)+/?)`|\]\(([^)#:]+)\)")
FILE = re.compile(r"(?<![\w/<>$}*{.-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|c|h))(?![\w/(*])")
MODULE = re.compile(rf"(?<![\w./-])((?:{'|'.join(ROOMS)})(?:\.[A-Za-z_]\w*)+)")
INSTRUMENT = re.compile(r"(?:`|scripts\.)lab ([a-z]\w+)")
IDENTIFIER = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
RESULTS = ROOT / "scripts/lab/results"  # have options of other programs, too
CHANGELOG = ROOT / ".github/CHANGELOG.md"  # has the former names of commands, too
# Made by the set-up, on the hub, by a conversion, of llama.cpp, written by a test; names of weights.
ELSEWHERE = (
    ".venv/",
    "yuhuili/",
    "additional_chat_templates/",
    "orbax/",
    "convert_lora_to_gguf.py",
    "ggml-common.h",
    "add.py",
    "model.layers",
    "model.safetensors",
)
DEFINITION = r"^\s*(?:async def |def |class |from .* import .*|self\.)?\b{}\b"
# Names of other programs.
FOREIGN = {
    *("MOSAIC_GPU_DUMP_TO", "TpuInfo.chip_version", "__type", "atomic_store", "close_notify", "fold_in", "_dpN"),
    *("param_scan_axis", "process_cpu_seconds_total", "scan_layers", "transformers.GenerationConfig"),
}
PLACEHOLDER = re.compile(r"[A-Z]{3}")


def words(path: Path) -> str:
    """A document, or the docstrings and comments of a module."""
    text = path.read_text()
    return text if path.suffix == ".md" else "\n".join(WORDS.findall(text))


def missing(path: Path, text: str) -> Iterator[str]:
    """The names in the text that lead to nothing. Paths are from the checkout's root or from the text's own folder."""
    paths = set(PATH.findall(text))
    if path.suffix == ".md":
        paths |= {name for pair in IN_A_DOCUMENT.findall(text) for name in pair if name}
    for name in known_here(paths):
        if not any((base / name.rstrip("./")).exists() for base in (ROOT, path.parent)):
            yield name
    for name in known_here(FILE.findall(text)):
        if not (is_file(name) or (path.parent / name).exists()):
            yield name
    if path.parent not in (RESULTS, CHANGELOG.parent):
        for name in known_here(IDENTIFIER.findall(text)):
            if ("_" in name or "." in name) and name not in FOREIGN and not words_of_code().issuperset(name.split(".")):
                yield name
    if path != CHANGELOG:
        yield from (name for name in known_here(MODULE.findall(text)) if not is_module(name))
        yield from (f"lab {name}" for name in INSTRUMENT.findall(text) if not is_module(f"scripts.lab.{name}"))


def known_here(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(ELSEWHERE) and not PLACEHOLDER.search(name)]


@cache
def is_file(name: str) -> bool:
    return any(str(path).endswith(f"/{name}") for path in FILES)


@cache
def is_module(name: str) -> bool:
    """Whether it is a package, a module, or a name that a module defines or has imported."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        source = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
        if source is not None:
            code = source.read_text()
            return all(re.search(DEFINITION.format(part), code, re.MULTILINE) for part in parts[count:])
    return False


@cache
def words_of_code() -> frozenset[str]:
    """Of names and strings, and of the names of files."""
    found = {part for path in FILES for part in path.name.split(".")}
    for path in FILES:
        if path.suffix in (".py", ".c", ".h", ".js", ".yaml", ".json", ".toml", ".sh", "") and path != Path(__file__):
            found.update(
                re.findall(r"\w+", WORDS.sub("", path.read_text()) if path.suffix == ".py" else path.read_text())
            )
    return frozenset(found)


def test_the_names_in_all_documents_lead_somewhere():
    assert [f"{path.relative_to(ROOT)}: {name}" for path in DOCUMENTS for name in missing(path, words(path))] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`scripts/wiring/device.py` has it", ["scripts/wiring/device.py"] * 2),
        ("see results/decided.md", ["results/decided.md"]),
        ("[why](results/decided.md)", ["results/decided.md"] * 2),
        ("python -m scripts.lab.accounts.compile_gpu_step", ["scripts.lab.accounts.compile_gpu_step"]),
        ("as of `server.text.reasoning.Reader`", ["server.text.reasoning.Reader"]),
        ("`lab soak` attacks", ["lab soak"]),
        ("as in `_restore_one`", ["_restore_one"]),
        ("`lab step`, server.text.reasoning.ReasoningReader, tests/conftest.py and `README.md`", []),
    ],
)
def test_a_name_that_leads_nowhere_is_found(text, names):
    assert [*missing(ROOT / "README.md", text)] == names


def product_files(pattern: str) -> set[str]:
    """The Python files of the product, without the laboratory, in which the pattern is."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in FILES if path.suffix == ".py"}
    product = {path: text for path, text in sources.items() if not path.startswith(("tests/", "scripts/lab/"))}
    return {path for path, text in product.items() if re.search(pattern, text)}


@pytest.mark.parametrize(("name", "is_all"), [("presence_penalty", True), ("min_p", False)])
def test_contributing_names_the_files_of_a_sampling_parameter(name, is_all):
    contributing = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (rule,) = re.findall(r"(?s)- A new sampling parameter that.*?\n(?=- )", contributing)
    named = set(re.findall(r"`([\w/]+\.py)`", rule))
    found = product_files(rf"\b{name}\b")
    assert found <= named
    first = set(re.findall(r"`([\w/]+\.py)`", rule.partition("where a stage")[0]))
    assert (found == first) is is_all


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        (r"\b(SixBit|SixBitMethod|int6)\b", "form of weights has five places"),
        (r"\bPackedForm\b", "layout of checkpoints whose weights have"),
    ],
)
def test_contributing_names_the_files_of_a_form_of_weights(form, rule):
    contributing = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (text,) = re.findall(rf"(?s)- A new {rule}.*?\n(?=- )", contributing)
    assert product_files(form) == set(re.findall(r"`([\w/]+\.py)`", text))
