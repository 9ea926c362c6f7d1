"""Builds the engines of the hosts of a cluster. The leader's engine serves, and the followers' replay its steps."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from batcher.step import WeightsKind
from model.inputs.words import described
from scripts.building.adapter_store import loaded_adapters
from scripts.building.limits import LEAST_MODELS
from scripts.building.runner import OtherHosts, build_runner, make_publisher, warm_engine
from scripts.building.shapes import Shapes
from scripts.flags.settings import EngineSettings, ServedSettings
from server.engine.adapters import AdapterStore
from server.engine.hosts.all_hosts import AllAdapters, AllModels, AllWeights
from server.engine.hosts.cluster import LEADER, Cluster
from server.engine.hosts.commands import Compile
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader
from server.engine.hosts.served import BroadcastRunner, FollowingEngine, end_hosts
from server.engine.process import BuiltEngine, Reporter
from server.engine.weight_changes import WeightChanges
from server.flag import flag_name
from server.text.tokenizer import ByteLevelTokenizer

# JAX ends all processes when one of them has been silent for so long. ZeroMQ's heartbeats detect this earlier.
JAX_SILENCE_S = 30
LEAVE_S = 5
# These settings may differ, because each host has its own folders. The hosts compare their models after reading them.
OF_ONE_HOST = ("model", "compile_cache", "lora_modules", "lora_folder", "kv_events_config")


def build_leader(served: ServedSettings, report: Reporter) -> BuiltEngine:
    """The engine of host 0, warmed up on all hosts. Raises HostsError if other hosts do not arrive, or differ."""
    cluster = _cluster(served)
    publisher = make_publisher(served.engine, report)
    leader = Leader(cluster, report.fail)
    with _telling(leader.fail):
        settings = _of_all(served.engine)
        leader.gather(_settings(settings), report)
        others = OtherHosts(num_hosts=cluster.num_hosts, join=partial(_join, cluster), agree=leader.agree)
        built = build_runner(settings, report, tokenizer=served.tokenizer, compile_meanwhile=True, others=others)
        store = None if built.adapter_store is None else AllAdapters(built.adapter_store, leader)
        tokenizer = partial(ByteLevelTokenizer.from_folder, served.tokenizer)
        runner = BroadcastRunner(built.runner, leader)
        engine = warm_engine(built, report, tokenizer, read_tokens=True, runner=runner, publisher=publisher)
        shapes = None if built.models is None else Shapes(built, engine, (), report)
        engines = engine if shapes is None else shapes.engines
        models = None if shapes is None else AllModels(shapes, leader)
        adapters = loaded_adapters(settings, store, engines, publisher, models)
    return BuiltEngine(
        engine=engines,
        info=built.info,
        adapters=adapters,
        weights=WeightChanges(engines, AllWeights(built.runner_weights(), leader)),
        after_shutdown=partial(end_hosts, engines, leader, _leave),
    )


def build_follower(served: ServedSettings, report: Reporter) -> BuiltEngine:
    """The engine of another host, with compiled programs. Raises HostsError if the leader does not answer, or fails."""
    cluster = _cluster(served)
    follower = Follower(cluster, report.fail)
    with _telling(follower.fail):
        settings = _of_all(served.engine)
        follower.arrive(_settings(settings), report)
        others = OtherHosts(num_hosts=cluster.num_hosts, join=partial(_join, cluster), agree=partial(_follow, follower))
        built = build_runner(settings, report, tokenizer=served.tokenizer, compile_meanwhile=True, others=others)
        command = follower.expect(Compile)
        follower.answer(command, lambda: built.runner.compile(command.buckets, lambda line: report(f"  {line}")))
    most_in_flight = served.engine.pipeline_depth
    weights = built.runner_weights()
    stores: dict[WeightsKind, AdapterStore] = {}
    if built.adapter_store is not None:
        stores[WeightsKind.ADAPTER] = built.adapter_store
    if built.models is not None:
        stores[WeightsKind.MODEL] = built.models
    engine = FollowingEngine(
        built.runner, follower, report, weights, stores, most_in_flight=most_in_flight, leave=_leave
    )
    return BuiltEngine(engine=engine, info=built.info)


def _of_all(settings: EngineSettings) -> EngineSettings:
    """The settings, with what a host could choose by its own free memory."""
    if not settings.has_models:
        return settings
    return dataclasses.replace(settings, max_resident_models=settings.max_resident_models or LEAST_MODELS)


def _cluster(served: ServedSettings) -> Cluster:
    assert served.cluster is not None, "one host has no cluster"
    return served.cluster


@contextmanager
def _telling(fail: Callable[[str], None]) -> Iterator[None]:
    """Tells the other hosts why the start has failed."""
    try:
        yield
    except BaseException as error:
        fail(described(error))
        raise


def _settings(settings: EngineSettings) -> dict[str, str]:
    """The settings that must be equal on all hosts, by flag."""
    fields = dataclasses.asdict(settings)
    own = {flag_name(EngineSettings, name): str(value) for name, value in fields.items() if name not in OF_ONE_HOST}
    return own | {"the version": importlib.metadata.version("pallas-serve")}


def _join(cluster: Cluster) -> None:
    """Joins the processes of all hosts, which have arrived. JAX listens on the coordinator's address only."""
    import jax

    # JAX would wait at SIGTERM for a point to save at. The server decides when its processes end.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.endpoint(),
        cluster.num_hosts,
        cluster.host_id,
        coordinator_bind_address=cluster.own_endpoint() if cluster.is_leader else None,
        cluster_detection_method="deactivate",
        initialization_timeout=int(max(1, cluster.timeout_s)),
        heartbeat_timeout_seconds=JAX_SILENCE_S,
        shutdown_timeout_seconds=LEAVE_S,
    )


def _follow(follower: Follower, num_pages: int, facts: Mapping[str, str]) -> int:
    """Reports this host's pages and facts to the leader. Returns the number of pages to use. Programs that are compiled
    afterwards are kept on disk."""
    from jax._src import distributed

    # JAX keeps the programs of process 0 only. On a CPU, and where hosts share no folder, a follower would then compile
    # at every start. With the devices there, this number has no other use.
    distributed.global_state.process_id = LEADER
    return follower.agree(num_pages, facts)


def _leave() -> None:
    import jax

    jax.distributed.shutdown()
