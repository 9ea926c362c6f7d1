"""Where a host finds its place among the hosts of one engine."""

from __future__ import annotations

import argparse
import http.server
import threading
from collections.abc import Iterator

import pytest

from scripts.flags.cluster import SECRET_VARIABLE, ClusterFlags, ClusterInfo, cluster_of, find_place, first_node
from server.flag import add_flags

SECRET = "0123456789abcdef"
LWS = {"LWS_LEADER_ADDRESS": "s-0.s.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
GKE = {"TPU_WORKER_HOSTNAMES": "job-0.svc,job-1.svc", "TPU_WORKER_ID": "1"}
JOB = {"JAX_COORDINATOR_ADDRESS": "job-0:1234", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "0"}
SLURM = {
    "SLURM_STEP_NODELIST": "n[07-09]", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2",
}  # fmt: skip


def place(environment: dict[str, str], *, has_tpu: bool = False) -> ClusterInfo | None:
    return find_place(environment, has_tpu=lambda: has_tpu)


def cluster(*flags: str, environment: dict[str, str] | None = None):
    parser = argparse.ArgumentParser()
    add_flags(parser, ClusterFlags)
    variables = {SECRET_VARIABLE: SECRET} if environment is None else environment
    return cluster_of(parser.parse_args(flags), variables, has_tpu=lambda: False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (LWS, ("LeaderWorkerSet", "s-0.s.default", 4, 2)),
        (GKE, ("GKE", "job-0.svc", 2, 1)),
        (LWS | GKE, ("LeaderWorkerSet", "s-0.s.default", 4, 2)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ("GKE", "localhost", 1, 0)),
        (JOB, ("JobSet", "job-0:1234", 2, 0)),
        (SLURM, ("Slurm", "n07", 3, 2)),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, None),  # an allocation outside srun
    ],
)
def test_managers_of_machines(environment, expected):
    if expected is not None:
        manager, coordinator, num_hosts, host_id = expected
        expected = ClusterInfo(manager=manager, coordinator=coordinator, num_hosts=num_hosts, host_id=host_id)
    assert place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LWS_LEADER_ADDRESS": "a"}, "LeaderWorkerSet's, and the variable LWS_GROUP_SIZE is missing"),
        (LWS | {"LWS_GROUP_SIZE": "four"}, "LWS_GROUP_SIZE is a number, not 'four'"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "24"}, "24 tasks on 3 nodes: use srun --ntasks-per-node=1"),
    ],
)
def test_environments_that_contradict_themselves(environment, message):
    with pytest.raises(ValueError, match=message):
        place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n07", "n07"),
        ("n[07-09,12],m1", "n07"),
        ("node001,host2", "node001"),
        ("a[1,3]b,c", "a1b"),
        ("r-2-n[3]", "r-2-n3"),
        ("[fd00::5]:8482", "[fd00::5]:8482"),
        ("job-0.svc:1234", "job-0.svc:1234"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_node(nodes) == first


class Metadata(http.server.BaseHTTPRequestHandler):
    entries: dict[str, str]

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        text = self.entries.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """A metadata server's entries, and the environment that names the server."""
    entries: dict[str, str] = {}
    handler = type("Entries", (Metadata,), {"entries": entries})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield entries, {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("endpoints", ["10.0.0.5,10.0.0.6", "w-0:123:10.0.0.5,w-1:124:10.0.0.6"])
def test_a_tpu_vm_asks_its_metadata_server(metadata, endpoints):
    entries, environment = metadata
    assert place(environment, has_tpu=True) is None
    entries |= {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
    expected = ClusterInfo(manager="Cloud TPU", coordinator="10.0.0.5", num_hosts=2, host_id=1)
    assert place(environment, has_tpu=True) == expected
    assert place(environment) is None
    assert place(environment | {"TPU_SKIP_MDS_QUERY": "1"}, has_tpu=True) is None


def test_a_metadata_server_that_does_not_answer_is_an_error():
    with pytest.raises(ValueError, match=r"does not answer .*add --num-hosts 1 if there are none"):
        place({"GCE_METADATA_IP": "127.0.0.1:1"}, has_tpu=True)


def test_flags_name_the_hosts(tmp_path):
    flags = ["--coordinator", "[::1]:900", "--num-hosts", "2", "--host-id", "1", "--hosts-timeout", "7"]
    found = cluster(*flags)
    assert (found.coordinator, found.port, found.num_hosts, found.host_id) == ("::1", 900, 2, 1)
    assert (found.timeout_s, found.secret, found.is_leader) == (7, SECRET, False)
    file = tmp_path / "secret"
    file.write_text("another secret, of a file\n")
    assert cluster(*flags, "--hosts-secret-file", str(file)).secret == "another secret, of a file"


def test_flags_win_over_the_environment():
    environment = LWS | {SECRET_VARIABLE: SECRET}
    assert cluster(environment=environment).coordinator == "s-0.s.default"
    assert cluster(environment=environment).port == 8482
    assert cluster("--num-hosts", "1", environment=environment) is None
    flags = ["--coordinator", "other", "--num-hosts", "3", "--host-id", "0"]
    assert cluster(*flags, environment=environment).coordinator == "other"
    assert cluster(environment={}) is None


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--num-hosts", "2"], {}, "--coordinator, --host-id is missing"),
        (["--coordinator", "a:b", "--num-hosts", "2", "--host-id", "0"], {}, "--coordinator is HOST:PORT"),
        ([], LWS, rf"4 hosts \(LeaderWorkerSet\) need a common secret, and \${SECRET_VARIABLE} is empty or not set"),
        ([], LWS | {SECRET_VARIABLE: "short"}, "16 are the least"),
    ],
)
def test_flags_that_are_incomplete(flags, environment, message):
    with pytest.raises(ValueError, match=message):
        cluster(*flags, environment=environment)
