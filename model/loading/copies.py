"""The copies on this machine of files in buckets, for libraries that read nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants

from model.inputs.fetched import SMALL_FILES, fetched_folder, fetched_parts
from model.inputs.gguf import parts_of
from model.inputs.limits import MAX_TOKENIZER_BYTES
from model.inputs.paths import Place
from model.inputs.remote import RemotePath

COPIES = Path(constants.HF_HOME) / "pallas-serve"  # next to what comes from the hub


def local_folder(
    folder: Place, patterns: Sequence[str] = SMALL_FILES, max_bytes: int | None = MAX_TOKENIZER_BYTES
) -> Path:
    """A folder of this machine with the files of `folder` whose names match. By default these are the small files: of
    the model's config, tokenizer and template."""
    return fetched_folder(folder, COPIES, patterns, max_bytes) if isinstance(folder, RemotePath) else folder


def local_file(file: Place) -> Path:
    """A file of this machine with the content of `file`. The other parts of a split GGUF file are next to it."""
    return fetched_parts(parts_of(file), COPIES) if isinstance(file, RemotePath) else file
