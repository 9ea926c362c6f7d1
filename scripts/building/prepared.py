"""Where a start on a CPU finds the weights that an earlier one has prepared, and keeps its own for the next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.building.chosen_weights import ChosenWeights

if TYPE_CHECKING:
    from scripts.building.head import ChosenHead
    from scripts.building.model_on_chips import ModelOnChips

_PACKAGES = [Path(__file__).parents[2] / name for name in ("model", "pallas_kernels")]  # the code that prepares them


def prepared_file(folder: Path | None, weights: ChosenWeights | ChosenHead, chips: ModelOnChips) -> Path | None:
    """The file of these weights in the form of `chips.planned`, there or not: another one for each content, form and
    version of the code. None: they are not kept. Those are random weights, those of a bucket and those of a head that
    drafts.

    Args:
        folder: of the files of all weights; None: none are kept.
    """
    if folder is None or not chips.form["for_cpu"] or not isinstance(weights, ChosenWeights) or weights.stored is None:
        return None
    import jax
    from flax import nnx

    from model.compiling.traced_programs import fingerprint
    from model.loading.prepared_weights import SUFFIX
    from model.loading.weights_digest import files_of

    files = files_of(weights.stored)
    local = [file.resolve() for file in files if isinstance(file, Path)]
    if len(local) < len(files):
        return None
    shapes = [
        (path, value.shape, str(value.dtype))
        for path, variable in nnx.to_flat_state(nnx.state(chips.planned))
        for value in [variable.get_value()]
    ]
    facts = (weights.stored, sorted(chips.form.items()), shapes, sorted(map(_version, local)))
    return folder / f"{fingerprint(_PACKAGES, facts, jax.devices()[0])}{SUFFIX}"


def _version(file: Path) -> tuple[Any, ...]:
    """What changes with the file's content."""
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
