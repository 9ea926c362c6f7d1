"""Which chips each of several engines of one host has."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from model.execution.device_memory import DeviceMemory
from pallas_kernels.chips import GIB
from scripts.building import device as device_module
from scripts.building.replicas import claim_chips, compiling_first, replicas_of, wait_for_first
from scripts.flags.settings import EngineSettings, ServedSettings
from server.engine.hosts.cluster import Cluster

EIGHT = [str(number) for number in range(8)]


def served(**settings: object) -> ServedSettings:
    return ServedSettings(engine=EngineSettings(**settings), tokenizer=Path("model"))


def claimed(number: int, device: str, **settings: object) -> list[dict[str, str]]:
    environments = []
    for replica in replicas_of(served(**settings), number):
        environments.append({})
        claim_chips(replica, device, environments[-1], lambda device: EIGHT)
    return environments


def test_gpus_are_divided():
    assert claimed(4, "cuda") == [{"CUDA_VISIBLE_DEVICES": own} for own in ("0,1", "2,3", "4,5", "6,7")]
    assert claimed(2, "cuda", tensor_parallel_size=1) == [{"CUDA_VISIBLE_DEVICES": own} for own in ("0", "1")]


def test_tpus_are_divided():
    assert claimed(8, "tpu")[3] == {
        "TPU_VISIBLE_CHIPS": "3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    assert [own["TPU_VISIBLE_CHIPS"] for own in claimed(2, "tpu")] == ["0,1,2,3", "4,5,6,7"]
    assert claimed(2, "tpu")[1]["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"


@pytest.mark.parametrize(
    ("num_chips", "tensor_parallel_size", "own"),
    [(4, 2, ["0", "1", "2", "3"]), (4, None, ["0", "1", "2", "3"]), (4, 1, ["0", "1", "2", "3"]),
     (8, 2, ["0,1", "2,3", "4,5", "6,7"])],
)  # fmt: skip
def test_devices_are_divided_by_whole_chips(num_chips, tensor_parallel_size, own, tmp_path):
    """A tpu7x chip is two devices. A driver that lists eight of a host lists devices."""
    (tmp_path / "chip").mkdir()
    (tmp_path / "chip" / "vendor").write_text("0x1ae0\n")
    (tmp_path / "chip" / "device").write_text("0x0076\n")
    chips, found = [str(number) for number in range(num_chips)], []
    for replica in replicas_of(served(tensor_parallel_size=tensor_parallel_size), 4):
        environment: dict[str, str] = {}
        claim_chips(replica, "tpu", environment, lambda device: chips, tmp_path)
        found.append(environment["TPU_VISIBLE_CHIPS"])
    assert found == own
    if num_chips == 4:
        eighth = replicas_of(served(tensor_parallel_size=1), 8)[7]
        with pytest.raises(ValueError, match="there are 4 chips of 2 devices, which one engine has"):
            claim_chips(eighth, "tpu", {}, lambda device: chips, tmp_path)


def test_engines_of_a_cpu_share_the_memory():
    replica = replicas_of(served(memory_utilization=0.8), 4)[2]
    assert claim_chips(replica, "cpu", {}).memory_utilization == pytest.approx(0.2)


def test_engines_of_chips_share_the_hosts_memory(monkeypatch):
    memory = DeviceMemory(total=0, free=100 * GIB, is_host=True)
    monkeypatch.setattr(device_module, "host_memory", lambda: memory)
    for asked, expected in ((None, 12.5), (9.0, 9.0)):
        replica = replicas_of(served(models=["a=b"], models_host_memory=asked), 4)[2]
        assert claim_chips(replica, "cuda", {}, lambda device: EIGHT).models_host_memory == expected


def test_one_engine_has_everything():
    (only,) = replicas_of(served(), 1)
    environment: dict[str, str] = {}
    assert claim_chips(only, "cuda", environment) == only.engine
    assert environment == {}


@pytest.mark.parametrize(
    ("number", "device", "settings", "message"),
    [
        (9, "cuda", {}, r"--data-parallel-size 9 with 1 chip\(s\) each: there are 8 chips"),
        (4, "cuda", {"tensor_parallel_size": 4}, r"4 with 4 chip\(s\) each: there are 8 chips"),
        (2, "tpu", {"tensor_parallel_size": 3}, "a TPU process has 1, 2, 4, 8 chips, not 3"),
    ],
)
def test_what_cannot_be_divided_is_refused(number, device, settings, message):
    with pytest.raises(ValueError, match=message):
        claimed(number, device, **settings)


@pytest.mark.parametrize(
    ("number", "settings", "message"),
    [
        (2, {}, "--data-parallel-size is for one host"),
        (1, {"kv_offloading_size": 1}, "--kv-offloading-size: the pages of an engine of several hosts"),
    ],
)
def test_several_hosts_have_one_engine_of_one_model(number, settings, message):
    cluster = Cluster(coordinator="a", port=1, num_hosts=2, host_id=0, timeout_s=1, secret="0123456789abcdef")
    over_hosts = ServedSettings(engine=EngineSettings(**settings), tokenizer=Path("model"), cluster=cluster)
    with pytest.raises(ValueError, match=message):
        replicas_of(over_hosts, number)


def test_the_first_engine_compiles_for_all_where_programs_are_kept(tmp_path):
    file = tmp_path / "compiled-by-the-first"
    assert [one.compile_turn for one in replicas_of(served(), 2, tmp_path)] == [file, file]
    assert [one.compile_turn for one in replicas_of(served(), 1, tmp_path)] == [None]
    assert [one.compile_turn for one in replicas_of(served(compile_cache="none"), 2, tmp_path)] == [None, None]


def compile_first(file: Path, steps: Connection) -> None:
    steps.recv()
    with compiling_first(file):
        steps.send("compiling")
        steps.recv()


def wait_for_it(file: Path, steps: Connection) -> None:
    steps.send("waiting")
    wait_for_first(file)
    steps.send("compiled")


def test_the_others_wait_until_the_first_has_compiled_or_has_ended(tmp_path):
    spawning = multiprocessing.get_context("spawn")
    for number, ends_well in enumerate((True, False)):
        pipes, processes = [], []
        for target in (compile_first, wait_for_it, wait_for_it):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=target, args=(tmp_path / f"turn{number}", theirs))
            process.start()
            pipes.append(ours)
            processes.append(process)
        first, *others = pipes
        for other in others:
            assert other.recv() == "waiting"
        first.send("go")
        assert first.recv() == "compiling"
        assert not any(other.poll(0.2) for other in others)
        if ends_well:
            first.send("end")
        else:
            os.kill(processes[0].pid, signal.SIGKILL)
        assert [other.recv() for other in others] == ["compiled"] * 2
        for process in processes:
            process.join()
