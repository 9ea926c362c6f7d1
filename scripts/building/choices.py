"""The choices of a start, from the flags, the checkpoint and the device. Each choice comes with its reason as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batcher.buckets import BucketLadder
    from batcher.step import Bucket
    from model.config import LlamaConfig
    from model.loading.stored_weights import StoredWeights
    from model.quantization.forms import Rounding, WeightForm
    from pallas_kernels.spec import Backend

STEP_TIMEOUT_S = 30.0  # on a chip; programs have been run once before the first step


def choose_dtype(
    asked: str, checkpoint_dtype: str | None, platform: str, stored: Sequence[str] = ()
) -> tuple[str, str]:
    """The dtype of the computation, and the reason for it as text.

    Args:
        asked: the value of --dtype.
        checkpoint_dtype: the dtype of the conversion for a converted checkpoint, and otherwise that in `config.json`.
            If there is none, the common dtype of all tensors; None: they differ.
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
    asked: str | None,
    stored: StoredWeights | None,
    config: LlamaConfig,
    *,
    reads: Set[str],
    rounded_rows: Mapping[str, int],
) -> tuple[WeightForm | None, str | None]:
    """The stored form of the projections and the head (None: the computation's dtype), and a remark for the report.

    A packed checkpoint is kept in its form if there is such a form here and the chip reads it fast. Otherwise, and for
    any other form that the chip does not read fast, the form is int8.

    Args:
        reads: the chip's field of this name (`pallas_kernels.chips`).
        rounded_rows: the chip's field of this name. A form that the chip multiplies with any number of rounded rows
            need not be in `reads`, unless the checkpoint's activations are exact.

    Raises:
        ValueError: a converted checkpoint has another form than `asked`, or one that the chip reads slowly. Or the
            model's sizes have no common groups for int4.
    """
    from model.quantization.forms import Activations, EightBit, described, form_named

    if stored is None or stored.activations not in (Activations.EXACT, Activations.BLOCKS):
        reads = reads | {kind for kind, rows in rounded_rows.items() if rows == 1}
    held = None if stored is None else stored.quantization
    kept = None
    if stored is not None:
        is_exact = stored.exact_form is not None and stored.exact_form.product in reads
        kept = stored.exact_form if is_exact else stored.four_bit
    if asked is None:
        form = kept if kept is not None and kept.product in reads else held
    else:
        form = next((has for has in (held, kept) if has is not None and has.kind == asked), None)
        form = form or form_named(asked, config.projection_inputs)
    if stored is not None and stored.is_converted:
        if form != held:
            raise ValueError(f"--quantization {asked}: the checkpoint was converted to {held or 'none'}; convert again")
        if form is not None and form.product not in reads:
            raise ValueError(
                f"the checkpoint was converted to {form.kind}, which this device reads slowly: convert again with "
                f"--quantization int8"
            )
        return form, None if form is None else f"{described(form)}, as converted"
    if form is None:
        return None, None
    if form.product in reads:
        chosen, reason = form, ""
    else:
        chosen, reason = EightBit.INT8, f", not {form.kind}: this device reads that slowly"
    if stored is None or stored.packing is None:
        rounded = ", each weight rounded to nearest" if chosen.in_head != chosen else ""
        return chosen, described(chosen) + rounded + reason + (f"; the checkpoint holds {held}" if held else "")
    if chosen == kept:
        return chosen, f"{stored.packing} checkpoint, kept: {described(chosen)}"
    if kept is None and stored.four_bit_fault is not None and "int4" in reads and asked in (None, "int4"):
        reason = f", not kept in 4 bits: {stored.four_bit_fault}"
    return chosen, f"{stored.packing} checkpoint, requantised: {described(chosen)}{reason}"


def choose_rounding(
    form: WeightForm | None, stored: StoredWeights | None, *, reads: Set[str], rounded_rows: Mapping[str, int]
) -> tuple[Rounding | None, str | None]:
    """How the inputs of projections of `form` are rounded (None: not at all), and a remark for the report.

    Inputs are not rounded if the chip has no product of the form with rounded inputs, or if the checkpoint's
    activations are exact. For a GGUF file they are rounded on CPUs, and so are the inputs of its head, as in llama.cpp:
    in blocks with int4 and int6. For a checkpoint with quantised activations they are rounded with any number of rows.
    For other checkpoints the chip's field `rounded_rows` has the least number of rows.

    Args:
        reads: the chip's field of this name (`pallas_kernels.chips`). If the form is not in it, the head's inputs are
            rounded, too.
        rounded_rows: the chip's field of this name.
    """
    from model.quantization.forms import Activations, EightBit, FourBit, Rounding

    stated = None if stored is None else stored.activations
    if form is None or form.kind not in rounded_rows or stated is Activations.EXACT:
        return None, None
    if stated is Activations.BLOCKS and FourBit.kind not in rounded_rows:
        return None, None
    in_blocks = not isinstance(form, EightBit)
    is_static = stated is Activations.STATIC and stored is not None and form is stored.quantization
    rounding = Rounding(
        min_rows=rounded_rows[form.kind] if stated is None else 1,
        is_static=is_static,
        with_head=form.kind not in reads or stated is Activations.BLOCKS,
    )
    scales = "with the checkpoint's scales" if is_static else "each token with its own scale"
    scales = "each block of a token with its own scale" if in_blocks else scales
    steps = f" in steps of {rounding.min_rows} tokens or more" if rounding.min_rows > 1 else ""
    products = "projections and of the head" if rounding.with_head else "projections"
    return rounding, f"inputs of {products} are rounded to {'int8' if in_blocks else form}, too, {scales}{steps}"


def choose_kv_dtype(
    asked: str, dtype: str, backend: Backend, arch: tuple[int, int] | None = None
) -> tuple[str, str | None]:
    """The dtype of the K/V pages, and a remark if it is not the requested one.

    Args:
        asked: the value of --kv-cache-dtype.
        dtype: the dtype of the computation.
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


def chip_products(platform: str) -> dict[str, Any]:
    """The fields `reads` and `rounded_rows` of the attached devices (`pallas_kernels.chips`).

    They do not depend on the attention backend. So `--attention-backend reference` rounds the same numbers as a CPU's
    C code, and the two can be compared. XLA's own products of int8 with int8 are slow.
    """
    import jax

    from pallas_kernels.chips import CPU_READS, CPU_ROUNDED_ROWS, TPUS, XLA_READS, arch_reads, arch_rounded_rows

    of_xla: dict[str, Any] = {"reads": XLA_READS, "rounded_rows": {}}
    if platform == "gpu":
        major, minor = map(int, jax.devices()[0].compute_capability.split("."))
        return {"reads": arch_reads((major, minor)), "rounded_rows": arch_rounded_rows((major, minor))}
    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        chip = TPUS.get(this_chip())
        return {"reads": chip.reads, "rounded_rows": chip.rounded_rows} if chip else of_xla
    from pallas_kernels.cpu.library import find_compiler
    from pallas_kernels.spec import UnavailableError

    try:
        find_compiler()
    except UnavailableError:  # XLA's loops read int8 fastest with inputs as they are; the start says what is missing
        return of_xla
    return {"reads": CPU_READS, "rounded_rows": CPU_ROUNDED_ROWS}


def choose_deferred_programs(ladder: BucketLadder, platform: str, *, all_first: bool, num_hosts: int) -> list[Bucket]:
    """The programs that may be compiled while the engine serves.

    On a chip there are none, because a GPU's compiler times kernels on the chip, and a program that does not fit must
    be an error at the start. On several hosts there are none, because the leader does not know which programs the
    others have.
    """
    if platform != "cpu" or all_first or num_hosts > 1:
        return []
    first = set(ladder.needed_first())
    return [bucket for bucket in ladder.buckets() if bucket not in first]


def choose_step_timeout(asked: float | None, platform: str) -> float | None:
    """The least seconds after which a step counts as stuck; None: a step may take any time. This is a CPU's default,
    because a long prompt of a large model may take minutes there."""
    seconds = (0.0 if platform == "cpu" else STEP_TIMEOUT_S) if asked is None else asked
    return seconds or None
