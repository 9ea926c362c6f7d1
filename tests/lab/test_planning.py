"""The planner's simulated speed, its search, its cost and its flags."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from model.network.linear import linear_method
from model.presets import preset
from model.quantization.forms import Rounding
from scripts import launch
from scripts.building.replicas import claim_chips, replicas_of
from scripts.building.step_times import MEMORY_EFFICIENCY
from scripts.flags.settings import EngineSettings, ServedSettings
from scripts.lab import plan
from scripts.lab.planning import compiled, sweep
from scripts.lab.planning.compiled import extrapolated
from scripts.lab.planning.cost import HOURS_PER_MONTH, ApiPrice, cost
from scripts.lab.planning.estimate import Estimator
from scripts.lab.planning.memory import GIB, Account, size_up
from scripts.lab.planning.roofline import roofline
from scripts.lab.planning.target import parse_target
from scripts.lab.simulation.machine import Machine, SimulatedRequest, simulate

V6E = parse_target("v6e")
EIGHT_B = roofline(
    preset("llama-3.1-8b"), V6E, weights_read=15_009_857_536, weight_itemsize=2, kv_token_bytes=131072, chips=1
)
SMALL = Machine(
    max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, num_pages=128, page_size=16, cost=EIGHT_B
)


def test_a_decode_of_one_row_reads_the_weights_once():
    seconds = EIGHT_B.decode_seconds(1, 1000)
    num_bytes = 15_009_857_536 + 1000 * 131072
    assert seconds == pytest.approx(num_bytes / (1638e9 * MEMORY_EFFICIENCY), rel=1e-6)


@pytest.mark.parametrize(("rows", "ms"), [(1, 6.14), (16, 6.99), (64, 10.05), (256, 24.17)])
def test_an_h100_takes_the_measured_time_of_a_step(rows, ms):
    """Those of scripts/lab/results/2026-11-26-h100.md."""
    sizes = {"weights_read": 15_009_857_536, "weight_itemsize": 2, "kv_token_bytes": 131072, "chips": 1}
    h100, h200 = (roofline(preset("llama-3.1-8b"), parse_target(name), **sizes) for name in ("h100", "h200"))
    assert h100.decode_seconds(rows, 1024) * 1e3 == pytest.approx(ms, rel=0.01)
    assert h100.share_of_bandwidth(160) == pytest.approx((0.701 + 0.610) / 2)
    assert h200.share_of_bandwidth(rows) is None


def test_a_plan_says_which_rows_were_measured(capsys):
    flags = "--model preset:llama-3.1-8b --no-simulate --no-compile --max-num-seqs 128 --workload chat --target".split()
    assert plan.main([*flags, "h100"]) == 0
    said = capsys.readouterr().out
    assert "a step's time: measured shares of the memory's bandwidth" in said
    assert ", 70% of the bandwidth, as measured (8B, bfloat16)" in said
    assert ", 67% of the bandwidth; measured were 1, 16, 64, 256 rows (8B, bfloat16)" in said
    assert plan.main([*flags, "h200"]) == 0
    assert "80%, which nobody has measured, of the memory's bandwidth" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "quantization", "rounding"),
    [
        ("h100", "fp8", Rounding(min_rows=256)),
        ("l4", "fp8", Rounding(min_rows=1, with_head=True)),
        ("b200", "int8", None),
        ("v5e", "int8", Rounding(min_rows=1)),
        ("tpu7x", "fp8", Rounding(min_rows=512)),
        ("tpu7x", "int8", None),
        ("h100", None, None),
    ],
)
def test_products_in_8_bits_are_planned_where_the_engine_has_them(target, quantization, rounding):
    settings = EngineSettings(model="preset:llama-3.1-8b", load_format="dummy", quantization=quantization)
    sizes = size_up(settings, parse_target(target), 1)
    assert sizes.rounding == sizes.roofline.rounding == rounding
    assert sizes.model.layers[0].mlp.down.method == linear_method(sizes.model.quantization, rounding)


def test_a_slow_host_delays_steps_and_a_fast_one_does_not():
    requests = [SimulatedRequest(arrival_s=0.0, num_prompt=16, num_output=50)] * 4
    alone, hidden, slow = (
        simulate(requests, replace(SMALL, host_step_s=seconds)).seconds for seconds in (0.0, 0.002, 0.05)
    )
    assert hidden < 1.05 * alone
    assert slow > 2 * alone


def test_requests_that_share_a_prefix_compute_it_once():
    apart = [SimulatedRequest(arrival_s=0.0, num_prompt=200, num_output=2)] * 12
    shared = [replace(request, num_shared=160) for request in apart]
    assert simulate(shared, SMALL).seconds < 0.6 * simulate(apart, SMALL).seconds


def test_cost_by_hand():
    load = {"output_tokens_per_s": 1000.0, "total_tokens_per_s": 10000.0, "capacity_tokens_per_s": 40000.0}
    result = cost(10.0, currency="EUR", **load, apis=[ApiPrice.parse("0.5"), ApiPrice.parse("one=1/2")])
    assert result.per_million_output == pytest.approx(10 / 3.6)
    assert result.per_million_total == pytest.approx(1 / 3.6)
    assert result.per_month == 10 * HOURS_PER_MONTH
    even, apart = result.apis
    assert even.break_even == pytest.approx(10 * HOURS_PER_MONTH / 0.5)
    assert result.capacity == pytest.approx(40000 * 3600 * 730 / 1e6)
    assert even.break_even_share == pytest.approx((1 / 3.6) / 0.5 / 4)
    assert (apart.price.name, apart.per_million_total) == ("one", pytest.approx(0.9 * 1 + 0.1 * 2))
    assert apart.per_month == pytest.approx(1.1 * 10000 * 3600 * 730 / 1e6)
    assert apart.difference == pytest.approx(apart.per_month - 10 * HOURS_PER_MONTH)
    assert result.currency == "EUR"


SEARCH = (
    "--model", "1b", "--target", "v5e:1x2", "--workload", "uniform:100:300/uniform:5:30",
    "--slo", "ttft_ms=200,tpot_ms=10", "--max-num-seqs", "64", "--price-per-hour", "2.4", "--api-price", "0.1",
    "--no-compile",
)  # fmt: skip


@pytest.mark.usefixtures("short_simulations")
def test_a_plan_as_json(capsys):
    assert plan.main([*SEARCH, "--json", "--max-num-batched-tokens", "512"]) == 0
    planned = json.loads(capsys.readouterr().out)
    best = planned["best"]
    serve, *flags = shlex.split(planned["command"])
    args = launch.parser().parse_args(flags)
    assert serve == "scripts/serve"
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (64, 512)
    assert args.tensor_parallel_size * args.data_parallel_size == 2
    assert best["meets_slo"]
    assert best["latencies_ms"]["ttft"]["p95"] <= 200
    assert best["tensor_parallel_size"] * best["replicas"] == 2
    loads = [tried["offered_requests_per_s"] for tried in planned["tried"] if tried["meets_slo"]]
    assert best["offered_requests_per_s"] == max(loads)
    assert planned["memory"]["mark"] == "counted"


@pytest.mark.usefixtures("short_simulations")
def test_objectives_that_nothing_meets_are_an_error(capsys):
    flags = ["--model", "8b", "--target", "l4", "--workload", "200/20", "--slo", "tpot_ms=1"]
    assert plan.main([*flags, "--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--no-compile"]) == 1
    assert "nothing on l4 meets --slo tpot_ms=1; the closest:" in capsys.readouterr().err


@pytest.fixture
def questions(monkeypatch):
    """Those to a compiler of TPUs that is there. By its answers about 1B all layers are alike, and two take 2 GiB of
    temporaries, as all do. There is no compiler of GPUs."""
    asked = []

    def answered(question):
        asked.append(question)
        page = 4 << 20  # of all layers: 128 tokens of 16 layers, K and V, 8 heads of 64 in two bytes
        pages = (question.num_pages + 1) * page // 16
        return [
            Account(num_layers=n, num_pages=question.num_pages, arguments=(5 << 30) + n * (pages + (100 << 20)),
                    temporaries=min(n, 2) * GIB, code=n, cpu_s=1.0)
            for n in question.depths
        ]  # fmt: skip

    monkeypatch.setattr(compiled, "_ask", answered)
    monkeypatch.setattr(compiled, "_COMPILERS", {"tpu": ("json", "libtpu"), "gpu": ("not_there", "a-package")})
    return asked


ONE_B = ("--model", "1b", "--max-model-len", "8192", "--max-num-seqs", "512", "--json")


@pytest.mark.parametrize(
    ("flags", "depths", "code"), [([], (16,), 16), (["--compile"], (16,), 16), (["--compile", "layers"], (1, 2), None)]
)
def test_the_compiler_decides_the_number_of_pages(flags, depths, code, questions, capsys):
    """What its account has besides the pages, and its temporaries, are lost to them."""
    assert plan.main([*ONE_B, "--target", "v6e:1x1", *flags]) == 0
    (question,) = questions
    assert (question.topology, question.depths, question.bucket.variant) == ("v6e:1x1", depths, "score")
    memory = json.loads(capsys.readouterr().out)["memory"]
    all_but_pages = (5 << 30) + 16 * (100 << 20) + 2 * GIB
    fitting = (int(31.24 * GIB * 0.9) - all_but_pages) // (4 << 20) - 1
    assert memory["num_pages"] == fitting >> 5 << 5  # in eight bits
    assert memory["weights"] + memory["state"] + memory["temporaries"] == all_but_pages
    assert (memory["mark"], memory["compiled"]["code"], memory["not_compiled"]) == ("compiled", code, None)


def test_a_compiler_that_is_not_there_is_named_and_only_missed_where_it_is_asked_for(questions, capsys):
    how = "not_there is not installed: .venv/bin/python -m pip install -c scripts/constraints.txt 'a-package'"
    assert plan.main([*ONE_B, "--target", "h100"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["mark"], memory["compiled"], memory["not_compiled"]) == ("counted", None, how)
    assert plan.main([*ONE_B[:-1], "--target", "h100"]) == 0
    assert f"counted    not compiled, so the temporaries are an upper bound: {how}\n" in capsys.readouterr().out
    for asked in (["--compile"], ["--compile", "layers"]):
        assert plan.main([*ONE_B, "--target", "h100", *asked]) == 2
        assert how in capsys.readouterr().err
    for target in ("h100", "v6e"):
        assert plan.main([*ONE_B, "--target", target, "--no-compile"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        assert (memory["mark"], memory["not_compiled"]) == ("counted", None)
    assert not questions
    assert compiled.obstacle(parse_target("v6e"), 3) == "there is no slice of 3 v6e devices to compile for"


def test_temporaries_of_more_layers_are_at_most_those_of_the_bound():
    one, two = (
        Account(num_layers=n, num_pages=9, arguments=10 * n, temporaries=100 + 5 * n, code=n, cpu_s=1) for n in (1, 2)
    )
    assert [extrapolated(one, two, 32, bound).temporaries for bound in (1000, 200, 50)] == [260, 200, 110]
    assert extrapolated(one, two, 32, 0).arguments == 320


@pytest.mark.targets
@pytest.mark.slow
def test_the_compiler_finds_fewer_temporaries_than_the_bound(capsys):
    pytest.importorskip("libtpu")
    flags = ["--model", "1b", "--target", "v6e", "--max-num-batched-tokens", "256", "--max-num-seqs", "64", "--json"]
    memory = []
    for more in (["--no-compile"], []):
        assert plan.main([*flags, *more]) == 0
        memory.append(json.loads(capsys.readouterr().out)["memory"])
    assert 0 < memory[1]["temporaries"] < memory[0]["temporaries"]
    assert memory[1]["weights"] == pytest.approx(memory[0]["weights"], rel=1e-3)
    assert (memory[0]["mark"], memory[1]["mark"]) == ("counted", "compiled")


@pytest.mark.parametrize(
    ("target", "model", "flags", "words"),
    [
        ("6xh100", "70b", [], ["on 4 x h100", "2 of the 6 devices are idle"]),
        ("8xh100", "70b", [], ["on 4 x h100", "8 devices: 2 replicas of 4, --data-parallel-size 2"]),
        ("3xh100", "8b", [], ["3 devices: 3 replicas of 1, --data-parallel-size 3"]),
        ("v6e:4x4", "8b", [], ["16 replicas of 1, --data-parallel-size 4 on each of 4 hosts; a load balancer"]),
        ("v6e:4x4", "70b", ["-tp", "4", "-q", "int8"], ["16 devices: 4 replicas of 4 on each of 4 hosts"]),
        ("v6e:4x4", "70b", [], ["16 devices: 2 replicas of 8, each over 2 hosts; a load balancer"]),
        ("tpu7x:2x2x1", "8b", [], ["on 2 x tpu7x", "8 devices: 4 replicas of 2, --data-parallel-size 4"]),
        ("tpu7x:2x2x1", "8b", ["-tp", "1"], ["4 replicas of 1, --data-parallel-size 4", "4 of the 8 devices are idle"]),
        ("tpu7x", "8b", [], ["on 1 x tpu7x of 94.74 GiB"]),
    ],
)  # fmt: skip
def test_what_every_device_of_the_target_does_is_said(target, model, flags, words, capsys):
    assert plan.main(["--model", model, "--target", target, "--max-model-len", "8192", "--no-compile", *flags]) == 0
    report = capsys.readouterr().out
    for word in words:
        assert word in report
    assert ("idle" in report) == any("idle" in word for word in words)


@pytest.mark.usefixtures("short_simulations")
@pytest.mark.parametrize(
    ("target", "device", "num_chips"),
    [("tpu7x:2x2x1", "0x0076", 4), ("tpu7x:2x2x1", "0x0076", 8), ("v5e:2x4", "0x0063", 8)],
)  # fmt: skip
def test_a_host_starts_the_engines_of_the_planned_command(target, device, num_chips, tmp_path, capsys):
    """A driver lists the chips of a host, or the devices."""
    flags = ["--model", "1b", "--target", target, "--workload", "100/10", "--max-num-seqs", "16", "--json"]
    assert plan.main([*flags, "--max-num-batched-tokens", "512", "--no-compile"]) == 0
    _, *words = shlex.split(json.loads(capsys.readouterr().out)["command"])
    args = launch.parser().parse_args(words)
    pci = tmp_path / "0000:00:05.0"
    pci.mkdir()
    (pci / "vendor").write_text("0x1ae0\n")
    (pci / "device").write_text(f"{device}\n")
    served = ServedSettings(engine=EngineSettings.from_namespace(args), tokenizer=tmp_path)
    claimed: list[str] = []
    for replica in replicas_of(served, args.data_parallel_size):
        environment: dict[str, str] = {}
        claim_chips(replica, "tpu", environment, lambda device: [str(i) for i in range(num_chips)], tmp_path)
        claimed += environment.get("TPU_VISIBLE_CHIPS", "").split(",") if args.data_parallel_size > 1 else []
    assert args.data_parallel_size > 1
    assert sorted(claimed) == [str(i) for i in range(num_chips)]


@pytest.mark.usefixtures("short_simulations")
def test_a_picture_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pip install 'matplotlib>=3.10' (the extra `plot`)")
    file = tmp_path / "plan.png"
    flags = ["--model", "1b", "--target", "v5e", "--workload", "100/10", "--max-concurrency", "4", "--plot", str(file)]
    assert plan.main([*flags, "--max-num-seqs", "16", "--no-compile"]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


PUBLISHED = [
    # README.md has these errors.
    # tpu-inference's pull request 470: 11.60 requests/s
    (["--target", "v6e:1x1", "--workload", "1800/128", "--max-num-seqs", "256", "--max-num-batched-tokens", "1024"],
     "requests_per_s", 11.60, 0.05),
    # TensorRT-LLM 1.0's overview: 3,450 output tokens/s, with products in FP8, as here
    (["--target", "h100", "--workload", "2048/128", "--max-num-seqs", "512", "--max-num-batched-tokens", "8192",
      "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--memory-utilization", "0.95"],
     "output_tokens_per_s", 3450.0, 0.08),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "figure", "published", "error"), PUBLISHED)
def test_published_figures_are_met_with_the_stated_error(flags, figure, published, error, capsys):
    assert plan.main(["--model", "8b", *flags, "--json", "--no-compile"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best[figure] / published - 1 == pytest.approx(error, abs=0.02)


@pytest.mark.parametrize(
    ("model", "target", "workload"),
    [("8b", "h100", "chat"), ("1b", "l4", "code")],
)
def test_an_estimate_is_near_the_simulation(model, target, workload):
    """The steady state has no waves of arrivals, and its steps are not padded."""
    planner = plan.planned(["--model", model, "--target", target, "--workload", workload])
    candidate, traffic = planner.candidate(1, 128, 2048), planner.workload
    simulated, estimated = sweep.Simulator(), Estimator()
    full, guess = (way.measure(candidate, traffic, rate=None, objectives=None) for way in (simulated, estimated))
    assert guess.output_tokens_per_s == pytest.approx(full.output_tokens_per_s, rel=0.25)
    half = {"rate": full.requests_per_s / 2, "objectives": None}
    full, guess = (way.measure(candidate, traffic, **half) for way in (simulated, estimated))
    for metric in ("ttft_ms", "tpot_ms"):
        assert 0.5 * full.latencies[metric]["p50"] < guess.latencies[metric]["mean"] < full.latencies[metric]["p95"]
