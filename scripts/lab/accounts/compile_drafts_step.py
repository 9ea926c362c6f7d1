"""Compiles whole steps with and without drafts for a chip that is not here, and prints an account of each.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m scripts.lab.accounts.compile_drafts_step \
        --target v6e:1x1 --preset llama-3.1-8b --drafts eagle3 --drafts llama-3.2-1b

It prints a JSON object for the plain decode step (not with `--drafts-only`), and one for each `--drafts`: an EAGLE or
EAGLE-3 head with the sizes of the model's layers, or a preset, with `:int8` and the like for weights in that form.
`weights_read` are counted, not compiled: the bytes of weights in the products of a step, in all its passes (those of
the network that drafts are `num_drafts`). `of_plain` is that for each token that a row gains at `--acceptance`, next to
the plain step. `alias_bytes` are updated in place, of `state_bytes`. `kernels` are Mosaic's in a GPU's program, which
spill `spill_bytes`. The rest is as in `compile_tpu_step` and `compile_gpu_step`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from batcher.step import Bucket, Variant
from model.compiling.compiler_options import compiler_options
from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.execution.memory_plan import RunnerConfig, weights_bytes
from model.execution.step_programs import StepPrograms
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import abstract_head, abstract_model, make_mesh
from model.presets import preset
from model.quantization.forms import form_named
from pallas_kernels.api import PagedAttention
from pallas_kernels.chips import TPUS, GpuChip, TpuChip
from pallas_kernels.spec import Backend
from scripts.building.choices import choose_rounding
from scripts.lab.accounts import gpu_report
from scripts.lab.accounts.compile_gpu_step import read_thunks
from scripts.lab.accounts.step_bytes import step_bytes
from scripts.lab.accounts.targets import gpu_target, tpu_target
from scripts.lab.accounts.whole_step import add_model_flags, attention_of, model_of

NUM_PAGES = 511  # besides the null page
LIMITS = RunnerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192, draft_pass_tokens=256)
EAGLE3_VOCAB = 32_000  # of the public heads


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    add_model_flags(parser)
    parser.add_argument("--drafts", action="append", default=[], help="eagle, eagle3, PRESET, PRESET:int8")
    parser.add_argument("--drafts-only", action="store_true", help="without the plain decode step")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7, help="of each draft after right ones")
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    for drafts in args.drafts if args.drafts_only else (None, *args.drafts):
        print(json.dumps(compile_step(args, drafts)), flush=True)


def compile_step(args: argparse.Namespace, drafts: str | None) -> dict[str, Any]:
    """The account of a step with these drafts; None: a plain decode step."""
    is_tpu = args.target.split(":")[0] in TPUS
    tpu, gpu = (tpu_target(args.target), None) if is_tpu else (None, gpu_target(args.target))
    devices = tpu.devices() if tpu else gpu.devices() if gpu else []
    mesh = make_mesh(1, devices)
    model = model_of(args, mesh)
    chip = tpu.chip if tpu else gpu.chip if gpu else None
    assert chip is not None

    def attention(config: LlamaConfig) -> PagedAttention:
        backend, page_size = (Backend.TPU, 128) if is_tpu else (Backend.GPU, 64)
        return attention_of(config, mesh, backend, page_size=page_size)

    network = None if drafts is None else _network(drafts, model.config, mesh, chip)
    rows, count = args.rows, 0 if network is None else args.num_drafts
    bucket = Bucket(num_tokens=rows * (1 + count), num_rows=rows, variant=Variant.GREEDY, num_drafts=count)
    draft = None if network is None else (network, attention(network.config))
    programs = StepPrograms(model, attention(model.config), LIMITS, NUM_PAGES, draft)
    program, state = programs.step(bucket), programs.state_like
    compiling = gpu.compiling(mesh) if gpu else contextlib.nullcontext()
    with compiling, tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
        options = compiler_options("gpu") | dump if gpu else compiler_options("tpu")
        compiled, spills = gpu_report.spills_of(lambda: program.as_read().lower().compile(compiler_options=options))
        seconds = time.perf_counter() - begin
        of_gpu: dict[str, Any] = {}
        if gpu:
            (file,) = Path(folder).glob("*jit_step.*thunk_sequence_after_thunk_passes.txt")
            of_gpu = {**read_thunks(file.read_text()), "kernels": len(spills), "spill_bytes": sum(spills)}
    memory = compiled.memory_analysis()
    assert memory is not None
    plain = step_bytes(model, programs.attention, num_rows=rows, context=2048)["weights_read"]
    read = plain + (0 if network is None else _read_by(network, model, count))
    gained = sum(args.acceptance**place for place in range(1 + count))
    return {
        "target": args.target, "preset": args.preset, "layers": model.config.num_layers, "drafts": drafts, "rows": rows,
        "num_drafts": count, "seconds": round(seconds, 1), "temp_bytes": memory.temp_size_in_bytes,
        "state_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "alias_bytes": memory.alias_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes,
        "weights_read": read, "tokens": round(gained, 3), "of_plain": round(read / plain / gained, 3), **of_gpu,
    }  # fmt: skip


def _network(name: str, config: LlamaConfig, mesh: Mesh, chip: TpuChip | GpuChip) -> Llama | EagleHead:
    """Raises ValueError if there is no such form of weights or preset."""
    if name not in set(EagleForm):
        name, _, asked = name.partition(":")
        own = preset(name)
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


if __name__ == "__main__":
    main()
