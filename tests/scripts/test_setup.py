"""scripts/setup.sh: which Python and which jax it chooses, and when it has nothing to do. Nothing is installed here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path):
    """A made-up machine: a PATH of its own, a home, a /sys and a /proc, and a checkout."""
    for name in ("bin", "home", "root", "checkout/scripts"):
        (tmp_path / name).mkdir(parents=True)
    for tool in ("bash", "sh", "cat", "sort", "ls", "sed", "head", "cut", "grep", "sha256sum", "rm", "env", "readlink"):
        found = next(p for d in ("/bin", "/usr/bin") if (p := Path(d) / tool).exists())
        (tmp_path / "bin" / tool).symlink_to(found)
    for path in (ROOT / "pyproject.toml", ROOT / "scripts/setup.sh", *(ROOT / "scripts").glob("*.txt")):
        (tmp_path / "checkout" / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    return tmp_path


def shell(machine: Path, script: str, **env: str) -> subprocess.CompletedProcess:
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine / "home"), "SYS_ROOT": str(machine / "root")}
    return subprocess.run(
        [str(machine / "bin" / "bash"), "-c", f"set -euo pipefail; . scripts/setup.sh; {script}"],
        cwd=machine / "checkout",
        env=environment | env,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_command(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def add_card(machine: Path, vendor: str, device: str) -> None:
    card = machine / "root/sys/bus/pci/devices" / f"{vendor}-{device}"
    card.mkdir(parents=True)
    (card / "vendor").write_text(vendor + "\n")
    (card / "device").write_text(device + "\n")


def test_a_plain_machine_is_a_cpu(machine):
    add_card(machine, "0x8086", "0x0063")
    assert shell(machine, "find_device").stdout == "cpu\n"


@pytest.mark.parametrize("device", ["0x0062", "0x0063", "0x006f", "0x0076"])
def test_a_tpu_is_known_by_its_card(machine, device):
    add_card(machine, "0x1ae0", "0x0042")  # Google's network card proves nothing
    assert shell(machine, "find_device").stdout == "cpu\n"
    add_card(machine, "0x1ae0", device)
    assert shell(machine, "find_device").stdout == "tpu\n"


def test_an_nvidia_driver_is_known_by_proc_or_by_its_tool(machine):
    fake_command(machine / "bin/nvidia-smi", "exit 1")
    assert shell(machine, "find_device").stdout == "cpu\n"
    fake_command(machine / "bin/nvidia-smi", "echo GPU 0")
    assert shell(machine, "find_device").stdout == "cuda\n"
    (machine / "bin/nvidia-smi").unlink()
    (machine / "root/proc/driver/nvidia").mkdir(parents=True)
    (machine / "root/proc/driver/nvidia/version").write_text("NVRM")
    assert shell(machine, "find_device").stdout == "cuda\n"


def test_the_device_can_be_said_and_must_exist(machine):
    assert shell(machine, "find_device", PALLAS_SERVE_DEVICE="tpu").stdout == "tpu\n"
    wrong = shell(machine, "find_device", PALLAS_SERVE_DEVICE="npu")
    assert wrong.returncode == 1
    assert "it can be cpu, tpu or cuda" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        ("cpu", ""),
        ("cpu --model demo", ""),
        ("cuda --model org/name", "cuda"),
        ("tpu --model org/name", "tpu gcs"),
        ("cpu --model gs://bucket/model", "gcs"),
        ("cuda --compile-cache=gs://bucket/programs", "cuda gcs"),
    ],
)
def test_the_package_for_buckets_comes_where_it_is_needed(machine, arguments, extras):
    assert shell(machine, f"extras_for {arguments}").stdout.strip() == extras


def test_another_system_than_linux_is_refused_in_one_line(machine):
    refused = shell(machine, "find_device", OSTYPE="darwin23", PALLAS_SERVE_DEVICE="cpu")
    assert refused.returncode == 1
    said = "pallas-serve needs Linux, and this is darwin23: run it in a container or a virtual machine with Linux\n"
    assert (refused.stdout, refused.stderr) == ("", said)


def test_the_newest_usable_python_is_taken_wherever_it_is(machine):
    fake_command(machine / "bin/python3.12", "exit 0")
    assert shell(machine, "find_python").stdout == f"{machine}/bin/python3.12\n"
    versions = machine / "home/.pyenv/versions"
    fake_command(versions / "3.13.2/bin/python3.13", "exit 0")
    fake_command(versions / "3.13.10/bin/python3.13", "exit 0")
    assert shell(machine, "find_python").stdout == f"{versions}/3.13.10/bin/python3.13\n"
    fake_command(machine / "bin/python3.14", "exit 1")  # free-threaded, or without venv
    assert shell(machine, "find_python").stdout == f"{versions}/3.13.10/bin/python3.13\n"


def test_where_there_is_no_python_one_line_says_what_to_type(machine):
    fake_command(machine / "bin/python3.11", "exit 0")
    result = shell(machine, "make_venv")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "Type: curl -LsSf https://astral.sh/uv/install.sh | sh && " in result.stderr


# Ubuntu 22.04 has a Python that is too old, and 24.04 one without venv. Neither lets `pip install uv` reach the PATH.
@pytest.mark.parametrize("python", ["python3.10", "python3.12"])
@pytest.mark.parametrize("place", ["bin", "home/.local/bin", "home/.cargo/bin"])
def test_the_advice_is_enough_wherever_uv_lands(machine, python, place):
    fake_command(machine / "bin" / python, 'case "$*" in *venv*) exit 1 ;; esac')
    assert shell(machine, "make_venv").returncode == 1
    made = "venv --quiet --clear --seed --python >=3.12,<3.15 .venv"
    fake_command(machine / place / "uv", f'[ "$*" = "{made}" ] && : >made')
    result = shell(machine, "make_venv")
    assert result.returncode == 0, result.stderr
    assert (machine / "checkout/made").exists()


def test_without_a_home_python_is_found_all_the_same(machine):
    fake_command(machine / "bin/python3.12", "exit 0")
    assert shell(machine, "unset HOME; find_python").stdout == f"{machine}/bin/python3.12\n"


def installed(machine: Path) -> list[str]:
    calls = (machine / "pip-calls").read_text().splitlines() if (machine / "pip-calls").exists() else []
    return [call.split("--editable ")[1] for call in calls if "--editable" in call]


def test_packages_are_installed_once_and_extras_add_up(machine):
    fake_command(machine / "checkout/.venv/bin/python", f'echo "$@" >> {machine}/pip-calls')
    for command, expected in (
        ("setup", ["."]),
        ("setup", ["."]),  # nothing to do
        ("setup dev targets", [".", ".[dev,targets]"]),
        ("setup dev", [".", ".[dev,targets]"]),
        ("setup", [".", ".[dev,targets]"]),
        ("setup tpu", [".", ".[dev,targets]", ".[tpu,dev,targets]"]),
    ):
        result = shell(machine, command)
        assert result.returncode == 0, result.stderr
        assert installed(machine) == expected


PIP_CONFIG = """:env:.find-links='/wheels /more'
:env:.index-url='file:///of-the-environment'
global.cert='/etc/ca.crt'
global.extra-index-url='\\nfile:///a\\nfile:///b'
global.index-url='file:///of-the-file'
global.timeout='60'
install.timeout='90'"""


def test_uv_installs_from_where_pip_does(machine):
    """A variable of pip's comes before its files, its section of one command before the general one, and uv's own
    variables before both."""
    fake_command(machine / "checkout/.venv/bin/python", f'case "$*" in *"config list"*) cat {machine}/config ;; esac')
    (machine / "config").write_text(PIP_CONFIG)
    names = "UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS UV_HTTP_TIMEOUT SSL_CERT_FILE UV_INDEX_STRATEGY UV_OFFLINE".split()
    shown = " ".join(f'"${{{name}-unset}}"' for name in names)
    fake_command(machine / "bin/uv", f'for word in {shown} "$@"; do echo "$word"; done >{machine}/uv-call')
    result = shell(machine, 'setup dev targets && echo "${UV_INDEX-unset}"', SSL_CERT_FILE="/own.crt")
    assert (result.returncode, result.stdout) == (0, "unset\n"), result.stderr  # the server does not see them
    call = (machine / "uv-call").read_text().splitlines()
    assert call[:4] == ["file:///of-the-environment", " file:///a file:///b", "/wheels,/more", "90"]
    assert call[4:7] == ["/own.crt", "unsafe-best-match", "unset"]
    pins = "--constraint scripts/constraints.txt --build-constraint scripts/constraints.txt"
    install = f"pip install -q --python .venv/bin/python {pins} pip --editable .[dev,targets]"
    assert call[7:] == install.split()


def test_pip_brings_uv_and_does_what_uv_cannot(machine):
    uv, python = machine / "checkout/.venv/bin/uv", machine / "checkout/.venv/bin/python"
    fake_command(machine / "uv", f'echo "$@" >>{machine}/uv-calls; exit "${{UV_EXIT:-0}}"')
    fake_command(python, f'echo "$@" >>{machine}/pip-calls; case "$*" in *" uv") cp {machine}/uv {uv} ;; esac')
    (machine / "bin/cp").symlink_to("/bin/cp")
    assert shell(machine, "setup").returncode == 0
    (brought,) = [call for call in (machine / "pip-calls").read_text().splitlines() if call.endswith(" uv")]
    assert "--constraint scripts/constraints.txt --only-binary :all: uv" in brought
    assert "uv==" in (ROOT / "scripts/constraints.txt").read_text()
    assert (len((machine / "uv-calls").read_text().splitlines()), installed(machine)) == (1, [])
    result = shell(machine, "setup dev", UV_EXIT="2")
    assert result.returncode == 0
    assert "uv cannot install the packages here (see above): pip does" in result.stderr
    assert (len((machine / "uv-calls").read_text().splitlines()), installed(machine)) == (2, [".[dev]"])
    calls = (machine / "pip-calls").read_text().splitlines()
    assert sum("pip==" in call for call in calls) == 1
    assert sum(call.endswith(" uv") for call in calls) == 1  # it is there already
    assert "--no-compile" in next(call for call in calls if "--editable" in call)


IMPORTS = """
import sys, types
import server.main, server.app, server.http.server, server.serve_until_end, server.text.transformers_parts
import scripts.launch, scripts.building.build, scripts.building.runner
from pathlib import Path
for module in [m for m in sys.modules.values() if isinstance(m, types.ModuleType) and getattr(m, "__file__", None)]:
    print(module.__file__)
"""


def test_what_a_start_imports_is_compiled_and_little_else(machine):
    python = machine / "checkout/.venv/bin/python"
    fake_command(python, f'for word; do echo "$word"; done >{machine}/call; exit 1')
    assert (
        shell(machine, "compile_modules").returncode == 0
    )  # `compileall` fails for modules with bad syntax, which no start imports
    call = (machine / "call").read_text().splitlines()
    assert (call[:6], call[7:]) == (["-m", "compileall", "-qq", "-j", "0", "-x"], ["."])
    skipped = re.compile(call[6])
    found = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = {Path(line.split("/site-packages/")[1]) for line in found.stdout.split() if "/site-packages/" in line}
    own = {Path(line).relative_to(ROOT) for line in found.stdout.split() if Path(line).is_relative_to(ROOT)} - packages
    site = f"./.venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    modules = {f"{site}/{path}" for path in packages if path.suffix == ".py"}
    modules |= {f"./{path}" for path in own if ".venv" not in path.parts}
    assert len(modules) > 800
    skipped_of_a_start = [m for m in modules if skipped.search(m) and "/PIL/" not in m]  # of a package of clients
    assert sum((ROOT / m).stat().st_size for m in skipped_of_a_start) < 250_000, skipped_of_a_start
    for unused in (
        "transformers/models/bert/modeling_bert.py",
        "scipy/stats/_stats.py",
        "numpy/tests/test_ctypeslib.py",
    ):
        assert skipped.search(f"{site}/{unused}")
    assert skipped.search("./tests/conftest.py") and skipped.search("./scripts/lab/step.py")


def test_changed_pins_are_installed_anew(machine):
    fake_command(machine / "checkout/.venv/bin/python", f'echo "$@" >> {machine}/pip-calls')
    shell(machine, "setup dev")
    pins = machine / "checkout/scripts/constraints.txt"
    pins.write_text(pins.read_text() + "another==1.0\n")
    shell(machine, "setup")
    assert len(installed(machine)) == 2


def test_an_installation_that_failed_is_tried_again(machine):
    python = machine / "checkout/.venv/bin/python"
    fake_command(python, f'echo "$@" >> {machine}/pip-calls; case "$*" in *editable*) exit 1 ;; esac')
    result = shell(machine, "setup")
    assert result.returncode == 1
    assert "pip could not install" in result.stderr
    fake_command(python, f'echo "$@" >> {machine}/pip-calls')
    assert shell(machine, "setup").returncode == 0
    assert len(installed(machine)) == 2


def test_every_pin_is_exact_and_has_no_address():
    pins = [line for line in (ROOT / "scripts/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pins) > 50
    assert all(pin.count("==") == 1 and "/" not in pin and "@" not in pin for pin in pins)


def test_no_wheel_is_built(tmp_path):
    """It would put packages named `model`, `server` and `scripts` into a site-packages folder."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "--wheel-dir", tmp_path]
    built = subprocess.run(
        [*wheel, "--build-constraint", ROOT / "scripts/constraints.txt", ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    said = built.stdout + built.stderr
    if "No matching distribution" in said:
        pytest.skip("the build backend cannot be fetched: no network")
    assert built.returncode != 0
    assert "the checkout with `pip install --editable .`" in said
    assert not list(tmp_path.iterdir())
