"""scripts/deploy: the script for TPU VMs against a gcloud that records its calls, and what it runs on the hosts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import launch
from tests.scripts.test_setup import fake_command, installed, machine, shell  # noqa: F401

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts/deploy"
SCRIPT = DEPLOY / "tpu_vm.sh"
# Archives of the checkout are compressed as they are for users, but less.
QUICKLY = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "tar.tgz.command", "GIT_CONFIG_VALUE_0": "gzip -cn -1"}
PLACE = ("--name", "slice", "--zone", "us-east5-b")
FLEX = ("--provisioning", "flex-start", "--wait-for")

# What gcloud says, and what the script adds.
FAILURES = {
    "ERROR: (gcloud.compute.tpus.tpu-vm.create) RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' "
    "has been exceeded. Limit: 0 in zone us-east5-b.": "quota for v6e in us-east5-b is too small",
    "ERROR: (gcloud.compute.instances.create) Could not fetch resource: Quota 'TPUS_PER_TPU_FAMILY' exceeded. "
    "Limit: 0.0 in region us-east5.": "quota for v6e in us-east5-b is too small",
    'ERROR: (gcloud.compute.tpus.tpu-vm.create) {"code": 8, "message": "There is no more capacity in the zone '
    '\\"us-east5-b\\""}': "no free v6e now: take --provisioning queued or flex-start",
    "ERROR: (gcloud.compute.instances.create) Could not fetch resource: - The zone 'projects/p/zones/us-east5-b' does "
    "not have enough resources available to fulfill the request.": "no free v6e now",
    "ERROR: (gcloud.compute.instances.create) Could not fetch resource: - The resource "
    "'projects/p/zones/us-east5-b/instances/slice' already exists": "slice exists already",
    "ERROR: (gcloud.compute.tpus.tpu-vm.create) PERMISSION_DENIED: Cloud TPU API has not been used in project 7 "
    "before or it is disabled.": "the API is not enabled",
    "ERROR: (gcloud.compute.instances.describe) Could not fetch resource: - The resource "
    "'projects/p/zones/us-east5-b/instances/slice' was not found": "there is no slice now: a flex-start slice is",
}


@pytest.fixture
def cloud(tmp_path):
    """A function that runs the script with a gcloud that records its calls and fails as it is told."""
    log = tmp_path / "calls"
    fake_command(
        tmp_path / "bin/gcloud",
        f"""{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >>{log}
[ -z "$FAKE_ERROR" ] || {{ printf '%s\\n' "$FAKE_ERROR" >&2; exit 1; }}
case "$*" in
*list-instances*) printf 'slice-abcd\\nslice-efgh\\n' ;;
*"ssh slice-abcd"*agent-worker-number) echo 1 ;;
*"ssh slice-efgh"*agent-worker-number) echo 0 ;;
"config get-value project") echo my-project ;;
esac""",
    )

    def run(*words: str, error: str = "") -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        log.unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "FAKE_ERROR": error, **QUICKLY}
        done = subprocess.run([str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False)
        return done, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return run


def unplaced(call: list[str]) -> list[str]:
    """Without the folder of the checkout's archive, which is another each time."""
    return [re.sub(r"^/tmp/\S+/pallas", "pallas", word) for word in call]


def value(call: list[str], flag: str) -> str:
    return call[call.index(flag) + 1]


@pytest.mark.parametrize(
    ("target", "more", "group", "flags"),
    [
        ("v6e:2x4", (), "compute instances create", {"--machine-type": "ct6e-standard-8t"}),
        ("v6e:1x1", (), "compute instances create", {"--machine-type": "ct6e-standard-1t"}),
        ("v6e:2x4", ("--provisioning", "spot"), "compute instances create", {"--provisioning-model": "SPOT"}),
        (
            "tpu7x:2x2x1", ("--provisioning", "flex-start", "--run-for", "5h"), "compute instances create",
            {"--machine-type": "tpu7x-standard-4t", "--max-run-duration": "5h"},
        ),
        ("v5e:2x4", (), "compute tpus tpu-vm create", {"--accelerator-type": "v5litepod-8"}),
        ("v5p:2x2x1", ("--api", "tpu"), "compute tpus tpu-vm create", {"--accelerator-type": "v5p-8"}),
        (
            "v6e:4x4", ("--provisioning", "queued", "--wait-for", "6h"), "compute tpus queued-resources create",
            {"--accelerator-type": "v6e-16", "--runtime-version": "v2-alpha-tpuv6e", "--valid-until-duration": "6h"},
        ),
        (
            "v6e:2x4", ("--api", "tpu", "--provisioning", "flex-start"), "alpha compute tpus queued-resources create",
            {"--max-run-duration": "24h"},
        ),
    ],
)  # fmt: skip
def test_a_slice_of_either_api_is_created(cloud, target, more, group, flags):
    done, calls = cloud("create", "--target", target, *PLACE, *more, "--project", "mine")
    assert done.returncode == 0, done.stderr
    (call,) = calls
    words = group.split()
    assert call[: len(words) + 1] == [*words, "slice"]
    assert {flag: value(call, flag) for flag in flags} == flags
    assert (value(call, "--zone"), value(call, "--project")) == ("us-east5-b", "mine")


def test_several_hosts_of_compute_engine_are_a_group_with_a_topology(cloud):
    done, calls = cloud("create", "--target", "v6e:4x4", *PLACE)
    assert done.returncode == 0, done.stderr
    policy, template, _, group = calls
    assert policy[:5] == ["compute", "resource-policies", "create", "workload-policy", "slice"]
    assert value(policy, "--accelerator-topology") == "4x4"
    assert value(template, "--machine-type") == "ct6e-standard-4t"
    assert value(group, "--size") == "4"
    assert value(group, "--workload-policy") == "projects/my-project/regions/us-east5/resourcePolicies/slice"
    _, calls = cloud("delete", "--target", "v6e:4x4", *PLACE)
    assert [call[1:3] for call in calls] == [
        ["instance-groups", "managed"], ["instance-templates", "delete"], ["resource-policies", "delete"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("api", "waits", "flag"),
    [("compute", "2h", "--request-valid-for-duration"), ("compute", "1h60m", "--request-valid-for-duration"),
     ("tpu", "1d12h", "--valid-until-duration")],
)  # fmt: skip
def test_a_request_waits_for_as_long_as_its_api_allows_and_its_end_is_announced(cloud, api, waits, flag):
    done, calls = cloud("create", "--target", "v6e:2x4", *PLACE, "--api", api, *FLEX, waits, "--run-for", "5h")
    assert done.returncode == 0, done.stderr
    assert [value(call, flag) for call in calls] == [waits]
    assert f"slice waits for chips for {waits}, and is deleted 5h after its start" in done.stderr


def test_the_hosts_of_a_slice_that_waits_come_all_at_once(cloud):
    """Only flex-start has this mode."""
    _, calls = cloud("create", "--target", "v6e:4x4", *PLACE, "--provisioning", "flex-start")
    assert value(calls[-1], "--target-size-policy-mode") == "bulk"
    _, calls = cloud("create", "--target", "v6e:4x4", *PLACE, "--provisioning", "spot")
    assert "--target-size-policy-mode" not in calls[-1]


@pytest.mark.parametrize("target", ["v6e:2x4", "v6e:4x4"])
def test_a_boot_disk_has_the_size_that_is_asked_for(cloud, target):
    for flags, size in (((), "200GB"), (("--boot-disk-size", "400GB"), "400GB")):
        _, calls = cloud("create", "--target", target, *PLACE, *flags)
        assert [value(call, "--boot-disk-size") for call in calls if "--boot-disk-size" in call] == [size]


@pytest.mark.parametrize("verb", ["create", "setup", "serve", "status", "logs", "ssh", "delete"])
@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4"])
def test_a_dry_run_prints_the_commands_and_runs_none(cloud, verb, target):
    done, calls = cloud(verb, "--target", target, *PLACE, "--dry-run", "--", "--model", "demo")
    assert done.returncode == 0, done.stderr
    assert calls == []
    printed = [line for line in done.stdout.splitlines() if line.startswith("gcloud ")]
    _, calls = cloud(verb, "--target", target, *PLACE, "--", "--model", "demo")
    assert calls
    assert [unplaced(shlex.split(line)[1:]) for line in printed] == [unplaced(call) for call in calls]


def test_every_host_serves_and_knows_its_place(cloud):
    serve = "sudo /opt/pallas-serve/scripts/deploy/host/serve.sh --device tpu --model m"
    done, calls = cloud("serve", "--target", "v6e:4x4", *PLACE, "--", "--model", "m")
    assert done.returncode == 0, done.stderr
    commands = {call[2]: value(call, "--command") for call in calls if call[:2] == ["compute", "ssh"]}
    assert commands == {
        host: f"{serve} --coordinator slice-efgh --num-hosts 4 --host-id {i}"
        for i, host in enumerate(("slice-efgh", "slice-abcd"))  # by their worker numbers, not as the group lists them
    }
    args = launch.parser().parse_args(commands["slice-abcd"].split()[2:])
    assert (args.coordinator, args.num_hosts, args.host_id) == ("slice-efgh", 4, 1)
    for target, api in (("v6e:2x4", "compute"), ("v6e:4x4", "tpu")):  # alone, or found by the metadata server
        _, calls = cloud("serve", "--target", target, *PLACE, "--api", api, "--", "--model", "m")
        assert [value(call, "--command") for call in calls] == [serve]
    _, calls = cloud("ssh", "--target", "v5e:2x4", *PLACE, "--", "echo", "a b; rm")
    (call,) = calls
    assert "--worker=all" in call
    assert shlex.split(value(call, "--command")) == ["echo", "a b; rm"]


@pytest.mark.parametrize("error", FAILURES)
def test_known_failures_are_explained(cloud, error):
    done, _ = cloud("create", "--target", "v6e:2x4", *PLACE, error=error)
    assert done.returncode == 1
    assert error in done.stderr  # gcloud's own words stay
    assert FAILURES[error] in done.stderr


def test_several_hosts_get_a_common_secret_and_one_host_none(cloud):
    secrets = []
    for target in ("v6e:4x4", "v6e:2x4"):
        done, calls = cloud("setup", "--target", target, *PLACE, "--api", "tpu")
        assert done.returncode == 0, done.stderr
        copied = [call for call in calls if call[3] == "scp"]
        assert all("--worker=all" in call for call in copied)
        assert not any("SECRET" in word for call in calls for word in call)  # `ps` shows arguments
        secrets.append([call[5] for call in copied if call[5] == "slice:hosts.env"])
    assert secrets == [["slice:hosts.env"], []]


def test_nothing_is_made_after_a_failure(cloud):
    done, calls = cloud("create", "--target", "v6e:4x4", *PLACE, error="ERROR: something new")
    assert done.returncode == 1
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no verb"),
        (("fly",), "fly: it can be create"),
        (("create", "--target", "v6e:2x4", "--zone", "us-east5-b"), "--name ''"),
        (("create", "--target", "v6e:2x4", "--name", "s", "--zone", "here"), "--zone 'here'"),
        (("create", "--target", "h100", *PLACE), "--target 'h100'"),
        (("create", "--target", "v6e:2x4", *PLACE, "--api", "other"), "--api other"),
        (("create", "--target", "tpu7x:2x2x1", *PLACE, "--api", "tpu"), "has no tpu7x"),
        (("create", "--target", "v5e:2x4", *PLACE, "--api", "compute"), "has no v5e"),
        (("create", "--target", "tpu7x:2x2x1", *PLACE, "--provisioning", "queued"), "--provisioning queued"),
        (("create", "--target", "v6e:2x4", *PLACE, "--provisioning", "stolen"), "--provisioning stolen"),
        (("create", "--target", "v6e:2x4", *PLACE, "--zones", "x"), "--zones: an unknown option"),
        (("create", "--target", "v6e:2x4", *PLACE, *FLEX, "2h1s"), "--wait-for 2h1s: a flex-start request of Compute"),
        (("create", "--target", "v6e:2x4", *PLACE, *FLEX, "1d"), "waits for 2h at most; take --api tpu"),
        (("create", "--target", "v6e:2x4", *PLACE, *FLEX, "soon"), "--wait-for 'soon': it looks like 90m"),
        (("create", "--target", "v6e:2x4", *PLACE, *FLEX, "0h"), "--wait-for '0h'"),
        (("create", "--target", "v6e:2x4", *PLACE, "--run-for", "1w"), "--run-for '1w'"),
        (
            ("create", "--target", "v5e:2x4", *PLACE, "--boot-disk-size", "400GB"),
            "--boot-disk-size 400GB: the Cloud TPU",
        ),
        (("create", "--target"), "--target needs a value"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(cloud, words, message):
    done, calls = cloud(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert calls == []


# --- on a host ---


@pytest.fixture
def host(machine):  # noqa: F811
    """A made-up host with this checkout's scripts, whose python3 is a 3.10."""
    shutil.copytree(DEPLOY / "host", machine / "checkout/scripts/deploy/host")
    for tool in ("dirname", "install", "chmod"):
        (machine / "bin" / tool).symlink_to(shutil.which(tool))
    return machine


def test_a_host_with_python_3_10_gets_another_through_uv(host):
    uv = host / "home/.local/bin/uv"
    venv = f'"venv "*) install -D -m 755 {host}/python3.13 .venv/bin/python'
    fake_command(host / "uv", f'case "$*" in {venv} ;; *) echo "$@" >>{host}/pip-calls ;; esac')
    fake_command(host / "python3.13", f'echo "$@" >>{host}/pip-calls')
    fake_command(
        host / "bin/python3",
        f"""case "$*" in
--version) echo Python 3.10.12 ;;
"-m pip install --user --quiet uv") install -D -m 755 {host}/uv {uv} ;;
*) exit 1 ;;
esac""",
    )
    result = shell(host, "scripts/deploy/host/setup.sh tpu")
    assert result.returncode == 0, result.stderr
    assert "no Python 3.12 to 3.14 here (Python 3.10.12): installing uv" in result.stderr
    assert installed(host) == [".[tpu,gcs]"]


def test_serving_writes_the_unit_and_its_flags(host):
    fake_command(host / "bin/systemctl", f'echo "$@" >>{host}/systemctl-calls')
    result = shell(host, "scripts/deploy/host/serve.sh --device tpu --model meta-llama/Llama-3.1-8B-Instruct")
    assert result.returncode == 0, result.stderr
    flags = (host / "root/etc/pallas-serve/flags.env").read_text()
    assert flags == 'FLAGS="--device tpu --model meta-llama/Llama-3.1-8B-Instruct"\n'
    assert launch.parser().parse_args(flags.split('"')[1].split()).device == "tpu"
    assert (host / "root/etc/systemd/system/pallas-serve@.service").is_file()
    assert (host / "systemctl-calls").read_text().split("\n")[:3] == [
        "daemon-reload", "enable pallas-serve@0", "restart pallas-serve@0",
    ]  # fmt: skip
    refused = shell(host, "scripts/deploy/host/serve.sh --override-generation-config '{\"temperature\": 1}'")
    assert refused.returncode == 2
    assert "cannot be in a flag" in refused.stderr


def test_the_unit_is_valid(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze checks the unit: install systemd")
    unit = tmp_path / "pallas-serve@0.service"
    text = (DEPLOY / "host/pallas-serve@.service").read_text()
    unit.write_text(text.replace("/opt/pallas-serve/.venv/bin/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "pallas-serve" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_unit_of_a_host_that_its_leader_has_ended_starts_again():
    """A follower then exits with code 0. It may wait for the leader for as long as the maintenance takes."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "host/pallas-serve@.service").read_text(), re.MULTILINE))
    assert unit["Restart"] == "always"
    waits_s = launch.parser().parse_args([]).hosts_timeout + int(unit["RestartSec"])
    interval_s = 60 * int(unit["StartLimitIntervalSec"].removesuffix("min"))
    assert interval_s < int(unit["StartLimitBurst"]) * waits_s


# Those that run on a user's own machine, which may be a Mac with bash 3.2.
@pytest.mark.parametrize("name", ["deploy/tpu_vm.sh", "setup.sh", "serve", "test", "check"])
def test_scripts_run_in_bash_3(name):
    text = (ROOT / "scripts" / name).read_text()
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    newer = re.compile(
        r"\b(mapfile|readarray|coproc)\b|\b(declare|local|typeset) -[a-z]*[Agn]|\$\{\w+(\[@\])?(,|\^|@)|\|&|&>>|;;?&"
        r"|\[\[ -v|wait -n|%\([^)]*\)T|\$\{\w+\[-|\$\{\w+: -"
    )
    assert [line for line in code.splitlines() if newer.search(line)] == []
    # Where `set -u` counts an empty array as unset.
    may_be_empty = set(re.findall(r"(\w+)=\(\)", code))
    bare = re.findall(r'(?<!\+)"\$\{(\w+)\[@\]\}"', code)
    assert may_be_empty.intersection(bare) == set()


@pytest.mark.parametrize("script", sorted(DEPLOY.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_clean(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck reads the scripts: install it")
    done = subprocess.run(["shellcheck", "-x", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# --- the images ---


def test_the_images_install_what_the_server_imports_and_start_it():
    text = (DEPLOY / "docker/Dockerfile").read_text()
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    packages = {"model", "pallas_kernels", "batcher", "server", "scripts"}
    assert kept == packages | {"pyproject.toml", "README.md"}
    assert all((ROOT / name).exists() for name in kept)
    entries = [json.loads(line.split(" ", 1)[1]) for line in text.splitlines() if line.startswith("ENTRYPOINT")]
    assert [entry[:3] for entry in entries] == [["python", "-m", "scripts.launch"]] * 2
    assert [launch.parser().parse_args(entry[3:]).device for entry in entries] == ["tpu", "cuda"]
    pip, *installs = [line for line in text.splitlines() if line.startswith("RUN pip install")]
    assert "^pip==" in pip  # the image's own knows no --build-constraint
    assert len(installs) == 4


def test_the_images_install_packages_before_the_code_and_run_as_a_user(tmp_path):
    """A change of the code then leaves the layers of the packages, which have gigabytes, as they are."""
    _, base, tpu, cuda = (DEPLOY / "docker/Dockerfile").read_text().split("\nFROM ")
    assert re.findall(r"^COPY (\S+)", base, re.MULTILINE) == ["pyproject.toml", "scripts/constraints.txt"]
    (command,) = [line for line in base.splitlines() if line.startswith('RUN ["python"')]
    program = json.loads(command.removeprefix("RUN "))[2].replace("/opt/", f"{tmp_path}/")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for device, stage in (("tpu", tpu), ("cuda", cuda)):
        wanted = [
            *project["dependencies"],
            *(x for extra in (device, "gcs") for x in project["optional-dependencies"][extra]),
        ]
        assert (tmp_path / f"{device}.txt").read_text().splitlines() == wanted
        steps = [line for line in stage.splitlines() if re.match(r"RUN|COPY|USER|ENTRYPOINT", line)]
        assert f"--requirement /opt/{device}.txt" in steps[0]
        assert [step.split()[0] for step in steps] == ["RUN", "COPY", "RUN", "USER", "ENTRYPOINT"]
        assert "--no-deps" in steps[2]
        assert steps[3] == "USER 1000"
