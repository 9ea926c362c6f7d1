"""Builds a warmed-up engine from settings, and reports each phase of the start.

The engine's process calls `build_served`. Offline generation calls `build` in its own process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.engine import Engine
from batcher.grammar import Grammars
from batcher.page_events import PageEventSink
from batcher.step import Bucket, Runner
from batcher.step_times import StepTimes
from scripts.building.adapters import RunnersStore, loaded_adapters
from scripts.building.attention_backend import Backends, choose_attention, is_tested_by_a_child, paged_attention
from scripts.building.changeable import ChangeableEngine, RunnerUpdates, RunnerWeights
from scripts.building.choices import choose_deferred_programs, choose_model_len, choose_step_timeout
from scripts.building.chosen_weights import ChosenWeights, bits_of_a_weight, choose_weights
from scripts.building.compile_turn import CompileTurn
from scripts.building.device import find_device, start_jax
from scripts.building.draft import ChosenDraft, choose_draft
from scripts.building.end_tokens import listed
from scripts.building.head import ChosenHead
from scripts.building.kept_folders import kept_folders
from scripts.building.kv_events import make_publisher
from scripts.building.limits import bucket_config, even_context, long_prompts, runner_config
from scripts.building.load import Loader, Report, phase
from scripts.building.model_on_chips import ModelOnChips
from scripts.building.offloading import GIB, Digests, give_pages, identity_of_pages, make_offloading, start_digests
from scripts.building.parallel import choose_chips_and_context, describe_idle
from scripts.building.precompiled import made_for
from scripts.building.replicas import claim_chips
from scripts.building.step_times import choose_step_times
from scripts.building.tracers import trace_ahead
from scripts.flags.settings import EngineSettings, ServedSettings
from server.engine.adapters import Adapters, AdapterStore
from server.engine.kv_events import KvEventPublisher
from server.engine.wire import EngineInfo
from server.grammar.matcher import TokenGrammars, vocabulary_of

if TYPE_CHECKING:
    from pathlib import Path

    from model.execution.runner import ModelRunner
    from pallas_kernels.api import PagedAttention
    from server.text.tokenizer import ByteLevelTokenizer


@dataclass(frozen=True, kw_only=True)
class Built:
    """A runner and the settings for engines over it. Several engines can be made over one runner, one at a time."""

    runner: ModelRunner
    ladder: BucketLadder
    may_wait: tuple[Bucket, ...]  # programs that may be compiled while an engine serves
    eos_token_ids: tuple[int, ...]
    settings: EngineSettings
    step_timeout_s: float | None  # None: a step may take any time
    step_times: StepTimes
    draft_cost: float  # the time of a pass of the draft model or head, in passes of the model; 0: there is none
    info: EngineInfo
    weights: ChosenWeights
    platform: str
    loader: Loader  # loads other weights
    adapter_store: AdapterStore | None  # None: requests have no adapters
    digests: Digests | None  # of the weights, for the files of pages; None: there are no files
    shaped_by: Mapping[str, str]  # the facts that shape the programs
    tokenizer: Path | None  # its end tokens end an answer; None: the model's own

    def changeable_weights(self) -> RunnerWeights:
        return RunnerWeights(self.loader, self.settings, self.weights, self.platform, self.tokenizer)

    def engine(
        self,
        scheduling: str | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        grammars: Grammars | None = None,
        runner: Runner | None = None,
        page_events: PageEventSink | None = None,
    ) -> Engine:
        """An engine over the runner, not started. `on_death` is called with the exception that ended it.

        Args:
            runner: replaces the runner, which it wraps.
            page_events: gets the events of pages; None: there are none.
        """
        settings = self.settings
        config = EngineConfig(
            eos_token_ids=self.eos_token_ids,
            scheduling=Scheduling(scheduling or settings.scheduling),
            prefix_caching=settings.enable_prefix_caching,
            long_prompts=long_prompts(settings, self.info.max_model_len),
            even_context=even_context(self.weights.config) if settings.step_budget == "time" else math.inf,
            max_waiting=settings.max_queue,
            pipeline_depth=settings.pipeline_depth,
            step_times=self.step_times,
            draft_cost=self.draft_cost,
            step_timeout_s=self.step_timeout_s,
            offloading=make_offloading(settings, self.runner, self.digests),
            seed=settings.seed,
        )
        return Engine(
            runner or self.runner, config, self.ladder, on_death=on_death, grammars=grammars, page_events=page_events
        )


@dataclass(frozen=True, kw_only=True)
class OtherHosts:
    """The functions by which `build_runner` works with the other hosts of one engine."""

    num_hosts: int
    join: Callable[[], None]  # joins their processes, before jax looks for devices
    agree: Callable[[int, Mapping[str, str]], int]
    """From the pages that this host has room for, and facts that must be equal on all hosts: the pages to use."""


def build_served(served: ServedSettings, report: Report) -> tuple[ChangeableEngine, EngineInfo]:
    """Builds the server's engine, whose weights may be changed. The tokens for structured output are read while
    programs are compiled."""
    settings = served.engine
    if served.num_replicas > 1:
        settings = claim_chips(served, find_device() if settings.device == "auto" else settings.device)
    publisher = make_publisher(settings, report, rank=served.replica)
    turn = None if served.compile_turn is None else CompileTurn(served.compile_turn, is_first=served.replica == 0)
    with turn.compiling() if turn is not None and turn.is_first else nullcontext():
        meanwhile = turn is None or turn.is_first
        built = build_runner(settings, report, tokenizer=served.tokenizer, compile_meanwhile=meanwhile)
        if turn is not None and not turn.is_first:
            with phase("wait", report) as say:
                turn.wait()
                say("for the programs of engine 0")
        engine = warm_engine(built, report, served_tokenizer(served), read_tokens=True, publisher=publisher)
    adapters = loaded_adapters(settings, built.adapter_store, engine, publisher)
    info = give_pages(served, engine, built.info)
    weights = built.changeable_weights()
    return ChangeableEngine(engine, weights, RunnerUpdates(built.loader, weights), adapters), info


def served_tokenizer(served: ServedSettings) -> Callable[[int], ByteLevelTokenizer]:
    """A function that makes the server's tokenizer from the size of the vocabulary."""

    def tokenizer(vocab_size: int) -> ByteLevelTokenizer:
        from server.text.tokenizer import ByteLevelTokenizer

        return ByteLevelTokenizer.from_folder(served.tokenizer, vocab_size=vocab_size)

    return tokenizer


def build(
    settings: EngineSettings, report: Report, tokenizer: Callable[[int], ByteLevelTokenizer], *, tokenizer_folder: Path
) -> tuple[Engine, Built, Adapters | None]:
    """A warmed-up engine in this process, not started, with its `Built` and its LoRA adapters.

    Raises ValueError if a setting, the model or the device cannot be used.

    Args:
        tokenizer: makes the tokenizer from the size of the vocabulary.
        tokenizer_folder: a folder or a GGUF file, whose end tokens end an answer.
    """
    if settings.kv_role != "both":
        raise ValueError(f"--kv-role {settings.kv_role}: only servers compute prompts for each other")
    built = build_runner(settings, report, tokenizer=tokenizer_folder, compile_meanwhile=True)
    publisher = make_publisher(settings, report)
    engine = warm_engine(built, report, tokenizer, publisher=publisher)
    return engine, built, loaded_adapters(settings, built.adapter_store, engine, publisher)


def warm_engine(
    built: Built,
    report: Report,
    tokenizer: Callable[[int], ByteLevelTokenizer] | None = None,
    *,
    read_tokens: bool = False,
    runner: Runner | None = None,
    publisher: KvEventPublisher | None = None,
) -> Engine:
    """A warmed-up engine, not started.

    Args:
        tokenizer: makes the tokenizer from the size of the vocabulary; None: the engine supports no grammars.
        read_tokens: reads the tokens while programs are compiled; otherwise the first grammar waits for them. This
            holds the interpreter's lock for most of a second; while serving, it would delay steps.
        runner: replaces the runner of `built`, which it wraps.
        publisher: the publisher of K/V events, which ends with the engine.
    """
    grammars = None
    if tokenizer is not None and built.eos_token_ids:  # the text of a grammar ends with an end token
        size, ends = built.info.vocab_size, built.eos_token_ids
        grammars = TokenGrammars(lambda: vocabulary_of(tokenizer(size), vocab_size=size, end_ids=ends))
        if read_tokens:
            threading.Thread(target=grammars.load, name="vocabulary", daemon=True).start()
    engine = built.engine(grammars=grammars, runner=runner, page_events=publisher)
    engine.warm_up(lambda line: report(f"  {line}"), built.may_wait)
    return engine


def build_runner(
    settings: EngineSettings,
    report: Report,
    *,
    tokenizer: Path | None = None,
    compile_meanwhile: bool = False,
    backends: Backends | None = None,
    others: OtherHosts | None = None,
    only_programs: bool = False,
) -> Built:
    """A runner with its weights on the device and its pages allocated.

    Args:
        tokenizer: a folder or a GGUF file, whose end tokens end an answer; None: the model's own.
        compile_meanwhile: starts to compile the programs of all buckets but `Built.may_wait` for the warm-up; otherwise
            nothing is compiled yet.
        backends: the candidates for the attention backend; None: those of `pallas_kernels.api`.
        others: the other hosts of this engine, which all build the same runner; None: there are none.
        only_programs: makes a runner that can only compile its programs. Nothing is tested, loaded or allocated on the
            device, which need not be attached.
    """
    import jax

    num_hosts = 1 if others is None else others.num_hosts
    if others is not None and settings.kv_offloading_size:
        raise ValueError("--kv-offloading-size: the pages of an engine of several hosts cannot leave the devices")
    if others is not None and settings.export_cache is not None:
        raise ValueError("--export-cache: programs of several hosts cannot be exported; --compile-cache keeps them")
    with phase("start", report) as say:
        folders = kept_folders(settings)
        join = None if others is None else others.join
        platform = start_jax(settings, join, num_hosts=num_hosts, folders=folders)
        num_devices, kind = jax.device_count(), jax.devices()[0].device_kind
        say(f"jax on {num_devices} x {kind}" + ("" if others is None else f" of {num_hosts} hosts"))
    from pallas_kernels import api

    backends = backends or Backends(candidates=api.candidates, make=paged_attention)
    candidates = backends.candidates(settings.attention_backend, platform)
    weights = choose_weights(settings, platform, tokenizer)
    report(f"  end tokens        {listed(weights.end_tokens)}")
    max_model_len = choose_model_len(settings.max_model_len, weights.config.max_position_embeddings)
    draft = choose_draft(settings, weights, platform, max_model_len)
    digests = start_digests(settings, weights, draft)

    @cache
    def on_chips(number: int, context: int) -> ModelOnChips:
        limits = runner_config(settings, bucket_config(settings, platform, number), context)

        def placed(weights: ChosenWeights | ChosenHead, settings: EngineSettings, **more: Any) -> ModelOnChips:
            form = {name: getattr(weights, name) for name in ("dtype", "quantization", "rounding")}
            return ModelOnChips(weights.config, number, settings, limits, platform=platform, **form, **more)

        of_draft = None
        if draft is not None:
            plan = draft.weights.plan if isinstance(draft.weights, ChosenHead) else None
            of_draft = placed(draft.weights, draft.settings, plan=plan)
        return placed(weights, settings, draft=of_draft)

    num_chips, max_model_len = choose_chips_and_context(
        settings.tensor_parallel_size,
        num_devices,
        settings.max_model_len,
        weights.config.max_position_embeddings,
        lambda number, context: on_chips(number, context).check_fits(backends.make, candidates),
        num_hosts=num_hosts,
    )
    buckets = bucket_config(settings, platform, num_chips)
    limits = runner_config(settings, buckets, max_model_len)
    report(f"  chips             {describe_idle(num_chips, num_devices)}")
    if settings.max_model_len is None and max_model_len < weights.config.max_position_embeddings:
        report(
            f"  context           {max_model_len} tokens, the longest for which the memory has room; the model was "
            f"trained for {weights.config.max_position_embeddings}. More chips, --kv-cache-dtype or --quantization "
            "leave room for more"
        )
    chips = on_chips(num_chips, max_model_len)
    ladder = BucketLadder(buckets)
    later = choose_deferred_programs(ladder, platform, all_first=settings.compile_all_first, num_hosts=num_hosts)
    adapter_store = RunnersStore(settings, weights.config) if settings.enable_lora else None

    def runner_over(attention: PagedAttention) -> tuple[ModelRunner, dict[str, str]]:
        """A runner without weights, and the facts that shape its programs."""
        from model.execution.runner import ModelRunner

        chips.pack_for(attention.backend, chips.planned)
        of_draft = chips.draft_over(backends.make, attention.backend)
        if chips.draft is not None:
            chips.draft.pack_for(attention.backend, chips.draft.planned)
        # An interpreted kernel calls back into this process and cannot be stored.
        is_interpreted = attention.backend.is_interpreted
        export_folder = folders.executables(platform, num_hosts=num_hosts, is_interpreted=is_interpreted)
        if is_interpreted and export_folder is not None:
            raise ValueError(f"--export-cache: programs of --attention-backend {attention.backend} cannot be exported")
        make_runner = partial(
            ModelRunner,
            chips.planned,
            attention,
            traced_folder=None if folders.compiled is None or is_interpreted else folders.compiled / "traced",
            export_folder=export_folder,
            draft=of_draft,
            adapter_weights=None if adapter_store is None else adapter_store.weights,
        )
        runner = make_runner(limits)
        room, shaped_by = runner.capacity().num_pages, _facts(weights, draft, attention, ladder)
        num_pages = room
        if others is not None:
            num_pages = others.agree(room, shaped_by)
        elif not only_programs and (made := made_for(folders.compiled, runner, shaped_by)) is not None:
            num_pages = made.num_pages or room
            report(f"  precompiled       {made.remark}")
        if num_pages < room:
            runner = make_runner(replace(limits, num_pages=num_pages))
        return runner, shaped_by

    def start_compiling(runner: ModelRunner, attention: PagedAttention, *, only_trace: bool) -> None:
        runner.start_compiling(ladder.buckets(), later, only_trace=only_trace)
        if others is None:
            own = replace(settings, attention_backend=str(attention.backend), max_model_len=max_model_len)
            own = replace(own, tensor_parallel_size=num_chips)
            again = partial(build_runner, report=_say_nothing, tokenizer=tokenizer, only_programs=True)
            trace_ahead(runner, own, ladder.buckets(), platform, again)

    # While another process tests the first candidate that applies, this one traces its programs.
    early, first = None, chips.first_attention(backends.make, candidates)
    if compile_meanwhile and others is None and is_tested_by_a_child(first.backend, candidates):
        early = runner_over(first)
        start_compiling(early[0], first, only_trace=True)
    try:
        with phase("self-test", report) as say:
            chosen = choose_attention(
                settings,
                candidates,
                partial(chips.attention, backends.make),
                buckets,
                platform=platform,
                max_model_len=max_model_len,
                native_folder=folders.native,
                # A host cannot read the results of the other hosts' chips.
                make_tested=None if others is None else partial(chips.share_of_a_chip, backends.make),
                is_here=not only_programs,
            )
            say("; ".join(chosen.remarks))
    except BaseException:
        if early is not None:
            early[0].stop_compiling()
        raise
    attention = chosen.attention
    if early is not None and attention.backend is not first.backend:
        early[0].stop_compiling()
        early = None
    runner, shaped_by = early or runner_over(attention)
    if compile_meanwhile and early is None:
        # On a GPU, XLA's autotuner times kernels during compilation and keeps its choices: nothing else may run then.
        start_compiling(runner, attention, only_trace=platform == "gpu")
    loader = Loader(
        runner=runner,
        draft=draft,
        chips=chips,
        attention=attention,
        buckets=buckets,
        settings=settings,
        report=report,
        prepared_folder=folders.weights(platform),
    )
    try:
        if not only_programs:
            loader.load(weights)
    except BaseException:
        runner.stop_compiling()
        raise
    page_size, num_pages = attention.spec.page_size, runner.capacity().num_pages
    if settings.kv_offloading_size:
        num_tokens = int(settings.kv_offloading_size * GIB) // runner.capacity().page_bytes * page_size
        behind = "" if settings.kv_offloading_path is None else f", and behind it {settings.kv_offloading_path}"
        report(f"  offloading        the host's memory has room for {num_tokens} tokens of prefixes{behind}")
    return Built(
        runner=runner,
        weights=weights,
        platform=platform,
        loader=loader,
        adapter_store=adapter_store,
        digests=digests,
        shaped_by=shaped_by,
        tokenizer=tokenizer,
        ladder=ladder,
        may_wait=tuple(later),
        eos_token_ids=tuple(token.id for token in weights.end_tokens),
        settings=settings,
        step_timeout_s=choose_step_timeout(settings.step_timeout, platform),
        step_times=choose_step_times(
            weights.config,
            platform,
            weight_bits=bits_of_a_weight(weights.quantization, weights.dtype),
            num_chips=num_chips,
        ),
        draft_cost=0.0 if draft is None else draft.cost(weights, platform),
        info=EngineInfo(
            max_model_len=max_model_len,
            vocab_size=weights.config.vocab_size,
            embedding_size=weights.config.hidden_size if settings.enable_embeddings else None,
            attention=chosen.info,
            max_loras=settings.num_adapter_slots,
            adapter_bytes=runner.described.adapter_bytes,
            page_identity=identity_of_pages(settings, runner, digests),
            page_size=page_size,
            cache_config={
                "page_size": str(page_size),
                "num_pages": str(num_pages),
                "kv_cache_size_tokens": str(num_pages * page_size),
                "kv_cache_max_concurrency": f"{num_pages * page_size / max_model_len:.2f}",
                "cache_dtype": str(attention.spec.kv_dtype),
                "enable_prefix_caching": str(settings.enable_prefix_caching),
                "memory_utilization": str(settings.memory_utilization),
                "attention_backend": str(attention.backend),
                "tensor_parallel_size": str(num_chips),
            },
        ),
    )


def _say_nothing(line: str) -> None:
    """Drops a line of the report."""


def _facts(
    weights: ChosenWeights, draft: ChosenDraft | None, attention: PagedAttention, ladder: BucketLadder
) -> dict[str, str]:
    """The facts that shape the programs, in addition to the settings and the number of pages."""
    import jax

    return {
        "the model's config": str(weights.config),
        "the draft model": str(draft and (draft.network, draft.weights.quantization, draft.weights.rounding)),
        "the attention": f"{attention.backend} {attention.spec}",
        "the quantization": str((weights.quantization, weights.rounding)),
        "the shapes of the steps": str(ladder.buckets()),
        "jax": jax.__version__,
    }
