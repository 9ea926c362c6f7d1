"""Downloads models from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# Some repositories hold the same weights in the trainer's form, too.
_NEEDLESS_FILES = ["*/*", "consolidated*"]


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder with the files of a hub model whose names match `patterns`; those that are missing are downloaded.

    Raises ValueError if the hub has no such model, refuses it, or cannot be reached.
    """
    asked = name if revision is None else f"{name} at revision {revision}"
    try:
        options = {"allow_patterns": list(patterns), "ignore_patterns": _NEEDLESS_FILES}
        folder = snapshot_download(name, revision=revision, **options)
    except GatedRepoError as error:
        raise ValueError(
            f"{asked} is gated: accept its licence on its hub page, then log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"the hub has {name}, but no such revision: {revision=}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no folder {name}, and the hub knows no {asked} (a private one needs `hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{asked} is neither a folder nor in the local hub cache, and the hub cannot be reached; "
            "offline, give a folder with its files"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"the hub refused {asked}: {error}") from error
    return Path(folder)
