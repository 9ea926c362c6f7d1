"""The manifests, built by kustomize where kubectl is, against the fields of the resources and the server's flags."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import launch
from scripts.flags.cluster import SECRET_VARIABLE, cluster_of
from scripts.flags.settings import EngineSettings
from server.settings import Settings
from tests.scripts.kubernetes_fields import problems

FOLDER = Path(__file__).parents[2] / "scripts/deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
CHIPS = {"gke-tpu-v6e": 1, "gke-tpu-v5e": 4, "gke-tpu7x": 8, "gke-tpu-v6e-hosts": 16, "gke-gpu": 8, "nvidia-gpu": 1}


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    """The resources of an overlay. kubectl reads the folder only: it asks no cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl builds the overlays: install it")
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = (resource for resource in built(overlay) if resource["kind"] == kind)
    return found


def workload(overlay: str) -> dict[str, Any]:
    """The pods' template."""
    if overlay.endswith("hosts"):
        return of_kind(overlay, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return of_kind(overlay, "Deployment")["spec"]["template"]


def test_every_overlay_is_tested():
    assert set(CHIPS) == set(OVERLAYS)


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_files_are_valid_alone(file):
    """Without kubectl, too. The overlays add resources and the images' names."""
    for document in yaml.safe_load_all(file.read_text()):
        if document is None or "kind" not in document or document["kind"] in ("Kustomization", "Component"):
            continue
        assert [line for line in problems(document) if not line.endswith(".resources: missing")] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay):
    for resource in built(overlay):
        assert problems(resource) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_reference_has_its_resource(overlay):
    resources = {(resource["kind"], resource["metadata"]["name"]) for resource in built(overlay)}
    spec = workload(overlay)["spec"]
    container = spec["containers"][0]
    assert ("ConfigMap", container["envFrom"][0]["configMapRef"]["name"]) in resources
    assert ("PersistentVolumeClaim", spec["volumes"][0]["persistentVolumeClaim"]["claimName"]) in resources
    target = of_kind(overlay, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in resources
    backend = of_kind(overlay, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) in resources
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_the_pods_that_serve(overlay):
    labels = workload(overlay)["metadata"]["labels"]
    if overlay.endswith("hosts"):
        labels = labels | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # LeaderWorkerSet's own, on leaders
    monitors = {"PodMonitoring", "PodMonitor"} & {resource["kind"] for resource in built(overlay)}
    selectors = [of_kind(overlay, "Service")["spec"]["selector"]]
    selectors += [of_kind(overlay, kind)["spec"]["selector"]["matchLabels"] for kind in ("InferencePool", *monitors)]
    assert all(selector.items() <= labels.items() for selector in selectors)
    if overlay.endswith("hosts"):
        assert all("leaderworkerset.sigs.k8s.io/worker-index" in selector for selector in selectors)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_service_has_the_name_of_one_that_a_group_makes(overlay):
    """LeaderWorkerSet makes a headless Service of its own name, unless there is one. Its hosts are found in it."""
    names = [resource["metadata"]["name"] for resource in built(overlay) if resource["kind"] == "LeaderWorkerSet"]
    assert len(names) == overlay.endswith("hosts")
    assert of_kind(overlay, "Service")["metadata"]["name"] not in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_more_rights_than_they_need(overlay):
    spec = workload(overlay)["spec"]
    is_tpu = "tpu" in overlay  # whose devices belong to root
    assert spec["securityContext"]["runAsNonRoot"] is not is_tpu
    assert (spec["securityContext"]["runAsUser"] == 0) is is_tpu
    emptied = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
    for container in spec["containers"]:
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {mounts["/tmp"], mounts["/dev/shm"]} <= emptied


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nodes_are_drained_pod_by_pod(overlay):
    budget = of_kind(overlay, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= workload(overlay)["metadata"]["labels"].items()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_claim_of_many_nodes_names_its_class(overlay):
    """The default class of most clusters has disks of one node."""
    claim = of_kind(overlay, "PersistentVolumeClaim")["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"] or "storageClassName" in claim


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_with_gpus_are_put_on_nodes_with_a_driver_for_cuda_13(overlay):
    spec = workload(overlay)["spec"]
    selected = {"cloud.google.com/gke-gpu-driver-version": "latest"}.items() <= spec.get("nodeSelector", {}).items()
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    newer = {"key": "nvidia.com/cuda.runtime-version.major", "operator": "Gt", "values": ["12"]}
    asked = any(newer in term["matchExpressions"] for term in terms.get("nodeSelectorTerms", ()))
    assert (selected or asked) == ("gpu" in overlay)
    if overlay == "nvidia-gpu":  # GKE adds it to pods that ask for GPUs
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


def arguments(overlay: str) -> argparse.Namespace:
    """The flags of the server, as it reads them."""
    config = of_kind(overlay, "ConfigMap")["data"]
    (container,) = workload(overlay)["spec"]["containers"]
    given = []
    for argument in container["args"]:
        for name, value in config.items():
            argument = argument.replace(f"$({name})", value)
        given.append(argument)
    return launch.parser().parse_args(given)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_idle_connections_outlive_those_of_load_balancers(overlay):
    """Google's keep idle connections for 600 s. A request on one that the server is closing would be a 502."""
    assert arguments(overlay).idle_timeout > 600


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_accepts_the_arguments(overlay):
    args = arguments(overlay)
    (container,) = workload(overlay)["spec"]["containers"]
    assert args.tensor_parallel_size == CHIPS[overlay]
    assert args.metrics_prefix == "vllm:"
    assert args.port == container["ports"][0]["containerPort"]
    devices = int(next(iter(container["resources"]["limits"].values())))
    hosts = of_kind(overlay, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"] if "hosts" in overlay else 1
    assert CHIPS[overlay] == devices * hosts * (2 if "tpu7x" in overlay else 1)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_given_the_time_to_drain(overlay):
    (grace_s,) = (field.default for field in dataclasses.fields(Settings) if field.name == "grace_period_s")
    spec = workload(overlay)["spec"]
    pause = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= pause + grace_s + 10


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_liveness_ignores_draining_and_readiness_does_not(overlay):
    (container,) = workload(overlay)["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_hosts_of_a_group_find_each_other():
    (container,) = workload("gke-tpu-v6e-hosts")["spec"]["containers"]
    secrets = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry}
    assert not secrets[SECRET_VARIABLE].get("optional")
    given = {"LWS_LEADER_ADDRESS": "leader", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", SECRET_VARIABLE: "s" * 64}
    cluster = cluster_of(launch.parser().parse_args([]), given, has_tpu=lambda: True)
    assert cluster is not None
    assert (cluster.num_hosts, cluster.host_id, cluster.coordinator) == (4, 3, "leader")


@pytest.mark.parametrize("overlay", ["gke-gpu", "gke-tpu-v6e-hosts"])
def test_the_component_of_events_adds_to_an_overlay(overlay, tmp_path):
    folder = tmp_path / overlay
    folder.mkdir()
    parts = {"resources": f"overlays/{overlay}", "components": "components/kv-events"}
    own = {kind: [os.path.relpath(FOLDER / part, folder)] for kind, part in parts.items()}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    overlay = str(folder)
    assert [line for resource in built(overlay) for line in problems(resource)] == []
    (container,) = workload(overlay)["spec"]["containers"]
    config = EngineSettings.from_namespace(arguments(overlay)).kv_events
    assert config is not None and config.replay_endpoint is not None
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in (config.endpoint, config.replay_endpoint)}
    assert ports == {port["containerPort"] for port in container["ports"][1:]} == {5556, 5559}
    assert config.topic == "kv@$(POD_IP):8000@meta-llama/Llama-3.3-70B-Instruct"
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
