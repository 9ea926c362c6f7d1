"""The choices of a start, from the flags, the checkpoint and the device. Each has its reason in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batcher.buckets import BucketLadder
    from batcher.step import Bucket
    from model.config import LlamaConfig
    from model.loading.stored_weights import StoredWeights
    from model.quantization.forms import FourBit, Rounding, WeightForm
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
    asked: str | None,
    stored: StoredWeights | None,
    config: LlamaConfig,
    *,
    reads_fp8: bool,
    rounded_rows: Mapping[str, int],
    reads_int4: bool = False,
) -> tuple[WeightForm | None, str | None]:
    """The stored form of the projections and the head (None: the computation's dtype), and a remark for the report.

    A checkpoint in 4 bits is kept so if the chip reads int4, and if the 4-bit form holds it.

    Args:
        reads_fp8: whether the chip converts fp8 as fast as it reads it, see `chips`.
        rounded_rows: of the chip, see `chips`. If it multiplies any number of rows in fp8, it need not convert fp8,
            unless the checkpoint's activations are exact.
        reads_int4: whether the chip dequantises int4 in groups inside a product, see `chips`.

    Raises:
        ValueError: a converted checkpoint has another form than `asked`, or a form that the chip reads slowly. Or the
            model's sizes have no common groups for int4.
    """
    from model.quantization.forms import INT4, Activations, EightBit, FourBit, form_named

    can_round = stored is None or stored.activations is not Activations.EXACT
    reads_fp8 = reads_fp8 or (can_round and rounded_rows.get(EightBit.FP8) == 1)
    held = None if stored is None else stored.quantization
    kept = None if stored is None else stored.four_bit
    if asked == INT4 and isinstance(held, FourBit):
        form: WeightForm | None = held
    elif asked is not None:
        form = kept if asked == INT4 and kept else form_named(asked, config.projection_inputs)
    else:
        form = kept if kept and reads_int4 else held
    if stored is not None and stored.is_converted:
        if form != held:
            raise ValueError(f"--quantization {asked}: the checkpoint was converted to {held or 'none'}; convert again")
        if form is EightBit.FP8 and not reads_fp8:
            raise ValueError(
                "the checkpoint was converted to fp8, which this device reads no faster than bfloat16: convert again "
                "with --quantization int8"
            )
        if isinstance(form, FourBit) and not reads_int4:
            raise ValueError(
                "the checkpoint was converted to int4, which this device does not read inside its products: convert "
                "again with --quantization int8"
            )
        if isinstance(form, FourBit):
            return form, f"projections are {form.in_words()}, and the head is int8, as converted"
        return form, form and f"projections and head are {form}, as converted"
    if form is None:
        return None, None
    if isinstance(form, FourBit) and reads_int4:
        return form, _four_bit_remark(form, stored)
    reason = ""
    chosen = form
    if isinstance(form, FourBit) or (form is EightBit.FP8 and not reads_fp8):
        chosen = EightBit.INT8
        reason = f", not {INT4 if isinstance(form, FourBit) else form}: this device reads that slowly"
    if stored is not None and stored.packing is not None:
        if asked is None and reads_int4 and stored.four_bit_fault is not None:
            reason = f", not kept as {INT4}: {stored.four_bit_fault}"
        return chosen, f"{stored.packing} checkpoint: requantised to {chosen} per row{reason}"
    return chosen, f"projections and head in {chosen}{reason}" + (f"; the checkpoint holds {held}" if held else "")


def _four_bit_remark(form: FourBit, stored: StoredWeights | None) -> str:
    if stored is None or stored.packing is None:
        held = "" if stored is None or stored.quantization is None else f"; the checkpoint holds {stored.quantization}"
        return f"projections in {form.in_words()}, each weight rounded to nearest; the head in int8{held}"
    if form == stored.four_bit:
        return f"{stored.packing} checkpoint: projections kept in {form.in_words()}; the head in int8"
    return f"{stored.packing} checkpoint: requantised to {form.in_words()}; the head in int8 ({stored.four_bit_fault})"


def choose_rounding(
    form: WeightForm | None, stored: StoredWeights | None, *, reads_fp8: bool, rounded_rows: Mapping[str, int]
) -> tuple[Rounding | None, str | None]:
    """How the inputs of projections of `form` are rounded (None: not at all), and a remark for the report.

    With 4-bit weights they are not. A checkpoint whose activations are exact keeps them so. One whose activations are
    quantised is computed as it is written, for any number of rows. For others the chip decides by the rows of the step.

    Args:
        reads_fp8: whether the chip converts fp8 as fast as it reads it. Otherwise the head's inputs are rounded, too.
        rounded_rows: of the chip, see `chips`.
    """
    from model.quantization.forms import Activations, EightBit, Rounding

    stated = None if stored is None else stored.activations
    if not isinstance(form, EightBit) or form not in rounded_rows or stated is Activations.EXACT:
        return None, None
    is_static = stated is Activations.STATIC and stored is not None and form is stored.quantization
    rounding = Rounding(
        min_rows=rounded_rows[form] if stated is None else 1,
        is_static=is_static,
        with_head=form is EightBit.FP8 and not reads_fp8,
    )
    scales = "with the checkpoint's scales" if is_static else "each token with its own scale"
    steps = f" in steps of {rounding.min_rows} tokens or more" if rounding.min_rows > 1 else ""
    return rounding, f"inputs of projections are rounded to {form}, too, {scales}{steps}"


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


def eight_bit_products(platform: str) -> dict[str, Any]:
    """The attached devices' `reads_fp8` and `rounded_rows`, as `chips` has them.

    They do not depend on the attention backend. So `--attention-backend reference` rounds the same numbers as a CPU's
    C code, to be compared with it. XLA's own products of int8 with int8 are slow.
    """
    import jax

    from pallas_kernels.chips import CPU_ROUNDED_ROWS, TPUS, arch_reads_fp8, arch_rounded_rows

    if platform == "gpu":
        major, minor = map(int, jax.devices()[0].compute_capability.split("."))
        return {"reads_fp8": arch_reads_fp8((major, minor)), "rounded_rows": arch_rounded_rows((major, minor))}
    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        chip = TPUS[this_chip()]
        return {"reads_fp8": chip.reads_fp8, "rounded_rows": chip.rounded_rows}
    from pallas_kernels.cpu.library import find_compiler
    from pallas_kernels.spec import UnavailableError

    try:
        find_compiler()
    except UnavailableError:  # XLA's loops read int8 fastest with inputs as they are; the start says what is missing
        return {"reads_fp8": False, "rounded_rows": {}}
    return {"reads_fp8": False, "rounded_rows": CPU_ROUNDED_ROWS}


def reads_int4(platform: str) -> bool:
    """Whether the attached devices dequantise int4 in groups inside a product, as `chips` has it."""
    import jax

    from pallas_kernels.chips import TPUS, arch_reads_int4

    if platform == "gpu":
        major, minor = map(int, jax.devices()[0].compute_capability.split("."))
        return arch_reads_int4((major, minor))
    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        return TPUS[this_chip()].reads_int4
    return False


def choose_deferred_programs(ladder: BucketLadder, platform: str, *, all_first: bool, num_hosts: int) -> list[Bucket]:
    """The programs that may be compiled while the engine serves.

    A chip has none: a GPU's compiler times kernels on the chip, and a program that does not fit must be an error at the
    start. Several hosts have none: the leader does not know which programs the others have.
    """
    if platform != "cpu" or all_first or num_hosts > 1:
        return []
    first = set(ladder.needed_first())
    return [bucket for bucket in ladder.buckets() if bucket not in first]


def choose_step_timeout(asked: float | None, platform: str) -> float | None:
    """The least seconds that a step is given before the device counts as stuck; None: any time. By default a CPU has
    any time: a long prompt of a large model may take minutes there."""
    seconds = (0.0 if platform == "cpu" else STEP_TIMEOUT_S) if asked is None else asked
    return seconds or None
