"""Compiles whole steps with and without drafts for a chip that is not here, and prints an account of each.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m scripts.benchmarks.accounts.compile_drafts_step \
        --target v6e:1x1 --preset llama-3.1-8b --drafts eagle3 --drafts llama-3.2-1b

It prints a JSON object for the plain decode step, and one for each `--drafts`: an EAGLE or EAGLE-3 head with the sizes
of the model's layers, or a preset, with `:int8` and the like for weights in that form. `weights_read` are counted, not
compiled: the bytes of weights in the products of a step, in all its passes (`num_drafts` of the network that drafts).
`of_plain` is that for each token that a row gains at `--acceptance`, next to the plain step. `alias_bytes` are updated
in place, of `state_bytes`. `kernels` are Mosaic's in a GPU's program, which spill `spill_bytes`. The rest is as in
`compile_tpu_step` and `compile_gpu_step`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batcher.grammar import num_mask_words
from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout, Variant
from model.compiling.compiler_options import compiler_options
from model.compiling.traced_programs import Program
from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.execution.draft_model import DraftModel
from model.execution.draft_pages import DraftPages
from model.execution.drafter import Drafter
from model.execution.eagle_drafts import EagleDrafts
from model.execution.memory_plan import weights_bytes
from model.execution.speculative_step import make_speculative_step
from model.execution.step import DeviceState, make_step
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import abstract_head, abstract_model, make_mesh, sharding_of
from model.presets import preset
from model.quantization.forms import form_named
from pallas_kernels.api import PagedAttention
from pallas_kernels.chips import TPUS, GpuChip, TpuChip
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.benchmarks.accounts import gpu_report
from scripts.benchmarks.accounts.compile_gpu_step import read_thunks
from scripts.benchmarks.accounts.step_bytes import step_bytes
from scripts.benchmarks.accounts.targets import gpu_target, tpu_target
from scripts.wiring.choices import choose_rounding

NUM_PAGES, PAGES_PER_SEQ, PASS_TOKENS, NUM_SLOTS = 512, 64, 256, 256
EAGLE3_VOCAB = 32_000  # of the public heads


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--drafts", action="append", default=[], help="eagle, eagle3, PRESET, PRESET:int8")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7, help="of each draft after right ones")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, help="compile this many of the model only")
    args = parser.parse_args()
    plain = None
    for drafts in (None, *args.drafts):
        account = compile_step(args, drafts)
        plain = plain or account["weights_read"]
        gained = sum(args.acceptance**place for place in range(1 + args.num_drafts)) if drafts else 1
        account |= {"tokens": round(gained, 3), "of_plain": round(account["weights_read"] / plain / gained, 3)}
        print(json.dumps(account), flush=True)


def compile_step(args: argparse.Namespace, drafts: str | None) -> dict[str, Any]:
    """The account of a step with these drafts; None: a plain decode step."""
    is_tpu = args.target.split(":")[0] in TPUS
    tpu, gpu = (tpu_target(args.target), None) if is_tpu else (None, gpu_target(args.target))
    mesh = make_mesh(1, tpu.devices()) if tpu else Mesh(np.array(gpu.devices() if gpu else []), ("tensor",))
    config = preset(args.preset)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    model = abstract_model(config, dtype=jnp.bfloat16, mesh=mesh)
    attention = _attention(model.config, mesh, is_tpu=is_tpu)
    chip = tpu.chip if tpu else gpu.chip if gpu else None
    assert chip is not None
    network = None if drafts is None else _network(drafts, config, mesh, chip)
    networks = [model] if network is None else [model, network]
    structures, weights = zip(*map(nnx.split, networks), strict=True)
    leaves, tree = jax.tree.flatten(weights)

    def rebuild(number: int) -> Any:
        return lambda leaves: nnx.merge(structures[number], jax.tree.unflatten(tree, leaves)[number])

    drafter: Drafter | None = None
    if network is not None:
        passes = {"pass_tokens": PASS_TOKENS, "max_passes": 8}
        own = _attention(network.config, mesh, is_tpu=is_tpu)
        if isinstance(network, Llama):
            drafter = DraftModel(rebuild=rebuild(1), attention=own, **passes)
        else:
            drafter = EagleDrafts(
                config=network.eagle, rebuild=rebuild(1), rebuild_model=rebuild(0), attention=own, **passes
            )
    rows, count = args.rows, 0 if drafter is None else args.num_drafts
    bucket = Bucket(num_tokens=rows * (1 + count), num_rows=rows, variant=Variant.GREEDY, num_drafts=count)
    if drafter is None:
        step = make_step(bucket, rebuild(0), attention)
    else:
        step = make_speculative_step(bucket, rebuild(0), attention, drafter)
    state = _state(config, attention, mesh, network, drafter)
    everywhere = NamedSharding(mesh, P())
    packed: Any = jax.ShapeDtypeStruct((PackedLayout(bucket).size,), jnp.int32, sharding=everywhere)
    kept = jax.tree.map(lambda x: x.sharding, state)
    arguments = (leaves, [None] * config.num_layers, state, packed)
    program = Program(step, arguments, donated=2, out_shardings=(kept, everywhere))
    with gpu.compiling(mesh) if gpu else contextlib.nullcontext(), tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        begin = time.perf_counter()
        lowered = program.as_read().lower()
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
        compiled = lowered.compile(compiler_options=compiler_options("gpu") | dump if gpu else compiler_options("tpu"))
        seconds = time.perf_counter() - begin
        thunks = {}
        if gpu:
            (file,) = Path(folder).glob("*jit_step.*thunk_sequence_after_thunk_passes.txt")
            thunks = read_thunks(file.read_text())
            found = gpu_report.kernels(Path(folder))
            thunks |= {"kernels": len(found), "spill_bytes": sum(kernel.spill_bytes for kernel in found)}
    memory = compiled.memory_analysis()
    assert memory is not None
    read = step_bytes(model, attention, num_rows=rows, context=2048)["weights_read"]
    return {
        "target": args.target, "preset": args.preset, "layers": config.num_layers, "drafts": drafts, "rows": rows,
        "num_drafts": count, "seconds": round(seconds, 1), "temp_bytes": memory.temp_size_in_bytes,
        "state_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "alias_bytes": memory.alias_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes,
        "weights_read": read + (0 if network is None else _read_by(network, model, count)), **thunks,
    }  # fmt: skip


def _network(name: str, config: LlamaConfig, mesh: Mesh, chip: TpuChip | GpuChip) -> Llama | EagleHead:
    """Raises ValueError if there is no such form of weights or preset."""
    if name not in set(EagleForm):
        name, _, asked = name.partition(":")
        own = preset(name)
        form = form_named(asked, own.projection_inputs) if asked else None
        rounding, _ = choose_rounding(form, None, reads_fp8=chip.reads_fp8, rounded_rows=chip.rounded_rows)
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
            own -= _bytes(network.embedding)
        return num_passes * own
    tables = sum(_bytes(table) for table in (network.to_model, network.to_draft) if table is not None)
    own, fc = weights_bytes(network) - tables, _bytes(network.fc.kernel)
    if network.eagle.form is EagleForm.EAGLE3:
        return num_passes * (own - fc) + fc
    shared = _bytes(model.embedding if model.head is None else model.head.kernel)
    return num_passes * (own + shared)


def _bytes(parameter: nnx.Variable[Any]) -> int:
    value = parameter.get_value()
    return math.prod(value.shape) * value.dtype.itemsize


def _attention(config: LlamaConfig, mesh: Mesh, *, is_tpu: bool) -> PagedAttention:
    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=128 if is_tpu else 64,
        dtype=jnp.bfloat16,
        kv_dtype=jnp.bfloat16,
    )
    return PagedAttention(spec, Backend.TPU if is_tpu else Backend.GPU, mesh)


def _state(
    config: LlamaConfig,
    attention: PagedAttention,
    mesh: Mesh,
    network: Llama | EagleHead | None,
    drafter: Drafter | None,
) -> DeviceState:
    everywhere, page_size = NamedSharding(mesh, P()), attention.spec.page_size

    def array(*shape: int, dtype: Any = jnp.int32, sharding: Any = everywhere) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    draft = None
    if network is not None and drafter is not None:
        pages: Any = drafter.attention.kv_pages(NUM_PAGES)
        features = None
        if drafter.reads_features:
            features = array(NUM_PAGES, page_size, network.config.hidden_size, dtype=jnp.bfloat16)
        draft = DraftPages(kv=[pages] * network.config.num_layers, filled=array(NUM_PAGES), features=features)
    kv: Any = attention.kv_pages(NUM_PAGES)
    return DeviceState(
        slots=array(NUM_SLOTS, SlotLayout.width(PAGES_PER_SEQ)),
        history=array(NUM_SLOTS, config.vocab_size, sharding=sharding_of(("rows", "vocab"), mesh)),
        masks=array(NUM_SLOTS, num_mask_words(config.vocab_size)),
        kv=[kv] * config.num_layers,
        text=None if draft is None else array(NUM_PAGES, page_size),
        draft=draft,
    )


if __name__ == "__main__":
    main()
