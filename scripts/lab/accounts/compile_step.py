"""Compiles whole steps of a model for chips that are not here, as the runner would, and prints what the compiler says.

    python -m scripts.lab.accounts.compile_step --target v6e:1x1 --tokens 64 --tokens 2048 --quantization int8
    python -m scripts.lab.accounts.compile_step --target 8xh200 --preset llama-3.1-70b --kv-cache-dtype fp8
    python -m scripts.lab.accounts.compile_step --target v6e:1x1 --rows 8 --drafts eagle3 --drafts llama-3.2-1b:int8

It prints a JSON object for each step: for each `--tokens` (without it, a decode of `--rows`), or for the decode without
drafts (not with `--drafts-only`) and with each `--drafts`.

Bytes are those of one device. `alias_bytes` are updated in place, of `state_bytes`, of which the model's pages have
`kv_bytes`. `temp_bytes` are what the program writes besides its results; `dequantized_copies` are quantised weights
among them, in a wider type. `weights_read` and `kv_read` are counted, not compiled: the bytes that must be read in a
decode of the rows with `--context` tokens each; with drafts, the weights are those of all passes, but the K/V are the
model's alone. `of_plain` are the weights read for each token that a row gains at `--acceptance`, next to the plain
step.

TPUs: `exchanges` counts those between chips outside of loops; those with `-start` run next to other operations.
`product_cycles` and `glue_cycles` are those of one layer, see `glue`; null if one layer only is compiled.
`stores_logits` and `narrows_maxima` are about the pass that finds the greedy token (`model.sampling.greedy`).

GPUs: `command_buffers` are CUDA graphs; `inside` and `outside` count what runs in them and what is launched one by one
(`kCustomCall` are the attention kernels). `copies` are the copies that XLA put in, `copied_arguments` the temporaries
with the shape of a weight or of the K/V pages, `kv_writes` the kernels that write to pages. `kernels` are Mosaic's,
which spill `spill_bytes`. `moving_commands` refer to buffers with a new address in each step, and so does each of
`moving_kernels`. Matrix products are not autotuned without the chip: this says nothing about their speed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from batcher.step import Bucket, PackedLayout, Variant
from model.compiling.compiler_options import compiler_options
from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.execution.memory_plan import RunnerConfig, weights_bytes
from model.execution.step_programs import StepPrograms
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.packed import pack_for_tpu
from model.network.sharding import abstract_head, abstract_model, make_mesh
from model.presets import preset as preset_named
from model.quantization.forms import Rounding, form_named
from pallas_kernels.api import PagedAttention
from pallas_kernels.chips import GpuChip, TpuChip
from pallas_kernels.spec import Backend
from scripts.building.attention_backend import paged_attention
from scripts.building.weights import choose_rounding
from scripts.lab.accounts import gpu_report
from scripts.lab.accounts.dequantized_copies import find, quantized_kernels, told_apart
from scripts.lab.accounts.glue import layer_cycles
from scripts.lab.accounts.gpu_addresses import read_moving
from scripts.lab.accounts.specs import KV_DTYPES
from scripts.lab.accounts.targets import target_named

PAGE_SIZES = {"tpu": 128, "gpu": 64}
NUM_PAGES = {"tpu": 511, "gpu": 8191}  # besides the null page
# On GPUs different from the rows of a step: copies of an argument are recognised by their shape.
NUM_SLOTS = {"tpu": 64, "gpu": 256}
MAX_TOKENS, DRAFT_PASS_TOKENS = 2048, 256  # of a step with drafts
EAGLE3_VOCAB = 32_000  # of the public heads
MIB = 1 << 20
HLO_NAMES = {"bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "int8": "s8"}
EXCHANGES = r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="v6e:2x4; h200, 8xh200")
    parser.add_argument(
        "--tensor-parallel-size", type=int, help="devices over which the model is split (default: all of the target)"
    )
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="compile this many only")
    parser.add_argument("--quantization", help="of the weights: int8, fp8, int4, int4-g128-zeros, int4-g16-nvfp4")
    parser.add_argument("--rounded-rows", type=int, help="products of so many rows or more round their inputs")
    parser.add_argument("--rounded-head", action="store_true", help="and so does the head")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="of the pages (auto: bfloat16)")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, action="append", help="of a mixed step; may be given again")
    parser.add_argument("--drafts", action="append", default=[], help="eagle, eagle3, PRESET, PRESET:int8")
    parser.add_argument("--drafts-only", action="store_true", help="without the step that has no drafts")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7, help="of each draft after right ones")
    parser.add_argument("--variant", type=Variant, default=Variant.GREEDY, choices=[Variant.GREEDY, Variant.SAMPLE])
    parser.add_argument("--max-loras", type=int, default=0, help="slots of LoRA adapters (0: a step without any)")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--attention", choices=("own", "jax"), default="own", help="jax: the kernel that JAX ships")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each row, for the bytes that are read")
    parser.add_argument("--num-pages", type=int, help=f"besides the null page (default: {NUM_PAGES})")
    parser.add_argument("--max-num-seqs", type=int, help=f"request slots (default: {NUM_SLOTS})")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--options", type=json.loads, default={}, help="XLA's options besides the server's, as JSON")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write the last program there")
    flags = vars(parser.parse_args())
    all_drafts, drafts_only, sizes = flags.pop("drafts"), flags.pop("drafts_only"), flags.pop("tokens")
    for drafts in all_drafts if drafts_only else (None, *all_drafts):
        for tokens in sizes or [None]:
            print(json.dumps(compile_step(**flags, tokens=tokens, drafts=drafts)), flush=True)


def compile_step(
    *,
    target: str,
    preset: str,
    tensor_parallel_size: int | None = None,
    layers: int | None = None,
    quantization: str | None = None,
    rounded_rows: int | None = None,
    rounded_head: bool = False,
    kv_cache_dtype: str = "auto",
    rows: int = 64,
    tokens: int | None = None,
    drafts: str | None = None,
    num_drafts: int = 3,
    acceptance: float = 0.7,
    variant: Variant = Variant.GREEDY,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    attention: str = "own",
    context: int = 2048,
    num_pages: int | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int = 8192,
    options: dict[str, Any] | None = None,
    dump: Path | None = None,
) -> dict[str, Any]:
    """The account of one step, see above. Its arguments are the command's flags.

    Raises:
        ValueError: there is no such target, preset or form of weights.
    """
    chips = target_named(target)
    platform, devices = chips.platform, chips.devices()[:tensor_parallel_size]
    mesh = make_mesh(tensor_parallel_size or len(devices), devices)
    config = preset_named(preset)
    config = replace(config, num_layers=layers or config.num_layers)
    rounding = None if rounded_rows is None else Rounding(min_rows=rounded_rows, with_head=rounded_head)
    form = form_named(quantization, config.projection_inputs) if quantization else None
    model = abstract_model(config, dtype=jnp.bfloat16, mesh=mesh, quantization=form, rounding=rounding)
    network = None if drafts is None else _network(drafts, model.config, mesh, chips.chip)
    if platform == "tpu":
        pack_for_tpu(model, mesh)

    def attention_of(config: LlamaConfig, kv_dtype: str) -> PagedAttention:
        page_size = PAGE_SIZES[platform]
        return paged_attention(
            config, Backend(platform), dtype="bfloat16", kv_dtype=kv_dtype, page_size=page_size, mesh=mesh
        )

    own = attention_of(model.config, KV_DTYPES[kv_cache_dtype])
    if attention == "jax":
        own = replace(own, backend=Backend.TPU_JAX)
    count = 0 if network is None else num_drafts
    bucket = Bucket(
        num_tokens=tokens or rows * (1 + count),
        num_rows=rows,
        variant=variant,
        num_drafts=count,
        has_adapters=max_loras > 0,
    )
    limits = RunnerConfig(
        max_num_seqs=max(rows, max_num_seqs or NUM_SLOTS[platform]), max_model_len=max_model_len,
        max_num_batched_tokens=max(MAX_TOKENS, bucket.num_tokens), draft_pass_tokens=DRAFT_PASS_TOKENS,
        max_loras=max_loras, max_lora_rank=max_lora_rank,
    )  # fmt: skip
    draft = None if network is None else (network, attention_of(network.config, "bfloat16"))
    num_pages = num_pages or NUM_PAGES[platform]
    programs = StepPrograms(model, own, limits, num_pages, draft)
    program = programs.step(bucket)
    moving = {PackedLayout(bucket).size, programs.output_layout(bucket).size + 1}
    state: Any = programs.state_like  # described, not allocated
    xla = compiler_options(platform) | (options or {})
    with chips.compiling(mesh), tempfile.TemporaryDirectory() as folder:
        if platform == "gpu":
            xla |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
        begin, begin_cpu = time.perf_counter(), time.process_time()
        lowered = program.as_read().lower()
        traced = time.perf_counter()
        compiled, spills = gpu_report.spills_of(lambda: lowered.compile(compiler_options=xla))
        seconds = {
            "trace_s": round(traced - begin, 1),
            "compile_s": round(time.perf_counter() - traced, 1),
            "cpu_s": round(time.process_time() - begin_cpu, 1),  # of both; what the machine's other work leaves alone
        }
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None
        of_platform: dict[str, Any] = {}
        if platform == "gpu":
            of_platform = _read_dumps(Path(folder), state.kv[0], moving) | {
                "kernels": len(spills),
                "spill_bytes": sum(spills),
            }
        else:
            of_platform = _read_tpu(text, model.config, rows)
    if dump is not None:
        dump.write_text(text)
    read = step_bytes(model, own, num_rows=rows, context=context)
    plain, gained = read["weights_read"], sum(acceptance**place for place in range(1 + count))
    kernels = quantized_kernels(model, platform, own.mesh)
    if network is not None:
        read["weights_read"] += _read_by(network, model, count)
    return {
        "target": target, "devices": mesh.size, "preset": preset, "layers": config.num_layers,
        "quantization": quantization,
        "kv_dtype": KV_DTYPES[kv_cache_dtype], "num_tokens": bucket.num_tokens, "num_rows": rows,
        "max_loras": max_loras, "drafts": drafts, "num_drafts": count, "options": options or {}, **seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "state_bytes": sum(map(_bytes, jax.tree.leaves(state))),
        "kv_bytes": own.page_bytes() * (1 + num_pages) * config.num_layers,
        "alias_bytes": memory.alias_size_in_bytes, "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "dequantized_copies": find(text, told_apart(kernels, bucket.num_tokens, rows)),
        **read, "tokens": round(gained, 3), "of_plain": round(read["weights_read"] / plain / gained, 3),
        **of_platform,
    }  # fmt: skip


def step_bytes(model: Llama, attention: PagedAttention, *, num_rows: int, context: int) -> dict[str, int]:
    """`weights_read` and `kv_read` of one chip, for `num_rows` rows of `context` tokens: all weights but the embedding,
    of which it looks up rows, unless the embedding is the head; and every page of the rows."""
    looked_up = _bytes(model.embedding.get_value())
    num_pages = num_rows * -(-context // attention.spec.page_size)
    return {
        "weights_read": weights_bytes(model) - (0 if model.head is None else looked_up),
        "kv_read": num_pages * attention.page_bytes() * model.config.num_layers,
    }


def _network(name: str, config: LlamaConfig, mesh: Mesh, chip: TpuChip | GpuChip) -> Llama | EagleHead:
    """What drafts: a head with the sizes of the model's layers, or a preset."""
    if name not in set(EagleForm):
        name, _, asked = name.partition(":")
        own = preset_named(name)
        form = form_named(asked, own.projection_inputs) if asked else None
        rounding, _ = choose_rounding(form, None, reads=chip.reads, rounded_rows=chip.rounded_rows)
        return abstract_model(own, dtype=jnp.bfloat16, mesh=mesh, quantization=form, rounding=rounding)
    raw = config.to_hf() | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    if name == EagleForm.EAGLE3:
        raw["draft_vocab_size"] = EAGLE3_VOCAB
    return abstract_head(EagleConfig.from_hf(raw, EagleForm(name), config), dtype=jnp.bfloat16, mesh=mesh)


def _read_by(network: Llama | EagleHead, model: Llama, num_passes: int) -> int:
    """Bytes of the weights that the network multiplies with: in each pass all, but of an EAGLE-3 head `fc` once."""
    if isinstance(network, Llama):
        own = weights_bytes(network)
        if network.head is not None:
            own -= _bytes(network.embedding.get_value())
        return num_passes * own
    tables = [table.get_value() for table in (network.to_model, network.to_draft) if table is not None]
    own, fc = weights_bytes(network) - sum(map(_bytes, tables)), _bytes(network.fc.kernel.get_value())
    if network.eagle.form is EagleForm.EAGLE3:
        return num_passes * (own - fc) + fc
    shared = model.embedding if model.head is None else model.head.kernel
    return num_passes * (own + _bytes(shared.get_value()))


def _bytes(x: Any) -> int:
    """On one device, of an array or of its description."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


# ---- TPUs: from the compiled program ----


def _read_tpu(text: str, config: LlamaConfig, num_rows: int) -> dict[str, Any]:
    entry = text[text.index("\nENTRY ") :]
    results = [line.partition(" = ")[2].partition(" fusion(")[0] for line in entry.splitlines() if " fusion(" in line]
    layer = layer_cycles(text) if config.num_layers > 1 else None
    return {
        "exchanges": dict(Counter(re.findall(rf" ({EXCHANGES})\(", entry))),
        "product_cycles": layer and round(layer.products),
        "glue_cycles": layer and round(layer.glue),
        "stores_logits": any(f"f32[{num_rows},{config.vocab_size}]" in result for result in results),
        "narrows_maxima": any(f"bf16[{num_rows}]" in result for result in results),
    }


# ---- GPUs: from XLA's dumps ----


def _read_dumps(folder: Path, kv: jax.ShapeDtypeStruct, moving: Collection[int]) -> dict[str, Any]:
    def dumped(kind: str) -> str:
        (file,) = folder.glob(f"*jit_step.*{kind}.txt")
        return file.read_text()

    return {
        **read_thunks(dumped("thunk_sequence_after_thunk_passes")),
        **read_buffers(dumped("gpu_after_optimizations-buffer-assignment")),
        **read_program(dumped("gpu_after_optimizations"), kv),
        **read_moving(
            dumped("gpu_after_optimizations-buffer-assignment"),
            dumped("gpu_after_optimizations-buffer-assignment-values"),
            dumped("gpu_after_optimizations"),
            moving,
        ),
    }


def read_thunks(text: str) -> dict[str, Any]:
    """The commands inside and outside of CUDA graphs, from XLA's dump of the thunk sequence."""
    buffers, buffer_indent = 0, None
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for line in text.splitlines():
        match = re.match(r"( *)\d+: (k\w+)", line)
        if match is None:
            continue
        indent, kind = len(match[1]), match[2]
        if buffer_indent is not None and indent <= buffer_indent:
            buffer_indent = None
        if kind == "kCommandBuffer":
            buffers, buffer_indent = buffers + 1, indent
            continue
        (outside if buffer_indent is None else inside)[kind] += 1
    return {"command_buffers": buffers, "inside": dict(inside), "outside": dict(outside)}


def read_buffers(text: str) -> dict[str, Any]:
    """The temporaries of XLA's buffer assignment: the largest, and those with the shape of a large argument."""
    arguments: set[tuple[str, ...]] = set()
    temporaries: dict[str, int] = {}
    in_temporaries = False
    for line in text.splitlines():
        if line.startswith("allocation"):
            in_temporaries = "preallocated-temp" in line
            match = re.search(r"size (\d+),.* parameter \d+, shape \|(\S+?)\|", line)
            if match and int(match[1]) >= MIB:
                arguments.add(_dimensions(match[2]))
        elif in_temporaries and (match := re.search(r"\(size=(\d+),offset=\d+\): (\w+\[[\d,]*\])", line)):
            temporaries[match[2]] = int(match[1])
        elif not line.startswith(" value"):
            in_temporaries = False
    largest = sorted(temporaries, key=lambda shape: -temporaries[shape])[:3]
    return {
        "largest_temporaries": {shape: round(temporaries[shape] / MIB, 1) for shape in largest},
        "copied_arguments": sorted(shape for shape in temporaries if _dimensions(shape) in arguments),
    }


def _dimensions(shape: str) -> tuple[str, ...]:
    """The dtype, and the sizes in sorted order: a transposed copy has the same dimensions."""
    dtype, _, sizes = shape.partition("[")
    sizes, _, _ = sizes.partition("]")
    return (dtype, *sorted(size for size in sizes.split(",") if size != "1"))


def read_program(text: str, kv: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Copies in the optimised program, by shape, and the number of fused scatters that write to K/V pages."""
    local = kv.sharding.shard_shape(kv.shape)
    pages = f"{HLO_NAMES.get(str(kv.dtype), kv.dtype)}[{','.join(map(str, local))}]"
    return {
        "copies": dict(Counter(re.findall(r"= \(?(\w+\[[\d,]*\]).*? copy(?:-start)?\(", text))),
        "kv_writes": len(re.findall(rf"%\S*scatter_fusion\S* = {re.escape(pages)}\S* fusion\(", text)),
    }


if __name__ == "__main__":
    main()
