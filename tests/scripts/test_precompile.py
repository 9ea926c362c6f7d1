"""Programs that are made elsewhere: `scripts.precompile`, and the start that finds them.

A TPU's programs cannot be loaded here. That a start finds those that were made from descriptions is shown on a CPU. Of
a TPU's it is shown that another process makes them under the same names, and under other names for other flags.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from jax import export
from msgspec.structs import replace as replace_fields

from model.compiling.compile_cache import keep_compilations
from model.presets import preset
from scripts import precompile
from scripts.building.limits import bucket_config
from scripts.building.precompiled import CHOICES, CODE, PAGES, Made, facts_of_compiled, made_for, program_facts
from scripts.building.tracers import start_tracers
from scripts.flags.settings import EngineSettings
from scripts.lab import dispatch
from scripts.lab.accounts import cuda_stand_in
from tests.conftest import COMPILED
from tests.model import checkpoints
from tests.scripts.precompile_one import OneStep, built, described, shapes

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
needs_cuda_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plug-in is not installed"
)
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("model"), "gqa2")


@pytest.fixture
def settings(model: Path, tmp_path: Path):
    """With a cache of its own, which is the process's until the test ends."""
    cache = tmp_path / "cache"
    yield EngineSettings(
        model=str(model), device="cpu", attention_backend="reference", compile_cache=str(cache), **LIMITS
    )
    keep_compilations(COMPILED)


def test_a_start_finds_programs_that_were_made_without_weights(settings):
    said: list[str] = []
    precompile.fill(described(settings), "a CPU", said.append)
    assert "(0 came from the disk" in said[0] and f"{settings.compile_cache} has 4 programs for a CPU" in said[1]
    precompile.fill(described(settings), "a CPU", said.append)
    assert said[2:] == [f"{settings.compile_cache} has these 4 programs for a CPU already"]

    started = built(settings, said)
    assert any("precompiled       4 programs for" in line for line in said[3:])
    started.runner.warm_up(started.plan.ladder.buckets(), said.append)
    assert "compiled 4 programs" in said[-2] and "(4 came from the disk" in said[-2]
    assert "4 were traced before)" in said[-2]
    assert "ran 1 of 1 programs once" in said[-1]


def test_a_program_that_cannot_be_stored_is_an_error(settings, caplog):
    Path(settings.compile_cache).mkdir(mode=0o700)
    Path(settings.compile_cache, "xla").touch()
    with pytest.raises(OSError, match="cannot be written to"):
        precompile.fill(described(settings), "a CPU", lambda line: None)
    assert "programs cannot be kept" in caplog.text
    assert not Path(settings.compile_cache, "precompiled").exists()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_configuration_alone_decides_the_programs(settings, tmp_path, quantization):
    """Of a checkpoint that is not quantised."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes(Path(settings.model, "config.json").read_bytes())
    asked = replace(settings, quantization=quantization)
    with_weights, without = (
        program_facts(start.runner, shapes(start))
        for start in map(described, (asked, replace(asked, model=str(alone), load_format="dummy")))
    )
    assert with_weights == without


@pytest.mark.parametrize(
    ("fact", "there"),
    [
        ("jax", "0.0.1"),
        ("jaxlib", "0.0.1"),
        ("the compiler", "older"),
        ("the chip", "TPU v5 lite"),
        ("XLA_FLAGS", "--xla"),
    ],
)
def test_a_start_says_what_differs(settings, fact, there):
    start = described(settings)
    facts = program_facts(start.runner, shapes(start))
    folder = Path(settings.compile_cache)
    # The digest of the code holds most facts, and is not named for them.
    Made(target="v6e:1x1", facts=facts | {fact: there, CODE: "another"}, programs=4).write(folder)
    found = made_for(folder, start.runner, shapes(start))
    assert found.num_pages is None
    assert found.remark.startswith(f"the programs made elsewhere for v6e:1x1 are not used: {fact}: {there} there, ")
    assert "; " not in found.remark


def test_other_flags_and_other_code_are_named(settings):
    start = described(settings)
    folder, facts = Path(settings.compile_cache), program_facts(start.runner, shapes(start))
    assert made_for(folder, start.runner, shapes(start)) is None
    Made(target="v6e:1x1", facts=facts | {CODE: "another"}, programs=4).write(folder)
    assert (
        f"not used: {CODE}: another there, {facts[CODE]} here" in made_for(folder, start.runner, shapes(start)).remark
    )
    other = described(replace(settings, max_model_len=16))
    remark = made_for(folder, other.runner, shapes(other)).remark
    assert "the limits: max_model_len=32 there, max_model_len=16 here" in remark
    assert len(remark) < 400


def test_a_start_says_why_it_compiles_what_was_compiled_for_a_gpu(settings):
    start, own = described(settings), facts_of_compiled()
    folder, topology = Path(settings.compile_cache), "the chips' topology"
    made = Made(target="h100", facts=program_facts(start.runner, shapes(start)), programs=4, compiled=3)
    for facts, ending in (
        (own, ", 3 of them compiled"),
        (own | {topology: "cuDNN 9"}, f"; they are compiled anew: {topology}: cuDNN 9 there, {own[topology]} here"),
    ):
        replace_fields(made, compiled_for=facts).write(folder)
        assert made_for(folder, start.runner, shapes(start)).remark.endswith(f"made elsewhere, for h100{ending}")


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        (1.0, False, 1.0),
        (0.96, False, 0.96),  # the start takes the fewer pages
        (0.9, False, None),  # too few to be worth it
        (1.01, False, None),  # they do not fit
        (0.96, True, None),  # --num-pages says another number
        (1.0, True, 1.0),
    ],
)
def test_a_start_takes_the_pages_of_the_programs(settings, there, asked, expected):
    start = described(replace(settings, num_pages=1000))
    if not asked:
        start.runner.described.config = replace(start.runner.described.config, num_pages=None)
    folder, facts = Path(settings.compile_cache), program_facts(start.runner, shapes(start))
    Made(target="v6e:1x1", facts=facts | {PAGES: str(int(1000 * there))}, programs=4).write(folder)
    found = made_for(folder, start.runner, shapes(start))
    assert found.num_pages == (None if expected is None else int(1000 * expected))
    if expected is None:
        assert f"{PAGES}: {int(1000 * there)} there, 1000 here" in found.remark


def test_a_broken_list_is_a_warning(settings, caplog):
    start = described(settings)
    folder = Path(settings.compile_cache)
    Made(target="v6e:1x1", facts={}, programs=4).write(folder)
    (path,) = (folder / "precompiled").iterdir()
    path.write_bytes(msgspec.json.encode({"target": 1}))
    assert made_for(folder, start.runner, shapes(start)) is None
    assert str(path) in caplog.text and "facts is missing" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--target h101", "not a GPU target: name='h101'; it is one of ['a10', 'a100', 'b200', "),
        ("--target h100 --device tpu", "--device tpu: --target names the device"),
        ("--target v9:1x1", "not a TPU target: name='v9:1x1'; it is one of ['tpu7x', 'v5e', 'v5p', 'v6e']"),
        ("--target v6e:0x1", "not a TPU topology"),
        ("--target v6e:4x4", "--target v6e:4x4: a host has at most 8 of these chips"),
        ("--target v6e:1x1 --device cpu", "--device cpu: --target names the device"),
        ("--target v6e:1x1 --compile-cache none", "--compile-cache none: "),
    ],
)
def test_refusals(capsys, flags, message):
    assert precompile.main(flags.split()) == 2
    assert capsys.readouterr().err.startswith(f"precompile: {message}")


# ---- with the compiler of TPUs, each in a process of its own ----

PAGES_OF_A_TPU = ("--num-pages", "8")


def precompiled(model: Path, cache: Path, *flags: str, target: str = "v6e:1x1", **environment: str) -> str:
    """What the command says. It compiles for the chips that are described, whatever JAX_PLATFORMS says."""
    limits = "--max-num-seqs 8 --max-num-batched-tokens 64 --max-model-len 256 --load-format dummy".split()
    command = [sys.executable, "-m", "tests.scripts.precompile_one", "--target", target, "--model", str(model)]
    process = subprocess.run(
        [*command, *limits, "--compile-cache", str(cache), *flags],
        env=os.environ | {"XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout + (process.stderr if process.returncode else "")


def names(cache: Path) -> tuple[set[str], set[str]]:
    """Of the traced programs, and of the compiled ones."""
    return tuple(
        {path.name for path in (cache / folder).rglob(f"*.{suffix}")}
        for folder, suffix in (("traced", "stablehlo"), ("xla", "xla"))
    )


def folders(cache: Path) -> set[str]:
    """Digests of all that decides the traces, besides names and shapes."""
    return {path.name for path in (cache / "traced").iterdir()}


@pytest.fixture(scope="module")
def for_chips(tmp_path_factory) -> Path:
    """A configuration without weights, of heads that the chips' kernels take."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 1, "num_heads": 8, "num_kv_heads": 8}
    config = replace(preset("llama-3.2-1b"), **sizes, vocab_size=512, bos_token_id=1, eos_token_ids=(2,))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


@pytest.fixture(scope="module")
def for_a_tpu(for_chips, tmp_path_factory) -> Path:
    """The folder of its programs."""
    cache = tmp_path_factory.mktemp("programs") / "cache"
    said = precompiled(for_chips, cache, *PAGES_OF_A_TPU)
    assert "jax on 1 x TPU v6 lite" in said and f"{cache} has 4 programs and 2 of the self-test for v6e:1x1" in said
    return cache


@needs_libtpu
@pytest.mark.targets
@pytest.mark.slow
def test_programs_for_a_tpu_have_the_same_names_in_every_process(for_chips, for_a_tpu, tmp_path):
    precompiled(for_chips, tmp_path / "again", *PAGES_OF_A_TPU)
    assert names(for_a_tpu) == names(tmp_path / "again")
    assert list(map(len, names(for_a_tpu))) == [4, 6]
    said = precompiled(for_chips, for_a_tpu, *PAGES_OF_A_TPU)
    assert said.endswith("has these 4 programs for v6e:1x1 already\n")


@needs_libtpu
@pytest.mark.targets
@pytest.mark.slow
def test_processes_trace_what_a_tpus_engine_will_look_for(for_chips, for_a_tpu, tmp_path):
    """They have its description only, and the engine is another process. `test_tracers` has an engine that finds it."""
    settings = EngineSettings(
        model=str(for_chips), load_format="dummy", device="tpu", max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=256, num_pages=8, tensor_parallel_size=1, attention_backend="tpu", compile_cache=str(tmp_path),
    )  # fmt: skip
    buckets = OneStep(bucket_config(settings, "tpu", 1)).buckets()
    (process,) = start_tracers(settings, buckets, 1, described, "v6e:1x1")
    process.join(120)
    assert process.exitcode == 0
    assert len(names(tmp_path)[0]) == 1
    assert names(tmp_path)[0] < names(for_a_tpu)[0]
    assert folders(tmp_path) <= folders(for_a_tpu)


@needs_libtpu
@pytest.mark.targets
@pytest.mark.slow
def test_programs_for_several_tpus(for_chips, tmp_path):
    said = precompiled(for_chips, tmp_path, "--tensor-parallel-size", "4", target="v6e:2x2")
    assert (
        "jax on 4 x TPU v6 lite" in said
        and "4 of 4 chips" in said
        and "has 4 programs and 2 of the self-test for v6e:2x2" in said
    )


@needs_cuda_plugin
@pytest.mark.targets
@pytest.mark.slow
def test_programs_for_a_gpu_are_traced_and_have_the_same_names_in_every_process(for_chips, tmp_path):
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    said = precompiled(for_chips, first, target="h100")
    assert "jax on 1 x NVIDIA H100 80GB HBM3" in said
    assert "attention backend gpu, without a test" in said
    assert f"{first} has 4 traced programs for h100" in said
    # A GPU compiles them itself, so XLA's options and the folder's other content do not matter.
    precompiled(for_chips, again, target="h100", XLA_FLAGS="--xla_gpu_autotune_level=0")
    assert names(first) == names(again)
    assert list(map(len, names(first))) == [4, 0]
    programs, same = (
        sorted(path.read_bytes()[32:] for path in (cache / "traced").rglob("*.stablehlo")) for cache in (first, again)
    )  # after the checksum
    assert programs == same
    texts = [export.deserialize(bytearray(program)).mlir_module() for program in programs]
    assert sum("@mosaic_gpu" in text for text in texts) == 1  # the step; the others are the updates
    assert precompiled(for_chips, first, target="h100").endswith("has these 4 programs for h100 already\n")
    precompiled(for_chips, other, target="h200")
    assert not folders(other) & folders(first)


ON_DRIVER = """
import ctypes, json, re, sys
ctypes.CDLL("libcudart.so.13")  # the plug-in would load the real runtime
from jax._src import hardware_utils
hardware_utils.has_visible_nvidia_gpu = lambda: True
from scripts.flags.settings import EngineSettings
from tests.scripts.precompile_one import built
said = []
start = built(EngineSettings(
    model=sys.argv[1], compile_cache=sys.argv[2], load_format="dummy", device="cuda", self_test="never",
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256), said)
start.runner.warm_up(start.plan.ladder.buckets(), said.append)
print(*said, sep="\\n")
for program in start.runner.programs.steps.values():
    lines = re.findall(r"= (\\S+ fusion)\\(.*backend_config=(\\{.*\\})", program.as_text())
    kernels = [(shape, json.dumps(json.loads(config), sort_keys=True)) for shape, config in lines]
    print("kernels", *sorted(kernels), sep="\\n")
"""


@pytest.fixture
def on_driver(for_chips, tmp_path, monkeypatch):
    """Starts with a folder of programs, on a CUDA driver that runs no kernel: XLA's client of a GPU compiles, times,
    stores and loads programs on it."""
    monkeypatch.setattr(cuda_stand_in, "SOURCE", source := tmp_path / "driver.c")
    own = Path(cuda_stand_in.__file__).with_suffix(".c").read_text()

    def start(cache: Path, version: str = "13000") -> str:
        if not (driver := tmp_path / f"driver-{version}").exists():
            source.write_text(own.replace("CUDA_VERSION 13000", f"CUDA_VERSION {version}"))
            driver.mkdir()
            cuda_stand_in.build(driver)
        env = dispatch.ENVIRONMENT | {"XLA_FLAGS": "", "LD_LIBRARY_PATH": str(driver)}
        command = [sys.executable, "-c", ON_DRIVER, str(for_chips), str(cache)]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return start


@needs_cuda_plugin
@pytest.mark.targets
@pytest.mark.slow
def test_programs_that_were_compiled_without_a_gpu_are_loaded_on_one(for_chips, tmp_path, on_driver):
    """What the start has timed on its GPU decides the kernels: a program is the one that the GPU compiles itself."""
    served, made, few = (tmp_path / name for name in ("served", "made", "few"))
    own = on_driver(served)
    assert "compiled 4 programs" in own
    for folder in (made, few):
        folder.mkdir(0o700)
        for part in (CHOICES, "topologies"):
            shutil.copytree(served / part, folder / part)
    said = precompiled(for_chips, made, target="h100")
    assert f"{made} has 4 programs, 4 of them compiled, for h100" in said
    assert precompiled(for_chips, made, target="h100").endswith("has these 4 programs for h100 already\n")
    found = on_driver(made)
    assert "4 programs for 64 K/V pages were made elsewhere, for h100, 4 of them compiled" in found
    assert "compiled 0 programs" in found and "4 more were exported before" in found
    kernels = own.partition("kernels")[2]
    assert found.partition("kernels")[2] == kernels and "__triton_nested_gemm_fusion" in kernels

    newer = on_driver(made, "13010")
    assert "made elsewhere, for h100; they are compiled anew: the chips' topology: " in newer
    assert "CUDA of the driver 13.0.0, " in newer and " there, CUDA of the driver 13.1.0, " in newer
    assert "compiled 4 programs" in newer and "4 were traced before" in newer

    shutil.rmtree(few / CHOICES)
    (few / CHOICES).mkdir()  # the step has products, which no GPU has timed; the updates have none
    said = precompiled(for_chips, few, target="h100")
    assert f"{few} has 4 programs, 3 of them compiled, for h100" in said
    assert "1 are only traced: no such GPU has timed all of their products" in said
    found = on_driver(few)
    assert "3 of them compiled" in found and "compiled 1 programs" in found and "3 more were exported before" in found


SAVED = """
import sys
from pathlib import Path
from scripts.building import described_chips
from scripts.building.described_chips import be_on, topology_named
be_on(topology_named("h100"))
import jax
from jaxlib import xla_client
jax.config.update("jax_platforms", "cuda,cpu")
from scripts.lab.chip.made_elsewhere import attached_target
described_chips.FOLDER = Path(sys.argv[1])
path = described_chips.FOLDER / f"{attached_target('cuda')}.bin"
(device,) = topology_named("h100").devices()
identities = {xla_client.get_topology_for_devices([d]).fingerprint() for d in (device, jax.devices()[0])}
print(path.name, device.device_kind, device.core_count, device.compute_capability, len(identities))
"""


@needs_cuda_plugin
@pytest.mark.targets
def test_a_saved_topology_describes_the_same_chip(tmp_path):
    command = [sys.executable, "-c", SAVED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "h100.bin NVIDIA H100 80GB HBM3 132 9.0 1\n"
