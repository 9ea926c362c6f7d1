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
from typing import TYPE_CHECKING

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.engine import Engine
from batcher.grammar import Grammars
from batcher.step import Runner
from scripts.wiring.attention import choose_attention
from scripts.wiring.backends import Backends, own_backends
from scripts.wiring.choices import (
    choose_kv_dtype,
    choose_model_len,
    choose_step_timeout,
)
from scripts.wiring.device import compile_cache_folder, find_device, start_jax
from scripts.wiring.kv_scales import find_kv_scales
from scripts.wiring.limits import WEIGHTS_COST_TOKENS, bucket_config, runner_config
from scripts.wiring.model_on_chips import ModelOnChips
from scripts.wiring.parallel import choose_num_chips, describe_idle
from scripts.wiring.replicas import claim_chips
from scripts.wiring.settings import EngineSettings, ServedSettings
from scripts.wiring.weights import ChosenWeights, choose_weights
from server.engine.wire import EngineInfo
from server.grammar.matcher import TokenGrammars, vocabulary_of

if TYPE_CHECKING:
    from pathlib import Path

    from model.execution.memory_plan import RunnerConfig
    from model.execution.runner import ModelRunner
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

    num_hosts = 1 if others is None else others.num_hosts
    with _phase("start", report) as say:
        platform = start_jax(settings, None if others is None else others.join, num_hosts=num_hosts)
        num_devices, kind = jax.device_count(), jax.devices()[0].device_kind
        say(f"jax on {num_devices} x {kind}" + ("" if others is None else f" of {num_hosts} hosts"))
    backends = backends or own_backends()
    candidates = backends.candidates(settings.attention_backend, platform)
    weights = choose_weights(settings, platform)
    max_model_len = choose_model_len(settings.max_model_len, weights.config.max_position_embeddings)
    buckets = bucket_config(settings, platform)
    limits = runner_config(settings, buckets, max_model_len)
    on_chips = partial(
        ModelOnChips,
        weights.config,
        settings=settings,
        limits=limits,
        dtype=weights.dtype,
        quantization=weights.quantization,
        platform=platform,
    )
    num_chips = choose_num_chips(
        settings.tensor_parallel_size,
        num_devices,
        lambda number: on_chips(number).check_fits(backends.make, candidates),
        converted_for=None if weights.stored is None else weights.stored.num_shards,
        num_hosts=num_hosts,
    )
    report(f"  chips             {describe_idle(num_chips, num_devices)}")
    chips = on_chips(num_chips)
    cache = compile_cache_folder(settings.compile_cache)
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
    chips.pack_for(attention.backend, chips.planned)
    ladder = BucketLadder(buckets)
    runner = _make_runner(chips.planned, attention, limits, cache)
    if others is not None:
        room = runner.capacity().num_pages
        num_pages = others.agree(room, _facts(weights, attention, ladder))
        if num_pages < room:
            runner = _make_runner(chips.planned, attention, replace(limits, num_pages=num_pages), cache)
    # On a GPU, XLA's autotuner times kernels during compilation and keeps its choices: nothing else may run then.
    if compile_meanwhile and platform != "gpu":
        runner.start_compiling(ladder.buckets())
    try:
        _load(runner, weights, chips, attention, buckets, settings, report)
    except BaseException:
        runner.stop_compiling()
        raise
    return Built(
        runner=runner,
        ladder=ladder,
        eos_token_ids=weights.source.eos_token_ids,
        settings=settings,
        step_timeout_s=choose_step_timeout(settings.step_timeout, platform),
        weights_cost_tokens=WEIGHTS_COST_TOKENS[platform],
        info=EngineInfo(
            max_model_len=max_model_len,
            vocab_size=weights.config.vocab_size,
            embedding_size=weights.config.hidden_size if settings.enable_embeddings else None,
            attention=chosen.info,
            cache_config={
                "page_size": str(attention.spec.page_size),
                "num_pages": str(runner.capacity().num_pages),
                "cache_dtype": str(attention.spec.kv_dtype),
                "enable_prefix_caching": str(settings.enable_prefix_caching),
                "memory_utilization": str(settings.memory_utilization),
                "attention_backend": str(attention.backend),
            },
        ),
    )


def _make_runner(planned: Llama, attention: PagedAttention, limits: RunnerConfig, cache: Path | None) -> ModelRunner:
    """A runner without weights. `cache` is the folder of compiled programs."""
    from model.execution.runner import ModelRunner

    # An interpreted kernel calls back into this process and cannot be stored.
    traced_folder = None if cache is None or attention.backend.is_interpreted else cache / "traced"
    return ModelRunner(planned, attention, limits, traced_folder=traced_folder)


def _load(
    runner: ModelRunner,
    weights: ChosenWeights,
    chips: ModelOnChips,
    attention: PagedAttention,
    buckets: BucketConfig,
    settings: EngineSettings,
    report: Report,
) -> None:
    """Loads the weights into the runner, which then allocates its pages."""
    spec, capacity = attention.spec, runner.capacity()
    with _phase("load", report) as say:
        model = weights.load(chips.form)
        chips.pack_for(attention.backend, model)
        size, *others = weights.remarks()
        say(f"{_size_of(model) / GIB:.2f} GiB {size}")
        for line in others:
            say(line)
    kv_scales = None
    if spec.has_kv_scales:
        with _phase("scales", report) as say:
            stored, measure = weights.stored, settings.calculate_kv_scales
            kv_scales, origin = find_kv_scales(model, stored, spec, measure=measure)
            kv_dtype, remark = choose_kv_dtype(settings.kv_cache_dtype, weights.dtype, attention.backend)
            say(", ".join(filter(None, (f"K/V in {kv_dtype}", remark, origin))))
    with _phase("allocate", report) as say:
        runner.place(model, kv_scales)
        kv_bytes = capacity.num_pages * attention.page_bytes() * weights.config.num_layers
        say(
            f"{capacity.num_pages} K/V pages of {spec.page_size} tokens, {kv_bytes / GIB:.2f} GiB: "
            f"{capacity.num_pages // capacity.pages_per_seq} requests of {capacity.max_model_len} tokens at once; "
            f"attention backend {attention.backend}, at most {buckets.max_num_seqs} sequences and "
            f"{buckets.max_num_batched_tokens} tokens a step"
        )
        if buckets.num_drafts:
            say(f"{buckets.num_drafts} drafts a row in steps of up to {buckets.max_draft_rows} rows")


def _facts(weights: ChosenWeights, attention: PagedAttention, ladder: BucketLadder) -> dict[str, str]:
    """What shapes the programs besides the settings and the number of pages."""
    import jax

    return {
        "the model's config": str(weights.config),
        "the attention": f"{attention.backend} {attention.spec}",
        "the quantization": str(weights.quantization),
        "the shapes of the steps": str(ladder.buckets()),
        "jax": jax.__version__,
    }


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
