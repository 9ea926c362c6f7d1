"""Chooses the weights of an engine: their place, the type of the computation, their stored form and the end tokens.

Each choice comes with its reason as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax

from model.config import LlamaConfig
from model.loading.merged import weights_of
from model.loading.source import ModelSource
from model.loading.stored_weights import StoredWeights
from model.loading.weights import random_weights
from model.network.llama import Llama
from model.quantization.checkpoint_form import STORED_METHODS
from model.quantization.forms import Activations, EightBit, FourBit, Rounding, WeightForm, described, form_named
from pallas_kernels.chips import CPU_READS, CPU_ROUNDED_ROWS, TPUS, XLA_READS, arch_reads, arch_rounded_rows
from pallas_kernels.cpu.library import find_compiler
from pallas_kernels.errors import UnavailableError
from scripts.flags.settings import EngineSettings
from server.text.named_tokens import read_named_tokens

# The names of Llama 3 and ChatML. An added token of such a name ends a text, a message or a turn in every model.
NAMES = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>")
_MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class EndToken:
    """A token that ends an answer."""

    id: int
    text: str | None  # None: the tokenizer has no name for it
    origin: str  # the file or rule that makes it an end token, in words

    def __str__(self) -> str:
        return f"{self.id if self.text is None else self.text} ({self.origin})"


@dataclass(frozen=True, kw_only=True)
class ChosenWeights:
    """Weights that are found and checked, but not loaded yet."""

    source: ModelSource
    end_tokens: tuple[EndToken, ...]
    stored: StoredWeights | None  # None: they are random
    config: LlamaConfig  # the checkpoint's own
    dtype: str  # the dtype of the computation
    quantization: WeightForm | None  # the form of the projections and the head
    rounding: Rounding | None  # how the inputs of these are rounded
    dtype_reason: str
    quantization_remark: str | None
    rounding_remark: str | None
    seed: int  # for random weights

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.end_tokens)

    def load(self, form: dict[str, Any]) -> Llama:
        """The model in the form of a `ModelOnChips`, with its weights."""
        if self.stored is not None:
            return self.stored.load(**form)
        return random_weights(self.config, **form, seed=self.seed)

    def remarks(self) -> Iterator[str]:
        origin = "nowhere (random)" if self.stored is None else self.source.weights
        yield f"of weights from {origin}, as {self.dtype} ({self.dtype_reason})"
        yield from filter(None, (self.quantization_remark, self.rounding_remark, self.stored and self.stored.remark))


def choose_weights(settings: EngineSettings, platform: str, tokenizer: Path | None = None) -> ChosenWeights:
    """Finds the model's weights. Raises ValueError if there are none, or they cannot be used as the settings say.

    Args:
        tokenizer: the argument of `find_end_tokens`.
    """
    source = settings.source()
    if settings.quantization in STORED_METHODS and source.quant_method != settings.quantization:
        held = source.quant_method or "not quantised"
        raise ValueError(f"--quantization {settings.quantization}: the checkpoint is {held}; leave the flag out")
    stored = None if settings.load_format == "dummy" else weights_of(source, settings.load_format)
    config = source.config if stored is None else stored.config
    dtypes = () if stored is None else stored.dtypes
    dtype, reason = choose_dtype(settings.dtype, config.checkpoint_dtype, platform, dtypes)
    chip = chip_products(platform)
    quantization, remark = choose_quantization(settings.weight_form, stored, config, **chip)
    rounding, rounding_remark = choose_rounding(quantization, stored, **chip)
    return ChosenWeights(
        source=source,
        end_tokens=find_end_tokens(source, tokenizer),
        stored=stored,
        config=config,
        dtype=dtype,
        quantization=quantization,
        rounding=rounding,
        dtype_reason=reason,
        quantization_remark=remark,
        rounding_remark=rounding_remark,
        seed=settings.seed or 0,
    )


def check_alike(weights: ChosenWeights, own: ChosenWeights, name: str) -> None:
    """Raises ValueError if the programs for `own` do not compute with `weights`, those of the model `name`."""
    if difference := unlike(weights, own):
        raise ValueError(
            f"model {name!r}: it is not a model of the same shapes: {difference}; alone, as --model, it may be served"
        )


def unlike(weights: ChosenWeights, own: ChosenWeights) -> str:
    """Why the programs for `own` do not compute with `weights`; "" if they do."""
    pairs = {"config": (_shapes(weights.config), _shapes(own.config))}
    pairs |= {field: (getattr(weights, field), getattr(own, field)) for field in ("dtype", "quantization", "rounding")}
    differing = (f"{field} {_differing(ours, theirs)}" for field, (theirs, ours) in pairs.items() if theirs != ours)
    return next(differing, "")


def _shapes(config: LlamaConfig) -> LlamaConfig:
    """The config without the fields that decide only how its files are read."""
    fields: dict[str, Any] = dict.fromkeys(("checkpoint_dtype", "bos_token_id", "quantized"))
    return replace(config, eos_token_ids=(), kv_scale_type=EightBit.FP8, **fields)


def _differing(old: object, new: object) -> str:
    """The values that differ, in words."""
    if not is_dataclass(old) or not is_dataclass(new):
        return f"is {new} and was {old}"
    names = [field.name for field in fields(old) if getattr(old, field.name) != getattr(new, field.name)]
    return ", ".join(f"{name} is {getattr(new, name)} and was {getattr(old, name)}" for name in names)


def bits_of_a_weight(form: WeightForm | None, dtype: str) -> int:
    """The bits of a weight of the projections in `form`. With None the weights are stored in `dtype`."""
    if form is None:
        return 32 if dtype == "float32" else 16
    return form.bits


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
        return "float32", "the CPU's default; with --dtype bfloat16 what is not quantised takes half"
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
        chosen, reason = form.in_int8, f", not {form.kind}: this device reads that slowly"
    if stored is None or stored.packing is None:
        rounded = ", each weight rounded to nearest" if chosen.bits < 8 else ""
        holds = f"; the checkpoint holds {held.in_words()}" if held else ""
        return chosen, described(chosen) + rounded + reason + holds
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
    in blocks, if the form has groups. For a checkpoint with quantised activations they are rounded with any number of
    rows. For other checkpoints the chip's field `rounded_rows` has the least number of rows.

    Args:
        reads: the chip's field of this name (`pallas_kernels.chips`). If the form is not in it, the head's inputs are
            rounded, too.
        rounded_rows: the chip's field of this name.
    """
    stated = None if stored is None else stored.activations
    if form is None or form.kind not in rounded_rows or stated is Activations.EXACT:
        return None, None
    if stated is Activations.BLOCKS and FourBit.kind not in rounded_rows:
        return None, None
    in_blocks = form.is_grouped
    is_static = stated is Activations.STATIC and stored is not None and form == stored.quantization
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


def chip_products(platform: str) -> dict[str, Any]:
    """The fields `reads` and `rounded_rows` of the attached devices (`pallas_kernels.chips`).

    They do not depend on the attention backend. So `--attention-backend reference` rounds the same numbers as a CPU's
    C code, and the two can be compared. XLA's own products of int8 with int8 are slow.
    """
    of_xla: dict[str, Any] = {"reads": XLA_READS, "rounded_rows": {}}
    if platform == "gpu":
        major, minor = map(int, jax.devices()[0].compute_capability.split("."))
        return {"reads": arch_reads((major, minor)), "rounded_rows": arch_rounded_rows((major, minor))}
    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip  # it imports Mosaic

        chip = TPUS.get(this_chip())
        return {"reads": chip.reads, "rounded_rows": chip.rounded_rows} if chip else of_xla
    try:
        find_compiler()
    except UnavailableError:  # XLA's loops read int8 fastest with inputs as they are; the start says what is missing
        return of_xla
    return {"reads": CPU_READS, "rounded_rows": CPU_ROUNDED_ROWS}


def find_end_tokens(source: ModelSource, tokenizer: Path | None = None) -> tuple[EndToken, ...]:
    """Every end token of a model, each id once.

    As in vLLM these are the ids of `generation_config.json`, or else of `config.json`, and the tokenizer's `eos_token`,
    because a fine-tune of a base model often changes only the tokenizer. As in llama.cpp the tokens of `NAMES` are end
    tokens, too, because many fine-tunes use a template whose end-of-turn token is in no file.

    Args:
        tokenizer: a folder or a GGUF file; None: the model's own.

    Raises:
        ValueError: the tokenizer's files cannot be read.
    """
    path = tokenizer or source.tokenizer
    named = None if path is None else read_named_tokens(path)
    added = {} if named is None else named.added
    texts = {id: text for text, id in added.items()}
    found = [(id, texts.get(id), source.eos_origin) for id in source.eos_token_ids]
    if named is not None and named.eos is not None:
        eos_token, eos_id = named.eos
        found.append((eos_id, eos_token, "the tokenizer's eos_token"))
    found += [(added[name], name, "its name") for name in NAMES if name in added]
    first: dict[int, EndToken] = {}
    for id, text, origin in found:
        if 0 <= id < source.config.vocab_size:  # the model never draws another one
            first.setdefault(id, EndToken(id=id, text=text, origin=origin))
    return tuple(first.values())


def listed(tokens: Sequence[EndToken]) -> str:
    """The end tokens and their origins as text, for the report of the start."""
    if not tokens:
        return "none: an answer ends at max_tokens or at a stop string"
    more = f" and {len(tokens) - _MOST_SHOWN} more" if len(tokens) > _MOST_SHOWN else ""
    return ", ".join(map(str, tokens[:_MOST_SHOWN])) + more
