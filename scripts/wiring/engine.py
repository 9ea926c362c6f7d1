"""The engine's factory: from settings to a warmed-up engine, with a report of each phase of the start.

The engine's process calls `build_served`. Offline generation calls `build` in its own process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.engine import Engine
from batcher.grammar import Grammars
from model.loading.source import ModelSource, resolve
from scripts.wiring.attention import choose_attention
from scripts.wiring.choices import (
    choose_dtype,
    choose_kv_dtype,
    choose_model_len,
    choose_quantization,
    choose_step_timeout,
    reads_fp8,
)
from scripts.wiring.device import compile_cache_folder, describe_devices, start_jax
from scripts.wiring.kv_scales import find_kv_scales
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
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import Backend
    from server.text.tokenizer import Tokenizer

Report = Callable[[str], None]
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The attention backends that a start may choose from."""

    candidates: Callable[[str, str], tuple[Backend, ...]]  # as `pallas_kernels.api.candidates`
    make: Callable[..., PagedAttention]  # as `paged_attention`


def _backends() -> Backends:
    from pallas_kernels.api import candidates

    return Backends(candidates=candidates, make=paged_attention)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A runner and the settings for engines over it. Several engines can be made over one runner, one at a time."""

    runner: ModelRunner
    ladder: BucketLadder
    eos_token_ids: tuple[int, ...]
    settings: EngineSettings
    step_timeout_s: float | None  # None: a step may take any time
    info: EngineInfo

    def engine(
        self,
        scheduling: str | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        grammars: Grammars | None = None,
    ) -> Engine:
        """An engine over the runner, not started. `on_death` is called with the exception that ended it."""
        settings = self.settings
        config = EngineConfig(
            eos_token_ids=self.eos_token_ids,
            scheduling=Scheduling(scheduling or settings.scheduling),
            prefix_caching=settings.enable_prefix_caching,
            max_waiting=settings.max_queue,
            pipeline_depth=settings.pipeline_depth,
            step_timeout_s=self.step_timeout_s,
            seed=settings.seed,
        )
        return Engine(self.runner, config, self.ladder, on_death=on_death, grammars=grammars)


def build_served(served: ServedSettings, report: Report) -> tuple[Engine, EngineInfo]:
    """`build`, which also reads the tokens for structured output during compilation. This holds the interpreter's lock
    for most of a second; while serving, it would delay steps."""

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
    backends: Backends | None = None,
) -> tuple[Engine, EngineInfo]:
    """A warmed-up engine, not started. Raises ValueError if a setting, the model or the device cannot be used.

    Args:
        tokenizer: makes the tokenizer from the size of the vocabulary; None: the engine supports no grammars.
        read_tokens: reads the tokens while programs are compiled; otherwise the first grammar waits for them.
        backends: as for `build_runner`.
    """
    built = build_runner(settings, report, compile_meanwhile=True, backends=backends)
    grammars = None
    if tokenizer is not None:
        size, ends = built.info.vocab_size, built.eos_token_ids
        grammars = TokenGrammars(lambda: vocabulary_of(tokenizer(size), vocab_size=size, end_ids=ends))
        if read_tokens:
            threading.Thread(target=grammars.load, name="vocabulary", daemon=True).start()
    engine = built.engine(grammars=grammars)
    engine.warm_up(lambda line: report(f"  {line}"))
    return engine, built.info


def build_runner(
    settings: EngineSettings,
    report: Report,
    *,
    compile_meanwhile: bool = False,
    backends: Backends | None = None,
) -> Built:
    """A runner with its weights on the device and its pages allocated.

    Args:
        compile_meanwhile: the programs of all buckets are being compiled for the warm-up; otherwise nothing is
            compiled yet.
        backends: the candidates for the attention backend, if not those of `pallas_kernels.api`.
    """
    with _phase("start", report) as say:
        platform = start_jax(settings)
        say(f"jax on {describe_devices(settings)}")
    from model.execution.runner import ModelRunner
    from model.network.packed import pack
    from model.network.sharding import abstract_model

    backends = backends or _backends()
    source = resolve(settings.model, weights=settings.load_format != "dummy")
    stored = _find_weights(settings, source)
    config = source.config if stored is None else stored.config
    candidates = backends.candidates(settings.attention_backend, platform)
    dtype, reason = choose_dtype(
        settings.dtype, config.checkpoint_dtype, platform, () if stored is None else stored.dtypes
    )
    max_model_len = choose_model_len(settings.max_model_len, config.max_position_embeddings)
    buckets = bucket_config(settings, platform)
    mesh = _mesh(settings.tensor_parallel_size)
    quantization, remark = choose_quantization(settings.quantization, stored, reads_fp8=reads_fp8(platform))
    # The CPU forms split a kernel's rows in another way than a mesh does.
    for_cpu = platform == "cpu" and mesh is None
    options: dict[str, Any] = {"dtype": dtype, "mesh": mesh, "quantization": quantization, "for_cpu": for_cpu}
    planned = abstract_model(config, **options)
    placed = planned.config  # with KV heads repeated if there are more chips than heads
    attention_over = partial(
        _attention_over, backends.make, settings, placed, dtype=dtype, max_model_len=max_model_len, mesh=mesh
    )
    cache = compile_cache_folder(settings.compile_cache)
    with _phase("self-test", report) as say:
        chosen = choose_attention(
            settings.attention_backend,
            candidates,
            attention_over,
            buckets,
            platform=platform,
            max_model_len=max_model_len,
            native_folder=cache and cache / "native",
        )
        say("; ".join(chosen.remarks))
    attention = chosen.attention
    with_native_products = for_cpu and attention.backend == "cpu"
    if with_native_products:
        pack(planned)
    backend, page_size = attention.backend, attention.spec.page_size
    kv_dtype, kv_remark = choose_kv_dtype(settings.kv_cache_dtype, dtype, backend)
    runner = ModelRunner(
        planned,
        attention,
        runner_config(settings, buckets, max_model_len),
        # An interpreted kernel calls back into this process and cannot be stored.
        traced_folder=None if cache is None or backend.is_interpreted else cache / "traced",
    )
    capacity = runner.capacity()
    ladder = BucketLadder(buckets)
    # On a GPU, XLA's autotuner times kernels during compilation and keeps its choices: nothing else may run then.
    if compile_meanwhile and platform != "gpu":
        runner.start_compiling(ladder.buckets())
    try:
        with _phase("load", report) as say:
            model = _random(settings, config, **options) if stored is None else stored.load(**options)
            if with_native_products:
                pack(model)
            origin = "nowhere (random)" if stored is None else source.path
            say(f"{_size_of(model) / GIB:.2f} GiB of weights from {origin}, as {dtype} ({reason})")
            for line in (remark, stored and stored.remark):
                if line:
                    say(line)
        kv_scales = None
        if attention.spec.has_kv_scales:
            with _phase("scales", report) as say:
                kv_scales, origin = find_kv_scales(model, stored, attention.spec, measure=settings.calculate_kv_scales)
                say(", ".join(filter(None, (f"K/V in {kv_dtype}", kv_remark, origin))))
        with _phase("allocate", report) as say:
            runner.place(model, kv_scales)
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
        embedding_size=config.hidden_size if settings.enable_embeddings else None,
        attention=chosen.info,
        cache_config={
            "page_size": str(page_size),
            "num_pages": str(capacity.num_pages),
            "cache_dtype": kv_dtype,
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
        step_timeout_s=choose_step_timeout(settings.step_timeout, platform),
        info=info,
    )


def paged_attention(
    config: LlamaConfig,
    backend: Backend,
    *,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    mesh: Any,  # a Mesh; an AbstractMesh is enough for a plan; None for one chip
) -> PagedAttention:
    """The attention of a model in its stored form: `config` has the repeated KV heads (`sharding.stored_config`)."""
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import AttentionSpec

    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return PagedAttention(spec, backend, mesh)


def _attention_over(
    make: Callable[..., PagedAttention],
    settings: EngineSettings,
    config: LlamaConfig,
    backend: Backend,
    *,
    dtype: str,
    max_model_len: int,
    mesh: Any,
) -> PagedAttention:
    """The attention over one backend, on which the dtype and the size of pages depend."""
    from pallas_kernels.layout import default_page_size

    kv_dtype, _ = choose_kv_dtype(settings.kv_cache_dtype, dtype, backend)
    page_size = settings.page_size or default_page_size(backend, max_model_len)
    return make(config, backend, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, mesh=mesh)


def _mesh(num_shards: int) -> jax.sharding.Mesh | None:
    from model.network.sharding import make_mesh

    return make_mesh(num_shards) if num_shards > 1 else None


def _find_weights(settings: EngineSettings, source: ModelSource) -> StoredWeights | None:
    """The model's weights on disk; None for random weights."""
    if settings.load_format == "dummy":
        return None
    if source.path is None:
        raise ValueError(f"--model {settings.model} has no weights: add --load-format dummy for random ones")
    from model.loading.stored_weights import find_weights

    return find_weights(source.path, source.config, settings.load_format)


def _random(settings: EngineSettings, config: LlamaConfig, **options: Any) -> Llama:
    from model.loading.weights import random_weights

    return random_weights(config, **options, seed=settings.seed or 0)


def _size_of(model: Llama) -> int:
    import jax
    from flax import nnx

    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


@contextmanager
def _phase(name: str, report: Report) -> Iterator[Report]:
    """Reports the seconds of the phase, with the remarks of the body."""
    started = time.perf_counter()
    said: list[str] = []
    yield said.append
    report(f"  {name:<9}{time.perf_counter() - started:6.1f} s  {'; '.join(said)}")
