"""Where a model comes from: a folder or a GGUF file, here or in a bucket, a name on the Hugging Face hub, a preset, or
the embedded demo."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from model import presets
from model.config import MODELOPT_CONFIG, GenerationFile, LlamaConfig, end_id_problems, end_ids
from model.inputs.fetched import SMALL_FILES
from model.inputs.gguf import GgufFile, is_gguf
from model.inputs.json_file import read_fields, read_object
from model.inputs.paths import Place, is_url, place
from model.inputs.words import shown
from model.loading.copies import local_file, local_folder
from model.loading.gguf_config import gguf_model_config
from model.loading.hf_format import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_TORCH_FILE, is_adapter

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
CONVERTED = "orbax"  # the subfolder of a model that scripts/convert_checkpoint.py writes
CONVERSION_FILE = "stored.json"  # in it. `orbax_format` reads it, whose import takes most of a second
UNFINISHED = "unfinished-conversion.json"  # in a folder that scripts/convert_checkpoint.py has not finished

_WEIGHT_FILES = ["*.safetensors"]
_TORCH_FILE = "pytorch_model.bin"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _QuantizedFile(msgspec.Struct):
    quantization_config: dict[str, Any] | None = None


class Kind(StrEnum):
    """Where a model comes from."""

    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"
    PRESET = "preset"
    DEMO = "demo"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model found by its name: its configuration, and where its files are if it has any."""

    name: str  # the name that the user gave
    kind: Kind
    config: LlamaConfig
    eos_token_ids: tuple[int, ...]  # that these files state; the tokenizer may add some
    eos_origin: str  # the file that states them
    path: Path | None  # the folder or GGUF file of config and tokenizer; None for a preset, which has none
    weights: Place | None  # where the weights are: `path`, or the folder in a bucket that `path` is a copy from
    base: ModelSource | None = None  # the model into which an adapter, at `weights`, is merged
    own_tokenizer: Path | None = None  # the folder of the adapter's tokenizer, if it has one

    @property
    def quant_method(self) -> str | None:
        """How the checkpoint is quantised, in the words of its config.json, or `gguf`; None: it is not."""
        if self.kind is Kind.GGUF or self.path is None:
            return None if self.path is None else "gguf"
        held = read_fields(self.path / "config.json", _QuantizedFile).quantization_config
        if held is None and (self.path / MODELOPT_CONFIG).exists():
            return "modelopt"
        return (held or {}).get("quant_method")

    @property
    def tokenizer(self) -> Path | None:
        """The folder or GGUF file of the tokenizer; None for a preset, which has none."""
        return self.own_tokenizer or self.path

    def with_adapter(self, name: str, folder: Place, config: LlamaConfig) -> Self:
        """The model with the adapter of this folder, which has the config `config`."""
        has_own = any((folder / file).exists() for file in _TOKENIZER_FILES)
        own = local_folder(folder) if has_own else None
        return replace(self, name=name, config=config, weights=folder, base=self, own_tokenizer=own)


def resolve(
    name: str, *, revision: str | None = None, weights: bool = True, takes_adapters: bool = True
) -> ModelSource:
    """Finds the model and reads its configuration; a hub model is downloaded first.

    Args:
        name: "demo", "preset:NAME", a folder with a config.json or of an adapter, a GGUF file, the URL of one of
            these, or a hub name such as "org/model".
        revision: branch, tag or commit of a hub model.
        weights: False downloads the small files only (for dummy weights).
        takes_adapters: False refuses the folder of an adapter.

    Raises:
        ValueError: no model has that name, the model is not supported, or the hub cannot be reached.
    """
    where = place(name, "model")
    kind = _kind(name, where)
    if revision is not None and kind is not Kind.HUB:
        raise ValueError(f"a revision is for hub models only: {revision=} {name=}")
    found = partial(ModelSource, name=name, kind=kind)
    match kind:
        case Kind.PRESET:
            config = presets.preset(name.removeprefix(presets.PREFIX))
            ends = config.eos_token_ids
            return found(config=config, eos_token_ids=ends, eos_origin="the preset", path=None, weights=None)
        case Kind.GGUF:
            path = local_file(where)
            config = gguf_model_config(GgufFile.read(path))
            ends = config.eos_token_ids
            return found(config=config, eos_token_ids=ends, eos_origin="the file's metadata", path=path, weights=path)
        case Kind.DEMO:
            where = folder = DEMO_FOLDER
        case Kind.FOLDER:
            if is_adapter(where):
                return _merged(name, where, weights=weights, takes_adapters=takes_adapters)
            folder = local_folder(where)
        case Kind.HUB:
            folder = _from_hub(name, revision, SMALL_FILES)
            _check_config(folder, name)
            if is_adapter(folder):  # or a model in whose folder an adapter's config was left
                folder = _from_hub(name, revision, [*SMALL_FILES, *_WEIGHT_FILES, ADAPTER_TORCH_FILE])
                if is_adapter(folder):
                    return _merged(name, folder, weights=weights, takes_adapters=takes_adapters)
            LlamaConfig.from_file(folder)  # refuses an unsupported model before its weights are downloaded
            if weights:
                folder = _from_hub(name, revision, [*SMALL_FILES, *_WEIGHT_FILES])
            where = folder
    config = LlamaConfig.from_file(folder)
    stated = _end_ids(folder / "generation_config.json", config)
    ends, origin = (config.eos_token_ids, "config.json") if stated is None else (stated, "generation_config.json")
    return found(config=config, eos_token_ids=ends, eos_origin=origin, path=folder, weights=where)


def _merged(name: str, folder: Place, *, weights: bool, takes_adapters: bool) -> ModelSource:
    """The model that an adapter's config names, with the adapter. Raises ValueError if it cannot be found."""
    from model.loading.adapter_files import resized_for  # most starts need none

    if not takes_adapters:
        raise ValueError(f"{name} is an adapter, too")
    held = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    advice = f"with --model BASE and --models NAME={name} its weights are added to those of BASE"
    if not isinstance(held, str) or not held:
        raise ValueError(f"{name} is an adapter, and its base_model_name_or_path names no model: {advice}")
    try:
        base = resolve(held, weights=weights, takes_adapters=False)
    except ValueError as error:
        raise ValueError(f"{name} is an adapter of {shown(held)}: {error}; {advice}") from error
    return base.with_adapter(name, folder, resized_for(folder, base.config))


def small_files(name: str, revision: str | None = None) -> Path:
    """A folder of this machine with the small files of a folder, here or in a bucket, or of a hub name.

    Raises ValueError if there is none, or if a revision is given of what is not on the hub.
    """
    where = DEMO_FOLDER if name == DEMO else place(name, "tokenizer")
    if _HUB_NAME.fullmatch(name) and not where.exists():
        return _from_hub(name, revision, SMALL_FILES)
    if revision is not None:
        raise ValueError(f"a revision is for hub names only: {revision=} {name=}")
    return local_folder(where)


def head_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of an EAGLE head; one on the hub or in a bucket is downloaded first.

    Args:
        name: a folder, also of a bucket, or a hub name such as "org/head".
        weights: False downloads the small files only.

    Raises:
        ValueError: there is no such folder, or the hub or the bucket cannot be reached.
    """
    where = place(name, "head")
    if where.is_dir():
        patterns = [*SMALL_FILES, *((*_WEIGHT_FILES, _TORCH_FILE) if weights else ())]
        return local_folder(where, patterns, max_bytes=None)
    if is_url(name) or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"no head {name!r}: it can be a folder or a hub name (org/head)")
    folder = _from_hub(name, None, [*SMALL_FILES, *(_WEIGHT_FILES if weights else ())])
    if weights and not any(folder.glob("*.safetensors")):
        folder = _from_hub(name, None, [*SMALL_FILES, _TORCH_FILE])
    return folder


class NoAdapterError(ValueError):
    """There is no LoRA adapter of this name."""


def adapter_place(name: str | Place) -> Place:
    """Where the LoRA adapter of this name is; one on the hub is downloaded first, without the other files next to it.

    Args:
        name: a folder or a GGUF file, also of a bucket, or a hub name such as "org/adapter".

    Raises:
        NoAdapterError: there is none.
        ValueError: the hub or the bucket cannot be reached.
    """
    where, name = place(name, "adapter"), str(name)
    if where.is_dir() or (is_gguf(where) and where.exists()):
        return where
    if is_gguf(where) or is_url(name) or not _HUB_NAME.fullmatch(name):
        raise NoAdapterError(f"no adapter {name!r}: it can be a folder, a GGUF file or a hub name (org/adapter)")
    folder = _from_hub(name, None, [ADAPTER_CONFIG, ADAPTER_FILE])
    if not (folder / ADAPTER_FILE).exists():
        folder = _from_hub(name, None, [ADAPTER_CONFIG, ADAPTER_TORCH_FILE])
    return folder


def _kind(name: str, path: Place) -> Kind:
    if name == DEMO:
        return Kind.DEMO
    if name.startswith(presets.PREFIX):
        return Kind.PRESET
    if is_gguf(path):
        if not path.exists():
            raise ValueError(f"there is no file {name}")
        return Kind.GGUF
    if path.is_dir():
        _check_config(path, name)
        return Kind.FOLDER
    if is_url(name):
        raise ValueError(f"there is no folder and no GGUF file {name}")
    if path.exists():
        raise ValueError(f"{name} is a file, but no GGUF file")
    if _HUB_NAME.fullmatch(name):
        return Kind.HUB
    raise ValueError(
        f"no model {name!r}: it can be {DEMO!r}, a folder, a GGUF file, a hub name (org/model), "
        f"or one of {', '.join(presets.PREFIX + preset for preset in presets.PRESETS)}"
    )


def _check_config(folder: Place, name: str) -> None:
    if (folder / "config.json").exists() or is_adapter(folder):
        return
    raise ValueError(f"the folder {name} has no config.json{_instead(folder)}")


def _instead(folder: Place) -> str:
    if (folder / UNFINISHED).exists():
        return ": its conversion has not ended: delete the folder if none is running, and convert again"
    found = sorted(path.name for path in folder.iterdir() if is_gguf(path))
    return f"; name a GGUF file in it, such as {found[0]}" if found else ""


def _from_hub(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from model.loading.hub import download  # the hub's client takes 0.1 s of a start, and most starts need none

    return download(name, revision, patterns)


def _end_ids(path: Path, config: LlamaConfig) -> tuple[int, ...] | None:
    """The end ids of `generation_config.json`; None if the file or its field is missing."""
    if not path.exists():
        return None
    listed = end_ids(read_fields(path, GenerationFile))
    if listed is not None and (problems := end_id_problems(listed, config.vocab_size)):
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return listed
