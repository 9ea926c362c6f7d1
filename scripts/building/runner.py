"""Builds a runner and a warmed-up engine over it from settings, and reports each phase of the start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.grammar import Grammars
from batcher.page_events import PageEventSink
from batcher.step import Runner
from model.execution.runner import ModelRunner
from pallas_kernels.api import PagedAttention
from scripts.building.adapter_store import RunnersStore
from scripts.building.attention_backend import BACKENDS, Backends, Chosen, can_a_child_test, choose_attention
from scripts.building.described_chips import keep_description
from scripts.building.device import KeptFolders, Report, phase
from scripts.building.engine_plans import plan_engines
from scripts.building.limits import EnginePlan, choose_step_timeout, step_estimate
from scripts.building.load import Loader
from scripts.building.models import RunnersModels
from scripts.building.offloading import GIB, Digests, make_offloading, start_digests
from scripts.building.precompiled import made_for
from scripts.building.runner_weights import RunnerWeights
from scripts.building.step_times import choose_step_times
from scripts.building.tracers import trace_ahead
from scripts.building.weights import bits_of_a_weight
from scripts.flags.settings import EngineSettings
from server.engine.adapters import AdapterStore
from server.engine.kv_event_stream import BlockHasher, HashAlgorithm
from server.engine.kv_events import KvEventPublisher
from server.engine.wire import EngineInfo
from server.grammar.matcher import TokenGrammars, vocabulary_of
from server.text.tokenizer import ByteLevelTokenizer

SEED = "PYTHONHASHSEED"  # of the hashes in K/V events, as in vLLM and its routers


@dataclass(frozen=True, kw_only=True)
class Built:
    """A runner and what engines over it need. Several engines can be made over one runner, one at a time."""

    runner: ModelRunner
    plan: EnginePlan
    info: EngineInfo
    loader: Loader  # loads other weights
    adapter_store: AdapterStore | None  # None: requests have no adapters
    models: RunnersModels | None  # None: there is one model only
    digests: Digests | None  # of the weights, for the files of pages; None: there are no files

    def runner_weights(self) -> RunnerWeights:
        return RunnerWeights(self.loader)

    def engine(
        self,
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
        settings, weights, chips = self.plan.settings, self.plan.weights, self.plan.chips
        platform, draft = self.plan.device.platform, self.plan.draft
        bits = bits_of_a_weight(weights.quantization, weights.dtype)
        config = EngineConfig(
            eos_token_ids=weights.eos_token_ids,
            prefix_caching=settings.enable_prefix_caching,
            max_waiting=settings.max_queue,
            pipeline_depth=settings.pipeline_depth,
            step_times=choose_step_times(weights.config, platform, weight_bits=bits, num_chips=chips.num_chips),
            targets=settings.targets,
            refuses_late=settings.when_late == "refuse",
            step_estimate=step_estimate(settings, platform, weights, chips.num_chips),
            draft_cost=0.0 if draft is None else draft.cost(weights, platform),
            step_timeout_s=choose_step_timeout(settings.step_timeout, platform),
            offloading=make_offloading(settings, self.runner, self.digests),
            seed=settings.seed,
        )
        runner, ladder = runner or self.runner, self.plan.ladder
        engine = Engine(runner, config, ladder, on_death=on_death, grammars=grammars, page_events=page_events)
        if self.models is not None:
            engine.models_off_device = self.models.states
        return engine


@dataclass(frozen=True, kw_only=True)
class OtherHosts:
    """The functions by which `build_runner` works with the other hosts of one engine."""

    num_hosts: int
    join: Callable[[], None]  # joins their processes, before jax looks for devices
    agree: Callable[[int, Mapping[str, str]], int]
    """From the pages that this host has room for, and facts that must be equal on all hosts: the pages to use."""


def warm_engine(
    built: Built,
    report: Report,
    tokenizer: Callable[..., ByteLevelTokenizer] | None = None,
    *,
    read_tokens: bool = False,
    runner: Runner | None = None,
    publisher: KvEventPublisher | None = None,
) -> Engine:
    """A warmed-up engine, not started.

    Args:
        tokenizer: makes the tokenizer from `vocab_size`; None: the engine supports no grammars.
        read_tokens: reads the tokens while programs are compiled; otherwise the first grammar waits for them. This
            holds the interpreter's lock for most of a second; while serving, it would delay steps.
        runner: replaces the runner of `built`, which it wraps.
        publisher: the publisher of K/V events, which ends with the engine.
    """
    grammars = None
    ends = built.plan.weights.eos_token_ids
    if tokenizer is not None and ends:  # the text of a grammar ends with an end token
        size = built.info.vocab_size
        grammars = TokenGrammars(lambda: vocabulary_of(tokenizer(vocab_size=size), vocab_size=size, end_ids=ends))
        if read_tokens:
            threading.Thread(target=grammars.load, name="vocabulary", daemon=True).start()
    engine = built.engine(grammars=grammars, runner=runner, page_events=publisher)
    engine.warm_up(lambda line: report(f"  {line}"), built.plan.may_wait)
    return engine


def make_publisher(
    settings: EngineSettings,
    report: Callable[[str], None],
    *,
    rank: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> KvEventPublisher | None:
    """A publisher with open sockets; None: the settings ask for no events.

    Raises ValueError if an endpoint cannot be used.

    Args:
        rank: the number of the engine among several.
    """
    config = settings.kv_events
    if config is None:
        return None
    seed = environment.get(SEED)
    hasher = BlockHasher(HashAlgorithm(settings.prefix_caching_hash_algo), seed)
    publisher = KvEventPublisher(config, hasher, rank)
    unseeded = "" if seed is not None else f"; without {SEED}, the hashes are of this engine only"
    report(f"  kv events         {config.endpoint_of(rank)}, topic {config.topic!r}{unseeded}")
    return publisher


def build_runner(
    settings: EngineSettings,
    report: Report,
    *,
    tokenizer: Path | None = None,
    folders: KeptFolders | None = None,
    compile_meanwhile: bool = False,
    backends: Backends = BACKENDS,
    others: OtherHosts | None = None,
    only_programs: bool = False,
    plan: EnginePlan | None = None,
) -> Built:
    """A runner with its weights on the device and its pages allocated.

    Args:
        tokenizer: a folder or a GGUF file, whose end tokens end an answer; None: the model's own.
        folders: the result of `device.start_compiling`; None: it was not called.
        compile_meanwhile: starts to compile the programs of all buckets but `EnginePlan.may_wait` for the warm-up;
            otherwise nothing is compiled yet.
        backends: the candidates for the attention backend.
        others: the other hosts of this engine, which all build the same runner; None: there are none.
        only_programs: makes a runner that can only compile its programs. Nothing is tested, loaded or allocated on the
            device, which need not be attached.
        plan: what the engine is made of, on devices that have been started; None: it is chosen here.
    """
    num_hosts, join = (1, None) if others is None else (others.num_hosts, others.join)
    if plan is None:
        started = {"num_hosts": num_hosts, "join": join, "folders": folders}
        plan = plan_engines(settings, report, tokenizer, backends, **started)[0]
    digests = start_digests(settings, plan.weights, plan.draft)
    store = None
    if settings.enable_lora:
        most = settings.max_cpu_loras or 2 * settings.max_loras
        store = RunnersStore(plan.weights.config, max_rank=settings.max_lora_rank, max_cpu=most)
    models = RunnersModels(plan) if settings.has_models else None
    make = partial(_make_runner, plan, store, models, report, others, only_programs=only_programs)
    runner, chosen = _choose_runner(plan, make, report, others, compiles=compile_meanwhile, is_here=not only_programs)
    loader = Loader(runner=runner, plan=plan, attention=chosen.attention, report=report)
    if not only_programs:
        try:
            loader.place(loader.read(plan.weights, keeps=True))
        except BaseException:
            runner.stop_compiling()
            raise
    if models is not None:
        models.read_with(loader)
        is_chip = not only_programs and plan.device.platform != "cpu"  # a CPU copies nothing
        if is_chip and (bound := models.describe_copy(runner.model())) is not None:
            report(f"  models            one in the host's memory comes to the device in {bound}")
    info = _engine_info(plan, runner, chosen)
    if settings.kv_offloading_size:
        num_tokens = int(settings.kv_offloading_size * GIB) // runner.capacity().page_bytes * info.page_size
        behind = "" if settings.kv_offloading_path is None else f", and behind it {settings.kv_offloading_path}"
        report(f"  offloading        the host's memory has room for {num_tokens} tokens of prefixes{behind}")
    return Built(
        runner=runner, plan=plan, info=info, loader=loader, adapter_store=store, models=models, digests=digests
    )


def _choose_runner(
    plan: EnginePlan,
    make: Callable[[PagedAttention], ModelRunner],
    report: Report,
    others: OtherHosts | None,
    *,
    compiles: bool,
    is_here: bool,
) -> tuple[ModelRunner, Chosen]:
    """Tests the attention backends. Returns the runner over the first one that can be used, and the test's result.

    Args:
        make: makes a runner.
        compiles: whether to start to compile the programs, or to trace them while another process tests the backend.
        is_here: whether the device can run a test.
    """
    chips, platform = plan.chips, plan.device.platform
    first, early = chips.first_attention(), None
    if (
        compiles
        and others is None
        and can_a_child_test(first.backend, may_fail=first.backend is not chips.candidates[-1])
    ):
        early = make(first)
        _start_compiling(plan, early, first, others, only_trace=True)
    used = None
    try:
        with phase("self-test", report) as say:
            chosen = choose_attention(
                plan.settings,
                chips.candidates,
                chips.attention,
                plan.ladder.config,
                platform=platform,
                max_model_len=chips.limits.max_model_len,
                folders=plan.device.folders,
                # A host cannot read the results of the other hosts' chips.
                make_tested=None if others is None else chips.share_of_a_chip,
                is_here=is_here,
                needs_four_bit=any(model.has_few_bits for model in (chips, chips.draft) if model is not None),
            )
            say("; ".join(chosen.remarks))
        if chosen.attention.backend is first.backend:
            used = early
    finally:
        if early is not None and used is None:
            early.stop_compiling()
    if used is not None:
        return used, chosen
    runner = make(chosen.attention)
    if compiles:
        # On a GPU, XLA's autotuner times kernels during compilation and keeps its choices: nothing else may run then.
        _start_compiling(plan, runner, chosen.attention, others, only_trace=platform == "gpu")
    return runner, chosen


def _make_runner(
    plan: EnginePlan,
    adapters: RunnersStore | None,
    models: RunnersModels | None,
    report: Report,
    others: OtherHosts | None,
    attention: PagedAttention,
    *,
    only_programs: bool,
) -> ModelRunner:
    """A runner without weights, with as many pages as there is room for on all hosts."""
    chips, device = plan.chips, plan.device
    for model in filter(None, (chips, chips.draft)):
        model.pack_for(attention.backend, model.planned)
    # An interpreted kernel calls back into this process and cannot be stored.
    make = partial(
        ModelRunner,
        chips.planned,
        attention,
        program_folder=None if attention.backend.is_interpreted else device.folders.programs,
        # Described TPUs give no executable that can be kept: a start finds their programs in JAX's cache.
        keeps_executables=others is None and (device.platform == "gpu" or not only_programs),
        draft=chips.draft_over(attention.backend),
        adapter_weights=None if adapters is None else adapters.weights,
        model_weights=None if models is None else models.weights,
    )
    runner = make(chips.limits)
    room = num_pages = runner.capacity().num_pages
    if others is not None:
        num_pages = others.agree(room, plan.facts(attention))
    elif not only_programs and (folder := device.folders.programs) is not None:
        if device.platform == "gpu":
            keep_description(folder)
        if (made := made_for(folder, runner, plan.facts(attention))) is not None:
            num_pages = made.num_pages or room
            report(f"  precompiled       {made.remark}")
    return runner if num_pages >= room else make(replace(chips.limits, num_pages=num_pages))


def _start_compiling(
    plan: EnginePlan, runner: ModelRunner, attention: PagedAttention, others: OtherHosts | None, *, only_trace: bool
) -> None:
    """Starts to compile the programs for the warm-up, which other processes trace, too."""
    buckets = plan.ladder.buckets()
    runner.start_compiling(buckets, list(plan.may_wait), only_trace=only_trace)
    if others is None:
        own = replace(
            plan.settings,
            attention_backend=str(attention.backend),
            max_model_len=plan.chips.limits.max_model_len,
            tensor_parallel_size=plan.chips.num_chips,
            models=None,  # programs do not depend on them
            models_folder=None,
            max_resident_models=None,
            models_host_memory=None,
        )
        again = partial(build_runner, report=_say_nothing, tokenizer=plan.tokenizer, only_programs=True)
        trace_ahead(runner, own, buckets, plan.device.platform, again)


def _say_nothing(line: str) -> None:
    """Drops a line of the report."""


def _engine_info(plan: EnginePlan, runner: ModelRunner, chosen: Chosen) -> EngineInfo:
    settings, config, spec = plan.settings, plan.weights.config, chosen.attention.spec
    max_model_len, num_tokens = plan.chips.limits.max_model_len, runner.capacity().num_pages * spec.page_size
    return EngineInfo(
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=plan.weights.eos_token_ids,
        logprobs_mode=settings.logprobs_mode,
        embedding_size=config.hidden_size if settings.enable_embeddings else None,
        attention=chosen.info,
        max_loras=settings.num_adapter_slots,
        max_models=runner.capacity().max_models,
        adapter_bytes=runner.described.adapter_bytes,
        page_size=spec.page_size,
        cache_config={
            "page_size": str(spec.page_size),
            "num_pages": str(runner.capacity().num_pages),
            "kv_cache_size_tokens": str(num_tokens),
            "kv_cache_max_concurrency": f"{num_tokens / max_model_len:.2f}",
            "cache_dtype": str(spec.kv_dtype),
            "enable_prefix_caching": str(settings.enable_prefix_caching),
            "memory_utilization": str(settings.memory_utilization),
            "attention_backend": str(chosen.attention.backend),
            "tensor_parallel_size": str(plan.chips.num_chips),
        },
    )
