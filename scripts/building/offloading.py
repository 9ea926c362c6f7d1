"""Offloads an engine's pages from the device to a part of the host's memory, and from there to files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from batcher.page_store import Offloading
from model.execution.device_memory import host_memory
from model.execution.runner import ModelRunner
from model.inputs.paths import expanded
from model.loading.weights_digest import files_digest, weights_digest
from model.page_files.store import PATH_FLAG, PageFiles
from scripts.building.draft import ChosenDraft, ChosenHead
from scripts.building.weights import ChosenWeights
from scripts.flags.settings import EngineSettings

GIB = 1 << 30
# Returns digests of the model's weights and of those of the draft model or head.
Digests = Callable[[], tuple[str, str]]


def start_digests(settings: EngineSettings, weights: ChosenWeights, draft: ChosenDraft | None) -> Digests | None:
    """Starts to read the weights' files in a separate thread, because that may take long. None: pages do not go to
    files."""
    if settings.kv_offloading_path is None:
        return None
    thread = ThreadPoolExecutor(1, thread_name_prefix="weights-digest")
    found = thread.submit(lambda: (_digest(weights), "" if draft is None else _digest(draft.weights)))
    thread.shutdown(wait=False)
    return found.result


def make_offloading(settings: EngineSettings, runner: ModelRunner, digests: Digests | None) -> Offloading | None:
    """The offloading that the settings ask for; None: pages do not leave the device.

    Raises ValueError if the host's memory or the folder cannot be used.
    """
    if not settings.kv_offloading_size:
        return None
    size, free = int(settings.kv_offloading_size * GIB), host_memory().free
    if size > free:
        raise ValueError(
            f"--kv-offloading-size {settings.kv_offloading_size:g}: the host has {free / GIB:.1f} GiB free"
        )
    store = None
    if digests is not None and settings.kv_offloading_path is not None:
        folder, most = expanded(settings.kv_offloading_path, PATH_FLAG), int(settings.kv_offloading_disk * GIB)
        store = PageFiles(folder, runner.page_identity(*digests()), max_bytes=most)
        store.start_listing()  # the first request looks for its prefix there
    return Offloading(host_bytes=size, store=store)


def _digest(weights: ChosenWeights | ChosenHead) -> str:
    """A text that is equal only for equal weights."""
    if isinstance(weights, ChosenHead) and not weights.is_random:
        return files_digest(sorted(file for file in weights.folder.iterdir() if file.is_file()))
    if isinstance(weights, ChosenWeights) and weights.stored is not None:
        return weights_digest(weights.stored)
    return f"random {weights.seed} {weights.config!r}"
