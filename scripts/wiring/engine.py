"""The engine's factory: from settings to a warmed-up engine, saying what each phase of the start took.

`build_served` is what the engine's process calls, and `build` what offline generation calls in its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.engine import Engine
from batcher.grammar import Grammars
from model.loading.source import ModelSource, resolve
from scripts.wiring.device import describe_devices, start_jax
from scripts.wiring.limits import bucket_config, runner_config
from scripts.wiring.settings import EngineSettings, ServedSettings
from server.engine.wire import EngineInfo
from server.grammar.matcher import TokenGrammars, vocabulary_of

if TYPE_CHECKING:
    import jax

    from model.config import LlamaConfig
    from model.execution.runner import ModelRunner
    from model.loading.stored_weights import StoredWeights
    from model.network.llama import Llama
    from model.quantization.forms import EightBit
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import Backend
    from server.text.tokenizer import Tokenizer

Report = Callable[[str], None]
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Built:
    """A runner and what an engine over it needs. Several engines may be made over one runner, one after the other."""

    runner: ModelRunner
    ladder: BucketLadder
    eos_token_ids: tuple[int, ...]
    settings: EngineSettings
    info: EngineInfo

    def engine(
        self,
        scheduling: str | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        grammars: Grammars | None = None,
    ) -> Engine:
        """An engine over the runner, not started. `on_death` is called with what ended it."""
        settings = self.settings
        config = EngineConfig(
            eos_token_ids=self.eos_token_ids,
            scheduling=Scheduling(scheduling or settings.scheduling),
            prefix_caching=settings.enable_prefix_caching,
            max_waiting=settings.max_queue,
            pipeline_depth=settings.pipeline_depth,
            seed=settings.seed,
        )
        return Engine(self.runner, config, self.ladder, on_death=on_death, grammars=grammars)


def build_served(served: ServedSettings, report: Report) -> tuple[Engine, EngineInfo]:
    """`build`, with the tokens of structured output read meanwhile: that holds the interpreter's lock for much of a
    second, which later would hold up the steps."""

    def tokenizer(vocab_size: int) -> Tokenizer:
        from server.text.tokenizer import ByteLevelTokenizer

        return ByteLevelTokenizer.from_folder(served.tokenizer, vocab_size=vocab_size)

    return build(served.engine, report, tokenizer, read_tokens=True)


def build(
    settings: EngineSettings,
    report: Report,
    tokenizer: Callable[[int], Tokenizer] | None = None,
    *,
    read_tokens: bool = False,
) -> tuple[Engine, EngineInfo]:
    """A warmed-up engine, not started. ValueError where a setting, the model or the device cannot be used.

    Args:
        tokenizer: of a model of so many ids; None: the engine serves no grammars.
        read_tokens: now, while programs are compiled; otherwise the first grammar waits for it.
    """
    built = build_runner(settings, report, compile_meanwhile=True)
    grammars = None
    if tokenizer is not None:
        size, ends = built.info.vocab_size, built.eos_token_ids
        grammars = TokenGrammars(lambda: vocabulary_of(tokenizer(size), vocab_size=size, end_ids=ends))
        if read_tokens:
            threading.Thread(target=grammars.load, name="vocabulary", daemon=True).start()
    engine = built.engine(grammars=grammars)
    engine.warm_up(lambda line: report(f"  {line}"))
    return engine, built.info


def build_runner(settings: EngineSettings, report: Report, *, compile_meanwhile: bool = False) -> Built:
    """The weights on the device and the pages allocated. `compile_meanwhile`: the programs of all buckets have been
    begun with, for the warm-up that follows; otherwise nothing is compiled yet."""
    with _phase("start", report) as say:
        platform = start_jax(settings)
        say(f"jax on {describe_devices(settings)}")
    from model.execution.runner import ModelRunner
    from model.network.sharding import abstract_model
    from pallas_kernels.api import choose_backend
    from pallas_kernels.layout import default_page_size

    source = resolve(settings.model, weights=settings.load_format != "dummy")
    stored = _find_weights(settings, source)
    config = source.config if stored is None else stored.config
    backend = choose_backend(settings.attention_backend, platform)
    dtype, reason = choose_dtype(
        settings.dtype, config.checkpoint_dtype, platform, () if stored is None else stored.dtypes
    )
    max_model_len = choose_model_len(settings.max_model_len, config.max_position_embeddings)
    buckets = bucket_config(settings, platform)
    mesh = _mesh(settings.tensor_parallel_size)
    quantization, remark = choose_quantization(settings.quantization, stored, reads_fp8=_reads_fp8(platform))
    # The CPU's forms cut a kernel's rows in their own way, not in the mesh's.
    for_cpu = platform == "cpu" and mesh is None
    options: dict[str, Any] = {"dtype": dtype, "mesh": mesh, "quantization": quantization, "for_cpu": for_cpu}
    planned = abstract_model(config, **options)
    placed = planned.config  # its KV heads repeated where chips outnumber them
    page_size = settings.page_size or default_page_size(backend, max_model_len)
    attention = paged_attention(placed, backend, dtype=dtype, page_size=page_size, mesh=mesh)
    runner = ModelRunner(planned, attention, runner_config(settings, buckets, max_model_len))
    capacity = runner.capacity()
    ladder = BucketLadder(buckets)
    # On a GPU, XLA's autotuner times kernels while it compiles and keeps its choices, so nothing else may run then.
    if compile_meanwhile and platform != "gpu":
        runner.start_compiling(ladder.buckets())
    try:
        with _phase("load", report) as say:
            model = _random(settings, config, **options) if stored is None else stored.load(**options)
            origin = "nowhere (random)" if stored is None else source.folder
            say(f"{_size_of(model) / GIB:.2f} GiB of weights from {origin}, as {dtype} ({reason})")
            for line in (remark, stored and stored.remark):
                if line:
                    say(line)
        with _phase("allocate", report) as say:
            runner.place(model)
            kv_bytes = capacity.num_pages * attention.page_bytes() * placed.num_layers
            say(
                f"{capacity.num_pages} K/V pages of {page_size} tokens, {kv_bytes / GIB:.2f} GiB: "
                f"{capacity.num_pages // capacity.pages_per_seq} requests of {max_model_len} tokens at once; attention "
                f"backend {backend}, at most {buckets.max_num_seqs} sequences and "
                f"{buckets.max_num_batched_tokens} tokens a step"
            )
    except BaseException:
        runner.stop_compiling()
        raise
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        cache_config={
            "page_size": str(page_size),
            "num_pages": str(capacity.num_pages),
            "cache_dtype": dtype,
            "enable_prefix_caching": str(settings.enable_prefix_caching),
            "memory_utilization": str(settings.memory_utilization),
            "attention_backend": str(backend),
        },
    )
    return Built(
        runner=runner,
        ladder=ladder,
        eos_token_ids=source.eos_token_ids,
        settings=settings,
        info=info,
    )


def paged_attention(
    config: LlamaConfig,
    backend: Backend,
    *,
    dtype: str,
    page_size: int,
    mesh: Any,  # a Mesh; an AbstractMesh will do for a plan; None for one chip
) -> PagedAttention:
    """Of a model in its stored form: `config` has its KV heads repeated where chips outnumber them."""
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import AttentionSpec

    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=dtype,
    )
    return PagedAttention(spec, backend, mesh)


def choose_dtype(
    asked: str, checkpoint_dtype: str | None, platform: str, stored: Sequence[str] = ()
) -> tuple[str, str]:
    """The dtype of the computation, and the reason for it in words.

    Args:
        checkpoint_dtype: of a converted checkpoint, what it was converted to; of another, what `config.json` says, or
            where it does not, what all tensors are; None where neither says.
        stored: the types of the tensors themselves, where they are known.
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
    """How to keep the weights of projections and head, None for what they are computed in, and what to say of it.

    Args:
        reads_fp8: of the chip, see `chips`.

    Raises:
        ValueError: a converted checkpoint holds another form than the one asked for, or one that the chip reads slowly.
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
    return chosen, f"projections and head in {chosen}{reason}" + (f"; the checkpoint holds {held}" if held else "")


def choose_model_len(asked: int | None, trained: int) -> int:
    """The length in tokens. ValueError where it exceeds what the model was trained for."""
    if asked is not None and asked > trained:
        raise ValueError(f"--max-model-len {asked} is more than the {trained} tokens that the model was trained for")
    return asked or trained


def _reads_fp8(platform: str) -> bool:
    """Of the attached devices."""
    import jax

    from pallas_kernels.chips import TPUS, arch_reads_fp8

    if platform == "gpu":
        major, minor = jax.devices()[0].compute_capability.split(".")
        return arch_reads_fp8((int(major), int(minor)))
    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        return TPUS[this_chip()].reads_fp8
    return False


def _mesh(num_shards: int) -> jax.sharding.Mesh | None:
    from model.network.sharding import make_mesh

    return make_mesh(num_shards) if num_shards > 1 else None


def _find_weights(settings: EngineSettings, source: ModelSource) -> StoredWeights | None:
    """None where random weights are asked for."""
    if settings.load_format == "dummy":
        return None
    if source.folder is None:
        raise ValueError(f"--model {settings.model} has no weights: add --load-format dummy for random ones")
    from model.loading.stored_weights import find_weights

    return find_weights(source.folder, source.config, settings.load_format)


def _random(settings: EngineSettings, config: LlamaConfig, **options: Any) -> Llama:
    from model.loading.weights import random_weights

    return random_weights(config, **options, seed=settings.seed or 0)


def _size_of(model: Llama) -> int:
    import jax
    from flax import nnx

    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


@contextmanager
def _phase(name: str, report: Report) -> Iterator[Report]:
    """Reports the phase's seconds with what the body says of it."""
    started = time.perf_counter()
    said: list[str] = []
    yield said.append
    report(f"  {name:<9}{time.perf_counter() - started:6.1f} s  {'; '.join(said)}")
