"""Reads the hosts of one engine from flags, or from the environment that a cluster manager sets."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from server.engine.hosts.cluster import Cluster
from server.flag import Once, check_flags, setting

SECRET_VARIABLE = "PALLAS_SERVE_HOSTS_SECRET"
PORT = 8482  # JAX's own choice for TPUs
METADATA_TIMEOUT_S = 5.0


class ClusterInfo(NamedTuple):
    """This host's place among the hosts, from a cluster manager."""

    manager: str
    coordinator: str  # HOST or HOST:PORT
    num_hosts: int
    host_id: int


_of_hosts = partial(setting, group="hosts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFlags:
    """How many engines serve, and on which hosts."""

    GROUPS: ClassVar = {
        "replicas": "Several engines behind one server.",
        "hosts": "Several hosts that serve one model.",
    }

    data_parallel_size: int = setting(
        1, "Engines behind this server, each on its share of the chips", group="replicas", least=1, most=1024,
        also=("-dp",),
    )  # fmt: skip
    coordinator: str | None = _of_hosts(
        None, "HOST:PORT of host 0. It listens there and on the next two ports, at this address only. The first is "
        "JAX's own, which knows no secret: whoever reaches it can end the server on all hosts by one call. Let only "
        "the hosts reach it", unset="as their manager says", metavar="ADDR",
    )  # fmt: skip
    num_hosts: int | None = _of_hosts(
        None, "The number of hosts; 1: this one alone, and the environment is not read", unset="as their manager says",
    )  # fmt: skip
    host_id: int | None = _of_hosts(
        None, "This host's number from 0 on; host 0 serves", unset="as their manager says", metavar="I",
    )  # fmt: skip
    hosts_secret_file: Path | None = _of_hosts(  # noqa: RUF009
        None, "A file with the hosts' common secret", unset=f"${SECRET_VARIABLE}", action=Once, metavar="FILE",
    )  # fmt: skip
    hosts_timeout: float = _of_hosts(300.0, "Seconds for all hosts to arrive at the start", metavar="S")

    def __post_init__(self) -> None:
        check_flags(self)


def cluster_of(
    args: argparse.Namespace, environment: Mapping[str, str], *, has_tpu: Callable[[], bool]
) -> Cluster | None:
    """The hosts by the flags, or else by the environment; None: this host serves alone.

    Raises ValueError for incomplete flags, an environment that contradicts itself, or a missing secret.
    """
    flags = {"--coordinator": args.coordinator, "--num-hosts": args.num_hosts, "--host-id": args.host_id}
    given = [name for name, value in flags.items() if value is not None]
    if args.num_hosts == 1 and not args.host_id:
        return None
    if given and len(given) < len(flags):
        missing = ", ".join(name for name in flags if name not in given)
        raise ValueError(f"several hosts need {', '.join(flags)}: {missing} is missing")
    if given:
        place = ClusterInfo("flags", args.coordinator, args.num_hosts, args.host_id)
    else:
        found = find_place(environment, has_tpu=has_tpu)
        if found is None or found.num_hosts == 1:
            return None
        place = found
    coordinator, port = _split(place.coordinator)
    return Cluster(
        coordinator=coordinator,
        port=port,
        num_hosts=place.num_hosts,
        host_id=place.host_id,
        timeout_s=args.hosts_timeout,
        secret=_secret(args.hosts_secret_file, environment, place),
    )


def find_place(environment: Mapping[str, str], *, has_tpu: Callable[[], bool]) -> ClusterInfo | None:
    """This host's place, from the first cluster manager whose variables are set; None: there is none.

    Raises ValueError if a manager's variables are incomplete.
    """
    for manager, (address, size, index) in MANAGERS.items():
        if address in environment:
            nodes = environment[address]
            num_hosts = _number(environment, manager, size) if size else nodes.count(",") + 1
            if manager == "Slurm" and (tasks := _number(environment, manager, "SLURM_STEP_NUM_TASKS")) != num_hosts:
                raise ValueError(f"Slurm runs {tasks} tasks on {num_hosts} nodes: use srun --ntasks-per-node=1")
            host_id = 0 if num_hosts == 1 else _number(environment, manager, index)
            return ClusterInfo(manager, first_node(nodes), num_hosts, host_id)
    return _tpu_vm(environment) if has_tpu() and "TPU_SKIP_MDS_QUERY" not in environment else None


# The variables with the leader's address, the number of hosts, and this host's number. GKE's TPU jobs list all hosts in
# the first. A JobSet's manifest sets the first two, and Kubernetes the third. `SLURM_STEP_NODELIST` is missing in an
# allocation outside `srun`. In this order: LeaderWorkerSet's pods with TPUs have GKE's variables, too.
MANAGERS = {
    "LeaderWorkerSet": ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
    "GKE": ("TPU_WORKER_HOSTNAMES", "", "TPU_WORKER_ID"),
    "JobSet": ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JOB_COMPLETION_INDEX"),
    "Slurm": ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_PROCID"),
}


def first_node(nodes: str) -> str:
    """The first host of a list, which may be Slurm's: `n07` of `n[07-09,12],m1`. A single address is returned as it is,
    also one of IPv6 in brackets."""
    found = re.match(r"(\[[^\]]*\][^,]*|[^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    if found is None:
        raise ValueError(f"the list of hosts names none: {nodes!r}")
    return "".join(part or "" for part in found.groups())


def _tpu_vm(environment: Mapping[str, str]) -> ClusterInfo | None:
    """A Cloud TPU VM's place in its slice, by the machine's metadata server. None if the server has no such entry."""
    endpoints = _metadata(environment, "worker-network-endpoints")
    number = _metadata(environment, "agent-worker-number")
    if endpoints is None or number is None:
        return None
    addresses = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]  # `address`, or `name:id:address`
    return ClusterInfo("Cloud TPU", addresses[0], len(addresses), int(number))


def _metadata(environment: Mapping[str, str], name: str) -> str | None:
    """Raises ValueError if the server does not answer: whether there are other hosts is then unknown."""
    import urllib.error
    import urllib.request

    host = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise ValueError(f"{url}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"{url} does not answer ({error}), so it is unknown whether other hosts share this TPU slice: add "
            "--num-hosts 1 if there are none"
        ) from error


def _number(environment: Mapping[str, str], manager: str, name: str) -> int:
    if name not in environment:
        raise ValueError(f"the environment is {manager}'s, and the variable {name} is missing")
    if not environment[name].isdecimal():
        raise ValueError(f"the environment variable {name} is a number, not {environment[name]!r}")
    return int(environment[name])


def _split(coordinator: str) -> tuple[str, int]:
    """HOST:PORT, HOST, [V6]:PORT or [V6]. Raises ValueError for another form."""
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", coordinator)
    if found is None:
        raise ValueError(f"--coordinator is HOST:PORT, with an IPv6 address in brackets, not {coordinator!r}")
    host, port = found.groups()
    return host.strip("[]"), PORT if port is None else int(port)


def _secret(file: Path | None, environment: Mapping[str, str], place: ClusterInfo) -> str:
    secret = environment.get(SECRET_VARIABLE, "") if file is None else file.read_text(encoding="utf-8")
    if not secret.strip():
        where = f"${SECRET_VARIABLE} is empty or not set" if file is None else f"{file} is empty"
        raise ValueError(
            f"{place.num_hosts} hosts ({place.manager}) need a common secret, and {where}: for example the output of "
            "`openssl rand -hex 32`, by --hosts-secret-file or that variable (--num-hosts 1: serve on this host alone)"
        )
    return secret.strip()
