"""The engine's factory: from settings to a warmed-up engine, with a report of each phase of the start.

The engine's process calls `build_served`. Offline generation calls `build` in its own process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.engine import Engine
from batcher.grammar import Grammars
from batcher.step import Runner
from model.loading.source import ModelSource, resolve
from scripts.wiring.attention import choose_attention
from scripts.wiring.backends import Backends, own_backends
from scripts.wiring.choices import (
    choose_dtype,
    choose_kv_dtype,
    choose_model_len,
    choose_quantization,
    choose_step_timeout,
    reads_fp8,
)
from scripts.wiring.device import compile_cache_folder, find_device, start_jax
from scripts.wiring.kv_scales import find_kv_scales
from scripts.wiring.limits import WEIGHTS_COST_TOKENS, bucket_config, runner_config
from scripts.wiring.model_on_chips import ModelOnChips
from scripts.wiring.parallel import choose_num_chips, describe_idle
from scripts.wiring.replicas import claim_chips
from scripts.wiring.settings import EngineSettings, ServedSettings
from server.engine.wire import EngineInfo
from server.grammar.matcher import TokenGrammars, vocabulary_of

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.execution.runner import ModelRunner
    from model.loading.stored_weights import StoredWeights
    from model.network.llama import Llama
    from pallas_kernels.api import PagedAttention
    from server.text.tokenizer import Tokenizer

Report = Callable[[str], None]
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Built:
    """A runner and the settings for engines over it. Several engines can be made over one runner, one at a time."""

    runner: ModelRunner
    ladder: BucketLadder
    eos_token_ids: tuple[int, ...]
    settings: EngineSettings
    step_timeout_s: float | None  # None: a step may take any time
    weights_cost_tokens: float  # see `limits`
    info: EngineInfo

    def engine(
        self,
        scheduling: str | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        grammars: Grammars | None = None,
        runner: Runner | None = None,
    ) -> Engine:
        """An engine over the runner, not started. `on_death` is called with the exception that ended it.

        Args:
            runner: takes the place of the runner, which it wraps.
        """
        settings = self.settings
        config = EngineConfig(
            eos_token_ids=self.eos_token_ids,
            scheduling=Scheduling(scheduling or settings.scheduling),
            prefix_caching=settings.enable_prefix_caching,
            max_waiting=settings.max_queue,
            pipeline_depth=settings.pipeline_depth,
            weights_cost_tokens=self.weights_cost_tokens,
            step_timeout_s=self.step_timeout_s,
            seed=settings.seed,
        )
        return Engine(runner or self.runner, config, self.ladder, on_death=on_death, grammars=grammars)


@dataclass(frozen=True, kw_only=True)
class OtherHosts:
    """What `build_runner` needs to know of the other hosts of one engine."""

    num_hosts: int
    join: Callable[[], None]  # joins their processes, see `device.start_jax`
    agree: Callable[[int, Mapping[str, str]], int]
    """From the pages that this host has room for, and facts that must be equal on all hosts: the pages to use."""


def build_served(served: ServedSettings, report: Report) -> tuple[Engine, EngineInfo]:
    """`build` for the server, which reads the tokens for structured output while programs are compiled."""
    settings = served.engine
    if served.num_replicas > 1:
        settings = claim_chips(served, find_device() if settings.device == "auto" else settings.device)
    return build(settings, report, served_tokenizer(served), read_tokens=True)


def served_tokenizer(served: ServedSettings) -> Callable[[int], Tokenizer]:
    """Makes the server's tokenizer from the size of the vocabulary."""

    def tokenizer(vocab_size: int) -> Tokenizer:
        from server.text.tokenizer import ByteLevelTokenizer

        return ByteLevelTokenizer.from_folder(served.tokenizer, vocab_size=vocab_size)

    return tokenizer


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
        tokenizer, read_tokens: as for `warm_engine`.
        backends: as for `build_runner`.
    """
    built = build_runner(settings, report, compile_meanwhile=True, backends=backends)
    return warm_engine(built, report, tokenizer, read_tokens=read_tokens), built.info


def warm_engine(
    built: Built,
    report: Report,
    tokenizer: Callable[[int], Tokenizer] | None = None,
    *,
    read_tokens: bool = False,
    runner: Runner | None = None,
) -> Engine:
    """A warmed-up engine, not started.

    Args:
        tokenizer: makes the tokenizer from the size of the vocabulary; None: the engine supports no grammars.
        read_tokens: reads the tokens while programs are compiled; otherwise the first grammar waits for them. This
            holds the interpreter's lock for most of a second; while serving, it would delay steps.
        runner: as for `Built.engine`.
    """
    grammars = None
    if tokenizer is not None:
        size, ends = built.info.vocab_size, built.eos_token_ids
        grammars = TokenGrammars(lambda: vocabulary_of(tokenizer(size), vocab_size=size, end_ids=ends))
        if read_tokens:
            threading.Thread(target=grammars.load, name="vocabulary", daemon=True).start()
    engine = built.engine(grammars=grammars, runner=runner)
    engine.warm_up(lambda line: report(f"  {line}"))
    return engine


def build_runner(
    settings: EngineSettings,
    report: Report,
    *,
    compile_meanwhile: bool = False,
    backends: Backends | None = None,
    others: OtherHosts | None = None,
) -> Built:
    """A runner with its weights on the device and its pages allocated.

    Args:
        compile_meanwhile: the programs of all buckets are being compiled for the warm-up; otherwise nothing is
            compiled yet.
        backends: the candidates for the attention backend, if not those of `pallas_kernels.api`.
        others: the other hosts of this engine, which all build the same runner; None: there are none.
    """
    import jax

    num_hosts, join = (1, None) if others is None else (others.num_hosts, others.join)
    with _phase("start", report) as say:
        platform = start_jax(settings, join, num_hosts=num_hosts)
        num_devices = jax.device_count()
        on_hosts = "" if num_hosts == 1 else f" of {num_hosts} hosts"
        say(f"jax on {num_devices} x {jax.devices()[0].device_kind}{on_hosts}")
    from model.execution.runner import ModelRunner
    from model.network.packed import pack

    backends = backends or own_backends()
    source = resolve(settings.model, weights=settings.load_format != "dummy")
    stored = _find_weights(settings, source)
    config = source.config if stored is None else stored.config
    candidates = backends.candidates(settings.attention_backend, platform)
    dtype, reason = choose_dtype(
        settings.dtype, config.checkpoint_dtype, platform, () if stored is None else stored.dtypes
    )
    max_model_len = choose_model_len(settings.max_model_len, config.max_position_embeddings)
    buckets = bucket_config(settings, platform)
    quantization, remark = choose_quantization(settings.quantization, stored, reads_fp8=reads_fp8(platform))
    limits = runner_config(settings, buckets, max_model_len)
    on_chips = partial(
        ModelOnChips,
        config,
        settings=settings,
        limits=limits,
        dtype=dtype,
        quantization=quantization,
        platform=platform,
    )
    cache = compile_cache_folder(settings.compile_cache)
    num_chips = choose_num_chips(
        settings.tensor_parallel_size,
        num_devices,
        lambda number: on_chips(number).check_fits(backends.make, candidates),
        converted_for=None if stored is None else stored.num_shards,
        num_hosts=num_hosts,
    )
    report(f"  chips             {describe_idle(num_chips, num_devices)}")
    chips = on_chips(num_chips)
    with _phase("self-test", report) as say:
        chosen = choose_attention(
            settings.attention_backend,
            candidates,
            partial(chips.attention, backends.make),
            buckets,
            platform=platform,
            max_model_len=max_model_len,
            native_folder=cache and cache / "native",
            # A host cannot read the results of the other hosts' chips.
            make_tested=None if others is None else partial(chips.share_of_a_chip, backends.make),
        )
        say("; ".join(chosen.remarks))
    attention = chosen.attention
    with_native_products = chips.form["for_cpu"] and attention.backend == "cpu"
    if with_native_products:
        pack(chips.planned)
    backend, page_size = attention.backend, attention.spec.page_size
    kv_dtype, kv_remark = choose_kv_dtype(settings.kv_cache_dtype, dtype, backend)
    # An interpreted kernel calls back into this process and cannot be stored.
    traced_folder = None if cache is None or backend.is_interpreted else cache / "traced"
    runner = ModelRunner(chips.planned, attention, limits, traced_folder=traced_folder)
    ladder = BucketLadder(buckets)
    if others is not None:
        room = runner.capacity().num_pages
        num_pages = others.agree(room, _facts(config, attention, quantization, ladder))
        if num_pages < room:
            limits = replace(limits, num_pages=num_pages)
            runner = ModelRunner(chips.planned, attention, limits, traced_folder=traced_folder)
    capacity = runner.capacity()
    # On a GPU, XLA's autotuner times kernels during compilation and keeps its choices: nothing else may run then.
    if compile_meanwhile and platform != "gpu":
        runner.start_compiling(ladder.buckets())
    try:
        with _phase("load", report) as say:
            model = _random(settings, config, **chips.form) if stored is None else stored.load(**chips.form)
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
            kv_bytes = capacity.num_pages * attention.page_bytes() * config.num_layers
            say(
                f"{capacity.num_pages} K/V pages of {page_size} tokens, {kv_bytes / GIB:.2f} GiB: "
                f"{capacity.num_pages // capacity.pages_per_seq} requests of {max_model_len} tokens at once; attention "
                f"backend {backend}, at most {buckets.max_num_seqs} sequences and "
                f"{buckets.max_num_batched_tokens} tokens a step"
            )
            if buckets.num_drafts:
                say(f"{buckets.num_drafts} drafts a row in steps of up to {buckets.max_draft_rows} rows")
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
        weights_cost_tokens=WEIGHTS_COST_TOKENS[platform],
        info=info,
    )


def _facts(
    config: LlamaConfig, attention: PagedAttention, quantization: object, ladder: BucketLadder
) -> dict[str, str]:
    """What shapes the programs besides the settings and the number of pages."""
    import jax

    return {
        "the model's config": str(config),
        "the attention": f"{attention.backend} {attention.spec}",
        "the quantization": str(quantization),
        "the shapes of the steps": str(ladder.buckets()),
        "jax": jax.__version__,
    }


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
