"""The choices of a start, from the flags, the checkpoint and the device. Each has its reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.loading.stored_weights import StoredWeights
    from model.quantization.forms import EightBit
    from pallas_kernels.spec import Backend

STEP_TIMEOUT_S = 30.0  # on a chip; programs have been run once before the first step


def choose_dtype(
    asked: str, checkpoint_dtype: str | None, platform: str, stored: Sequence[str] = ()
) -> tuple[str, str]:
    """The dtype of the computation, and the reason for it in words.

    Args:
        checkpoint_dtype: of a converted checkpoint, the dtype of the conversion. Otherwise the dtype in `config.json`;
            if it has none, the common dtype of all tensors; None if they differ.
        stored: the types of the tensors, if they are known.
    """
    if asked != "auto":
        return asked, "as asked for"
    own = "the checkpoint's own"
    if stored and tuple(stored) != (checkpoint_dtype,):
        own = f"as config.json says; the tensors are {' and '.join(stored)}"
    if platform == "cpu":
        if checkpoint_dtype == "float32":
            return "float32", own
        return "float32", "the CPU's default; --dtype bfloat16 takes half, and is faster on CPUs with bfloat16 units"
    if checkpoint_dtype in ("bfloat16", "float32"):
        return checkpoint_dtype, own
    held = " and ".join(stored) or checkpoint_dtype
    if held is None:
        return "bfloat16", "the checkpoint does not say"
    return "bfloat16", f"its {held} is rounded to it; --dtype float32 keeps every value"


def choose_quantization(
    asked: str | None, stored: StoredWeights | None, *, reads_fp8: bool
) -> tuple[EightBit | None, str | None]:
    """The stored form of the projections and the head (None: the computation's dtype), and a remark for the report.

    Args:
        reads_fp8: whether the chip converts fp8 as fast as it reads it, see `chips`.

    Raises:
        ValueError: a converted checkpoint has another form than `asked`, or a form that the chip reads slowly.
    """
    from model.quantization.forms import EightBit

    held = None if stored is None else stored.quantization
    form = held if asked is None else EightBit(asked)
    if stored is not None and stored.is_converted:
        if form is not held:
            raise ValueError(f"--quantization {asked}: the checkpoint was converted to {held or 'none'}; convert again")
        if form is EightBit.FP8 and not reads_fp8:
            raise ValueError(
                "the checkpoint was converted to fp8, which this device reads no faster than bfloat16: convert again "
                "with --quantization int8"
            )
        return form, form and f"projections and head are {form}, as converted"
    if form is None:
        return None, None
    chosen = EightBit.INT8 if form is EightBit.FP8 and not reads_fp8 else form
    reason = f", not {form}: this device reads that slowly" if chosen is not form else ""
    if stored is not None and stored.packing is not None:
        return chosen, f"{stored.packing} checkpoint: requantised to {chosen} per row{reason}"
    return chosen, f"projections and head in {chosen}{reason}" + (f"; the checkpoint holds {held}" if held else "")


def choose_kv_dtype(
    asked: str, dtype: str, backend: Backend, arch: tuple[int, int] | None = None
) -> tuple[str, str | None]:
    """The dtype of the K/V pages, and a remark if it is not the requested one.

    Args:
        dtype: of the computation.
        arch: the compute capability of a GPU that is not attached.
    """
    if asked == "auto":
        return dtype, None
    if asked == "int8":
        return "int8", None
    if not backend.startswith("gpu"):
        return "int8", f"not {asked}: int8 is the 8-bit type of the {backend} attention"
    from pallas_kernels.chips import arch_converts_fp8

    if arch is None:
        from pallas_kernels.gpu import device

        arch = device.current().arch
    if arch_converts_fp8(arch):
        return "float8_e4m3fn", None
    return "int8", f"not {asked}: this GPU has no instruction that converts fp8"


def choose_model_len(asked: int | None, trained: int) -> int:
    """The context length in tokens. Raises ValueError if it exceeds the length that the model was trained for."""
    if asked is not None and asked > trained:
        raise ValueError(f"--max-model-len {asked} is more than the {trained} tokens that the model was trained for")
    return asked or trained


def reads_fp8(platform: str) -> bool:
    """Whether the attached devices convert fp8 as fast as they read it."""
    import jax

    from pallas_kernels.chips import TPUS, arch_reads_fp8

    if platform == "gpu":
        major, minor = jax.devices()[0].compute_capability.split(".")
        return arch_reads_fp8((int(major), int(minor)))
    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        return TPUS[this_chip()].reads_fp8
    return False


def choose_step_timeout(asked: float | None, platform: str) -> float | None:
    """The least seconds that a step is given before the device counts as stuck; None: any time. By default a CPU has
    any time: a long prompt of a large model may take minutes there."""
    seconds = (0.0 if platform == "cpu" else STEP_TIMEOUT_S) if asked is None else asked
    return seconds or None
