"""The fields of the Kubernetes resources that the manifests use, with their types. An unknown field is an error.

Kubernetes ignores or refuses a misspelt field only when it is applied. The names and types of the resources of
Kubernetes itself are those of its API (1.33); the others are those of the custom resources' own schemas.
"""

from __future__ import annotations

import re
from typing import Any

# name -> field -> type. "!": required. A list is of one type, "map" is of texts to texts.
FIELDS: dict[str, dict[str, Any]] = {
    "Meta": {"name!": "name", "labels": "map", "annotations": "map", "namespace": "name"},
    "PodMeta": {"labels!": "map", "annotations": "map"},
    "Selector": {"matchLabels!": "map"},
    "Deployment": {"apiVersion!": "apps/v1", "kind!": "text", "metadata!": "Meta", "spec!": "DeploymentSpec"},
    "DeploymentSpec": {
        "replicas": "int", "selector!": "Selector", "strategy": "Strategy", "template!": "PodTemplate",
    },
    "Strategy": {"type": ("RollingUpdate", "Recreate"), "rollingUpdate": "RollingUpdate"},
    "RollingUpdate": {"maxSurge": "int", "maxUnavailable": "int"},
    "PodTemplate": {"metadata!": "PodMeta", "spec!": "PodSpec"},
    "PodSpec": {
        "containers!": ["Container"], "volumes": ["Volume"], "nodeSelector": "map", "affinity": "Affinity",
        "tolerations": ["Toleration"], "securityContext!": "PodSecurity", "terminationGracePeriodSeconds": "int",
    },
    "Affinity": {"nodeAffinity!": "NodeAffinity"},
    "NodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution!": "NodeSelector"},
    "NodeSelector": {"nodeSelectorTerms!": ["NodeTerm"]},
    "NodeTerm": {"matchExpressions!": ["Expression"]},
    "Expression": {"key!": "text", "operator!": ("In", "NotIn", "Exists", "Gt", "Lt"), "values": ["text"]},
    "Toleration": {
        "key": "text", "operator": ("Exists", "Equal"), "value": "text", "effect": ("NoSchedule", "NoExecute"),
    },
    "PodSecurity": {
        "runAsNonRoot!": "bool", "runAsUser!": "int", "runAsGroup": "int", "fsGroup": "int",
        "fsGroupChangePolicy": ("OnRootMismatch", "Always"), "seccompProfile!": "Seccomp",
    },
    "Seccomp": {"type!": ("RuntimeDefault",)},
    "ContainerSecurity": {
        "allowPrivilegeEscalation!": "bool", "readOnlyRootFilesystem!": "bool", "capabilities!": "Capabilities",
    },
    "Capabilities": {"drop!": ["text"], "add": ["text"]},
    "PodDisruptionBudget": {"apiVersion!": "policy/v1", "kind!": "text", "metadata!": "Meta", "spec!": "BudgetSpec"},
    "BudgetSpec": {"maxUnavailable": "int", "minAvailable": "int", "selector!": "Selector"},
    "Container": {
        "name!": "name", "image!": "text", "args": ["text"], "env": ["Env"], "envFrom": ["EnvFrom"],
        "ports": ["ContainerPort"], "startupProbe!": "Probe", "readinessProbe!": "Probe", "livenessProbe": "Probe",
        "lifecycle!": "Lifecycle", "volumeMounts": ["Mount"], "resources!": "Resources",
        "securityContext!": "ContainerSecurity",
    },
    "Env": {"name!": "text", "value": "text", "valueFrom": "EnvSource"},
    "EnvSource": {"secretKeyRef": "KeyRef", "fieldRef": "FieldRef"},
    "FieldRef": {"fieldPath!": "text"},
    "KeyRef": {"name!": "name", "key!": "text", "optional": "bool"},
    "EnvFrom": {"configMapRef!": "Ref"},
    "Ref": {"name!": "name"},
    "ContainerPort": {"name!": "name", "containerPort!": "int"},
    "Probe": {
        "httpGet!": "HttpGet", "periodSeconds": "int", "timeoutSeconds": "int", "failureThreshold": "int",
    },
    "HttpGet": {"path!": "text", "port!": "port"},
    "Lifecycle": {"preStop!": "PreStop"},
    "PreStop": {"sleep!": "Sleep"},
    "Sleep": {"seconds!": "int"},
    "Mount": {"name!": "name", "mountPath!": "text"},
    "Volume": {"name!": "name", "persistentVolumeClaim": "Claim", "emptyDir": "EmptyDir"},
    "Claim": {"claimName!": "name"},
    "EmptyDir": {"medium": ("Memory",)},
    "Resources": {"requests": "map", "limits!": "map"},
    "Service": {"apiVersion!": "v1", "kind!": "text", "metadata!": "Meta", "spec!": "ServiceSpec"},
    "ServiceSpec": {"selector!": "map", "ports!": ["ServicePort"]},
    "ServicePort": {"name!": "name", "port!": "int", "targetPort": "port"},
    "ConfigMap": {"apiVersion!": "v1", "kind!": "text", "metadata!": "Meta", "data!": "map"},
    "PersistentVolumeClaim": {"apiVersion!": "v1", "kind!": "text", "metadata!": "Meta", "spec!": "ClaimSpec"},
    "ClaimSpec": {"accessModes!": ["text"], "resources!": "ClaimResources", "storageClassName": "name"},
    "ClaimResources": {"requests!": "map"},
    "HorizontalPodAutoscaler": {
        "apiVersion!": "autoscaling/v2", "kind!": "text", "metadata!": "Meta", "spec!": "AutoscalerSpec",
    },
    "AutoscalerSpec": {
        "scaleTargetRef!": "TypedRef", "minReplicas": "int", "maxReplicas!": "int", "metrics!": ["Metric"],
        "behavior": "Behavior",
    },
    "TypedRef": {"apiVersion!": "text", "kind!": "text", "name!": "name"},
    "Metric": {"type!": ("Pods",), "pods!": "PodsMetric"},
    "PodsMetric": {"metric!": "MetricName", "target!": "MetricTarget"},
    "MetricName": {"name!": "text"},
    "MetricTarget": {"type!": ("AverageValue",), "averageValue!": "text"},
    "Behavior": {"scaleUp": "Scaling", "scaleDown": "Scaling"},
    "Scaling": {"stabilizationWindowSeconds": "int", "policies": ["ScalingPolicy"]},
    "ScalingPolicy": {"type!": ("Pods", "Percent"), "value!": "int", "periodSeconds!": "int"},
    "LeaderWorkerSet": {
        "apiVersion!": "leaderworkerset.x-k8s.io/v1", "kind!": "text", "metadata!": "Meta", "spec!": "GroupSpec",
    },
    "GroupSpec": {
        "replicas": "int", "startupPolicy": ("LeaderCreated", "LeaderReady"), "leaderWorkerTemplate!": "GroupTemplate",
    },
    "GroupTemplate": {
        "size!": "int", "restartPolicy": ("RecreateGroupOnPodRestart", "None"), "workerTemplate!": "PodTemplate",
    },
    "PodMonitoring": {
        "apiVersion!": "monitoring.googleapis.com/v1", "kind!": "text", "metadata!": "Meta", "spec!": "MonitoringSpec",
    },
    "MonitoringSpec": {"selector!": "Selector", "endpoints!": ["ScrapeEndpoint"]},
    "ScrapeEndpoint": {"port!": "port", "path": "text", "interval!": "text"},
    "PodMonitor": {
        "apiVersion!": "monitoring.coreos.com/v1", "kind!": "text", "metadata!": "Meta", "spec!": "PodMonitorSpec",
    },
    "PodMonitorSpec": {"selector!": "Selector", "podMetricsEndpoints!": ["ScrapeEndpoint"]},
    "InferencePool": {
        "apiVersion!": "inference.networking.k8s.io/v1", "kind!": "text", "metadata!": "Meta", "spec!": "PoolSpec",
    },
    "PoolSpec": {"selector!": "Selector", "targetPorts!": ["Port"], "endpointPickerRef!": "PickerRef"},
    "Port": {"number!": "int"},
    "PickerRef": {
        "name!": "name", "port!": "Port", "failureMode": ("FailOpen", "FailClose"), "group": "text", "kind": "text",
    },
    "HTTPRoute": {
        "apiVersion!": "gateway.networking.k8s.io/v1", "kind!": "text", "metadata!": "Meta", "spec!": "RouteSpec",
    },
    "RouteSpec": {"parentRefs!": ["GroupRef"], "rules!": ["Rule"]},
    "GroupRef": {"group": "text", "kind": "text", "name!": "name"},
    "Rule": {"matches": ["Match"], "backendRefs!": ["GroupRef"]},
    "Match": {"path!": "PathMatch"},
    "PathMatch": {"type": ("PathPrefix", "Exact"), "value!": "text"},
}  # fmt: skip

CHECKS = {
    "text": lambda value: isinstance(value, str),
    "int": lambda value: type(value) is int,
    "bool": lambda value: isinstance(value, bool),
    "name": lambda value: isinstance(value, str) and re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", value),
    "port": lambda value: isinstance(value, str) or (type(value) is int and 0 < value < 65536),
    "map": lambda value: isinstance(value, dict) and all(isinstance(x, str) for pair in value.items() for x in pair),
}


def problems(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource, a line each."""
    kind = str(resource.get("kind"))
    return _problems(resource, kind, kind) if kind in FIELDS else [f"{kind}: an unknown kind"]


def _problems(value: Any, kind: Any, place: str) -> list[str]:
    if isinstance(kind, list):
        if not isinstance(value, list) or not value:
            return [f"{place}: not a list of {kind[0]}"]
        return [line for i, item in enumerate(value) for line in _problems(item, kind[0], f"{place}[{i}]")]
    if isinstance(kind, tuple):
        return [] if value in kind else [f"{place}: {value!r} is none of {kind}"]
    if kind in CHECKS:
        return [] if CHECKS[kind](value) else [f"{place}: {value!r} is not a {kind}"]
    if kind not in FIELDS:  # a constant
        return [] if value == kind else [f"{place}: {value!r} is not {kind}"]
    if not isinstance(value, dict):
        return [f"{place}: {value!r} is not a {kind}"]
    types = {name.rstrip("!"): type_ for name, type_ in FIELDS[kind].items()}
    required = {name[:-1] for name in FIELDS[kind] if name.endswith("!")}
    lines = [f"{place}.{name}: missing" for name in sorted(required - set(value))]
    for name, item in value.items():
        where = f"{place}.{name}"
        lines += _problems(item, types[name], where) if name in types else [f"{where}: an unknown field"]
    return lines
