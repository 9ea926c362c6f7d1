"""The planner's simulated speed, its search, its cost and its flags."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.config import Scheduling
from model.network.linear import linear_method
from model.presets import preset
from model.quantization.forms import Rounding
from scripts import launch
from scripts.building.replicas import claim_chips, replicas_of
from scripts.building.step_times import FLOPS_EFFICIENCY, LINKS, MEMORY_EFFICIENCY
from scripts.flags.settings import EngineSettings, ServedSettings
from scripts.lab import plan
from scripts.lab.planning import compiled, sweep
from scripts.lab.planning.compiled import extrapolated
from scripts.lab.planning.cost import HOURS_PER_MONTH, ApiPrice, cost, listed
from scripts.lab.planning.estimate import Estimator, Mix
from scripts.lab.planning.memory import GIB, Account, size_up
from scripts.lab.planning.planner import NAMES, limits_to_try
from scripts.lab.planning.roofline import Roofline, roofline
from scripts.lab.planning.target import CHIPS, parse_target
from scripts.lab.planning.workload import arriving, parse_objectives, parse_workload
from scripts.lab.simulation.machine import Machine, Result, SimulatedRequest, simulate
from tests.examples import examples

V6E = parse_target("v6e")
EIGHT_B = roofline(
    preset("llama-3.1-8b"), V6E, weights_read=15_009_857_536, weight_itemsize=2, kv_token_bytes=131072, chips=1
)
SMALL = Machine(
    max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, num_pages=128, page_size=16, cost=EIGHT_B
)
REQUESTS = st.lists(
    st.builds(SimulatedRequest, arrival_s=st.just(0.0), num_prompt=st.integers(1, 200), num_output=st.integers(1, 60)),
    min_size=1,
    max_size=40,
)

FIXED = settings(max_examples=examples(25), derandomize=True)


def backlog(requests: list[SimulatedRequest], line: Roofline, way: Scheduling = Scheduling.CONTINUOUS) -> Result:
    known = [replace(request, max_tokens=request.num_output) for request in requests]
    return simulate(known, replace(SMALL, cost=line), scheduling=way)


def test_a_decode_of_one_row_reads_the_weights_once():
    seconds = EIGHT_B.decode_seconds(1, 1000)
    num_bytes = 15_009_857_536 + 1000 * 131072
    assert seconds == pytest.approx(num_bytes / (1638e9 * MEMORY_EFFICIENCY), rel=1e-6)


def test_a_long_prompt_takes_its_products():
    seconds = EIGHT_B.seconds(8192, 1, kv_tokens=8192, pairs=0)
    layers = 32 * 4096 * 6144 + 31 * (4096 * 4096 + 3 * 4096 * 14336)  # the last one has the last token only
    head, kv = 128256 * 4096 * 2, 8192 * 131072
    bytes_s = (head + kv) / (1638e9 * MEMORY_EFFICIENCY)
    assert seconds == pytest.approx(2 * layers * 8192 / (V6E.flops_per_s * FLOPS_EFFICIENCY) + bytes_s, rel=1e-4)


@pytest.mark.parametrize(
    ("target", "quantization", "rounding"),
    [
        ("h100", "fp8", Rounding(min_rows=256)),
        ("h100", "int8", Rounding(min_rows=256)),
        ("a100", "int8", Rounding(min_rows=256)),
        ("l4", "fp8", Rounding(min_rows=1, with_head=True)),
        ("b200", "int8", None),
        ("v5e", "int8", Rounding(min_rows=1)),
        ("v6e", "int8", Rounding(min_rows=512)),
        ("tpu7x", "fp8", Rounding(min_rows=512)),
        ("tpu7x", "int8", None),
        ("v6e", "int4", None),
        ("h100", None, None),
    ],
)
def test_products_in_8_bits_are_planned_where_the_engine_has_them(target, quantization, rounding):
    settings = EngineSettings(model="preset:llama-3.1-8b", load_format="dummy", quantization=quantization)
    sizes = size_up(settings, parse_target(target), 1)
    assert sizes.rounding == sizes.roofline.rounding == rounding
    assert sizes.model.layers[0].mlp.down.method == linear_method(sizes.model.quantization, rounding)


def test_inputs_of_8_bits_double_the_products_speed_from_so_many_rows_on():
    h100 = parse_target("h100")
    sizes = {"weights_read": 1.0, "weight_itemsize": 1, "kv_token_bytes": 0, "chips": 1}
    last = 2 * (4096 * 4096 + 3 * 4096 * 14336)  # per row
    layers = 2 * 32 * 4096 * 6144 + 31 * last
    head, peak = 2 * 128256 * 4096, 989e12 * FLOPS_EFFICIENCY

    def seconds(rounding: Rounding | None, tokens: int, rows: int) -> float:
        line = roofline(preset("llama-3.1-8b"), h100, **sizes, rounding=rounding)
        return line.seconds(tokens, rows, kv_tokens=0, pairs=0) * peak

    for rounding, tokens, rows, flops in (
        (None, 8192, 512, 8192 * layers + 512 * (last + head)),
        (Rounding(min_rows=256), 8192, 512, 8192 * layers / 2 + 512 * (last / 2 + head)),
        (Rounding(min_rows=256), 256, 1, 256 * layers / 2 + last + head),
        (Rounding(min_rows=256), 255, 255, 255 * (layers + last + head)),
        (Rounding(min_rows=256, with_head=True), 512, 128, 512 * layers / 2 + 128 * (last + head)),
        (Rounding(min_rows=1, with_head=True), 128, 128, 128 * (layers + last + head) / 2),
    ):
        assert seconds(rounding, tokens, rows) == pytest.approx(flops, rel=1e-6)


def test_chips_share_the_bytes_and_pay_for_the_sums():
    config, target = preset("llama-3.1-70b"), parse_target("v6e:2x4")
    sizes = {"weights_read": 139 * 10**9, "weight_itemsize": 2, "kv_token_bytes": 320 * 1024}
    eight = roofline(
        config, target, weights_read=sizes["weights_read"] // 8, weight_itemsize=2, kv_token_bytes=40 * 1024, chips=8
    )
    alone = roofline(config, target, **sizes, chips=1)
    sums = (2 * config.num_layers + 1) * LINKS["v6e"].latency_s
    assert eight.decode_seconds(1, 1000) > alone.decode_seconds(1, 1000) / 8 + sums
    assert eight.decode_seconds(64, 1000) < alone.decode_seconds(64, 1000) / 4


@FIXED
@given(requests=REQUESTS, faster=st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(requests, faster):
    wide = replace(EIGHT_B, memory_bytes_per_s=EIGHT_B.memory_bytes_per_s * faster)
    assert backlog(requests, wide).seconds <= backlog(requests, EIGHT_B).seconds * (1 + 1e-9)


@FIXED
@given(requests=REQUESTS)
def test_static_batching_never_beats_continuous(requests):
    continuous, static = (backlog(requests, EIGHT_B, way) for way in (Scheduling.CONTINUOUS, Scheduling.STATIC))
    assert continuous.output_tokens == static.output_tokens
    assert continuous.seconds <= static.seconds * (1 + 1e-9)


@FIXED
@given(requests=REQUESTS, rate=st.floats(1.0, 1000.0))
def test_the_same_workload_gives_the_same_figures(requests, rate):
    one, two = (simulate(arriving(requests, rate), SMALL) for _ in range(2))
    assert one == two
    assert len(one.served) == len(requests)
    assert all(served.ttft > 0 for served in one.served)


@FIXED
@given(requests=REQUESTS, clients=st.integers(1, 8))
def test_a_closed_loop_never_has_more_requests_than_clients(requests, clients):
    result = simulate(requests, SMALL, max_concurrency=clients)
    events = sorted([(s.arrived_s, 1) for s in result.served] + [(s.last_s, -1) for s in result.served])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    assert most <= clients
    assert result.output_tokens == sum(request.num_output for request in requests)


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


def test_a_rate_stretches_the_same_arrivals():
    requests = parse_workload("chat").draw(50, 8192)
    slow, fast = ([request.arrival_s for request in arriving(requests, rate)] for rate in (1.0, 4.0))
    assert slow == pytest.approx([4 * at for at in fast])


@pytest.mark.parametrize(
    ("name", "chip", "devices"),
    [
        ("v6e:2x4", "v6e", 8),
        ("tpu7x:2x2x1", "tpu7x", 8),
        ("8xh100", "h100", 8),
        ("l4", "l4", None),
        ("v5e", "v5e", None),
        ("8xH100", "h100", 8),
        ("V6E:2x4", "v6e", 8),
        ("TPU7x:1x1x1", "tpu7x", 2),
        ("RTX5090", "rtx5090", None),
    ],
)
def test_targets(name, chip, devices):
    target = parse_target(name)
    assert (target.chip.name, target.num_devices) == (chip, devices)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target", "v9:1x1"], "--target v9:1x1"),
        (["--target", "0xh100"], "--target 0xh100"),
        (["--target", "v6e:0x4"], "--target v6e:0x4"),
        (["--workload", "poetry"], "--workload poetry"),
        (["--workload", "nothing.csv"], "--workload nothing.csv: there is no such file"),
        (["--workload", "1800/many"], "--workload 1800/many"),
        (["--workload", "chat", "--slo", "speed_ms=3"], "--slo speed_ms=3"),
        (["--workload", "chat", "--slo", "ttft_ms=-3"], "--slo ttft_ms=-3"),
        (["--workload", "chat", "--slo", "percentile=99"], "--slo percentile=99"),
        (["--slo", "ttft_ms=300"], "--slo needs --workload"),
        (["--price-per-hour", "3"], "--price-per-hour needs --workload"),
        (["--workload", "chat", "--price-per-hour", "-3"], "--price-per-hour must be positive"),
        (["--workload", "chat", "--api-price", "3"], "--api-price needs --price-per-hour"),
        (["--workload", "chat", "--price-per-hour", "3", "--api-price", "0.1/0.2/0.3"], "--api-price 0.1/0.2/0.3"),
        (["--workload", "chat", "--price-per-hour", "3", "--api-price", "Me=free"], "--api-price Me=free"),
        (["--workload", "200000/1"], "--workload 200000/1: a request has 200001 tokens"),
        (["--html", "plan.html"], "--html needs --workload"),
        (["--workload", "chat", "--currency", "EUR"], "--currency needs --price-per-hour"),
        (["--workload", "chat", "--request-rate", "3", "--max-concurrency", "3"], "exclude each other"),
        (["--target", "8xh100", "--tensor-parallel-size", "3"], "--tensor-parallel-size 3 does not divide"),
        (["--workload", "chat", "--scheduling", "static"], "--scheduling is not simulated"),
        (["--workload", "chat", "--speculative-config", "{}"], "--speculative-config is not simulated"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags, words, capsys):
    assert plan.main(["--model", "1b", *flags]) == 2
    assert words in capsys.readouterr().err


def test_objectives_read_a_percentile():
    objectives = parse_objectives("ttft_ms=300,tpot_ms=20,percentile=99")
    assert objectives.percentile == 99
    assert objectives.met({"ttft_ms": 300, "tpot_ms": 19, "itl_ms": 1e9})
    assert not objectives.met({"ttft_ms": 301, "tpot_ms": 19, "itl_ms": 0})


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


@pytest.mark.usefixtures("short_simulations")
def test_the_break_even_does_not_depend_on_the_load(capsys):
    """A light load costs more per token. What the deployment can serve stays the same."""
    flags = [
        "--model",
        "1b",
        "--target",
        "v5e",
        "--workload",
        "200/20",
        "--price-per-hour",
        "1.2",
        "--api-price",
        "0.05",
    ]
    flags += ["--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--no-compile", "--json"]
    planned = []
    for load in ([], ["--request-rate", "1"], ["--max-concurrency", "4"]):
        assert plan.main([*flags, *load]) == 0
        planned.append(json.loads(capsys.readouterr().out))
    busy, light, few = (one["cost"] for one in planned)
    served = planned[0]["best"]["total_tokens_per_s"] * 3600 * 730 / 1e6
    assert [one["capacity"] for one in (busy, light, few)] == pytest.approx([served] * 3)
    apis = [one["apis"][0] for one in (busy, light, few)]
    assert [api["break_even"] for api in apis] == pytest.approx([1.2 * 730 / 0.05] * 3)
    assert [api["break_even_share"] for api in apis] == pytest.approx([1.2 * 730 / 0.05 / served] * 3)
    assert light["per_million_total"] == pytest.approx(1.2 / (planned[1]["best"]["total_tokens_per_s"] * 3600 / 1e6))
    assert light["per_million_total"] > few["per_million_total"] > busy["per_million_total"]


@pytest.mark.usefixtures("short_simulations")
def test_a_limit_of_latency_limits_the_capacity_too(capsys):
    flags = ["--model", "1b", "--target", "v5e", "--workload", "200/20", "--price-per-hour", "1.2", "--json"]
    flags += ["--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--no-compile", "--request-rate", "1"]
    capacities = []
    for more in (["--slo", "tpot_ms=6"], []):
        assert plan.main([*flags, *more]) == 0
        capacities.append(json.loads(capsys.readouterr().out)["cost"]["capacity"])
    assert 220 * 3600 * 730 / 1e6 < capacities[0] < 0.9 * capacities[1]


@pytest.mark.usefixtures("short_simulations")
@pytest.mark.parametrize("currency", [None, "EUR"])
def test_prices_are_in_a_currency(currency, capsys):
    flags = [*SEARCH, "--max-num-batched-tokens", "512", *([] if currency is None else ["--currency", currency])]
    assert plan.main(flags) == 0
    report = capsys.readouterr().out
    name = currency or "USD"
    assert f"1,752 {name} per month; at this load a million output tokens " in report
    assert f" {name}, a million tokens in and out " in report


SEARCH = (
    "--model", "1b", "--target", "v5e:1x2", "--workload", "uniform:100:300/uniform:5:30",
    "--slo", "ttft_ms=200,tpot_ms=10", "--max-num-seqs", "64", "--price-per-hour", "2.4", "--api-price", "0.1",
    "--no-compile",
)  # fmt: skip


@pytest.mark.usefixtures("short_simulations")
def test_a_plan_is_a_report_with_a_mark_on_every_line(capsys):
    assert plan.main(list(SEARCH)) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert {line.split()[0] for line in lines} == {"counted", "estimated"}
    (command,) = (line for line in lines if "scripts/serve" in line)
    assert "p95 within TTFT 200 ms, TPOT 10 ms" in command
    assert "--model preset:llama-3.2-1b --load-format dummy --max-model-len 1024 --max-num-seqs 64" in command
    for words in ("requests/s", "TTFT", "TPOT", "ITL", "preemptions", "static batching", "per month", "the API"):
        assert words in out


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
    assert planned["static"]["continuous"] > planned["static"]["static"]
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


@pytest.mark.usefixtures("short_simulations")
def test_the_best_settings_are_simulated_with_the_pages_of_the_compilers_account(monkeypatch, questions, capsys):
    flags = ["--model", "1b", "--target", "v5e:1x1", "--workload", "uniform:100:300/uniform:5:30", "--json"]
    flags += ["--max-concurrency", "64", "--max-num-seqs", "64", "--max-num-batched-tokens", "512"]
    assert plan.main([*flags, "--no-compile"]) == 0
    counted = json.loads(capsys.readouterr().out)
    needs = counted["memory"]
    assert counted["best"]["num_preemptions"] == 0 and "--num-pages" not in counted["command"]

    def with_100_pages(question):
        held = needs["weights"] + needs["state"]
        temporaries = int(15.75 * GIB * 0.9) - held - 101 * needs["page"]
        arguments = held + (question.num_pages + 1) * needs["page"]
        return [Account(num_layers=16, num_pages=question.num_pages, arguments=arguments, temporaries=temporaries,
                        code=1, cpu_s=1.0)]  # fmt: skip

    monkeypatch.setattr(compiled, "_ask", with_100_pages)
    assert plan.main(flags) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"]["num_pages"] == 100
    assert "--num-pages 100" in planned["command"]
    assert planned["best"]["pages_used"] > 0.9
    assert planned["tried"] == [counted["best"], planned["best"]]
    waits = [outcome["latencies_ms"]["ttft"]["p95"] for outcome in planned["tried"]]
    assert waits[0] < waits[1]
    assert plan.main([*flags, "--slo", f"ttft_ms={sum(waits) / 2}"]) == 1
    assert "with the 100 pages of the compiler's account" in capsys.readouterr().err


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


@given(rows=st.none() | st.integers(1, 20000), tokens=st.none() | st.integers(2, 20000))
def test_any_limit_has_another_that_goes_with_it(rows, tokens):
    seqs, budgets = limits_to_try(rows, tokens)
    assert rows is None or list(seqs) == [rows]
    assert tokens is None or list(budgets) == [tokens]
    if rows is None or tokens is None:
        assert any(budget > row for row in seqs for budget in budgets)


@pytest.mark.usefixtures("short_simulations")
def test_a_trace_is_replayed(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{i:02}.0000000,{200 + i},{5 + i}" for i in range(20)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    flags = ["--model", "1b", "--target", "v5e", "--workload", str(trace), "--request-rate", "20"]
    assert plan.main([*flags, "--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--no-compile"]) == 0
    assert "trace.csv: 1 simulated loads" in capsys.readouterr().out


def test_without_a_workload_a_model_is_planned_on_the_fewest_chips_that_hold_it(capsys):
    assert plan.main(["--model", "70b", "--target", "8xh100", "--max-model-len", "8192", "--no-compile"]) == 0
    report = capsys.readouterr().out
    assert "on 4 x h100" in report
    assert "counted    8 devices: 2 replicas of 4, --data-parallel-size 2\n" in report


@pytest.mark.parametrize(
    ("target", "model", "flags", "words"),
    [
        ("6xh100", "70b", [], ["on 4 x h100", "2 of the 6 devices are idle"]),
        ("7xh100", "70b", [], ["on 4 x h100", "3 of the 7 devices are idle"]),
        ("3xh100", "8b", [], ["3 devices: 3 replicas of 1, --data-parallel-size 3"]),
        ("v6e:2x4", "8b", [], ["8 devices: 8 replicas of 1, --data-parallel-size 8"]),
        ("v6e:4x4", "8b", [], ["16 replicas of 1, --data-parallel-size 4 on each of 4 hosts; a load balancer"]),
        ("v6e:4x4", "70b", ["-tp", "4", "-q", "int8"], ["16 devices: 4 replicas of 4 on each of 4 hosts"]),
        ("v6e:4x4", "70b", [], ["16 devices: 2 replicas of 8, each over 2 hosts; a load balancer"]),
        ("v5p:2x2x2", "70b", ["-tp", "8"], ["on 8 x v5p"]),
        ("tpu7x:2x2x1", "8b", [], ["on 2 x tpu7x", "8 devices: 4 replicas of 2, --data-parallel-size 4"]),
        ("tpu7x:2x2x1", "8b", ["-tp", "1"], ["4 replicas of 1, --data-parallel-size 4", "4 of the 8 devices are idle"]),
        ("tpu7x", "8b", [], ["on 1 x tpu7x of 94.74 GiB"]),
        ("v6e", "8b", [], ["on 1 x v6e of 31.24 GiB"]),
        ("v5e", "1b", [], ["on 1 x v5e of 15.75 GiB"]),
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
     "output_tokens_per_s", 3450.0, 0.15),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "figure", "published", "error"), PUBLISHED)
def test_published_figures_are_met_with_the_stated_error(flags, figure, published, error, capsys):
    assert plan.main(["--model", "8b", *flags, "--json", "--no-compile"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best[figure] / published - 1 == pytest.approx(error, abs=0.02)


@pytest.mark.parametrize(
    ("model", "target", "workload"),
    [("8b", "h100", "chat"), ("8b", "v6e:1x1", "1800/128"), ("1b", "l4", "code"), ("8b", "h100", "agents")],
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
    full, guess = (way.compare(candidate, traffic) for way in (simulated, estimated))
    assert guess["static"] == pytest.approx(full["static"], rel=0.25)
    assert (guess["continuous"] > 1.2 * guess["static"]) == (full["continuous"] > 1.2 * full["static"])


def test_the_means_of_a_workload():
    fixed = Mix.of(parse_workload("300/20"), 1024, prefix_caching=True)
    assert (fixed.prompt, fixed.computed, fixed.output, fixed.context) == (300, 300, 20, 310)
    rag = parse_workload("rag")
    cached, plain = (Mix.of(rag, 1 << 17, prefix_caching=caching) for caching in (True, False))
    assert plain.computed - cached.computed == 400
    evenly = Mix.of(parse_workload("100/uniform:1:100"), 1024, prefix_caching=True)
    assert evenly.longest_of(1) == pytest.approx(evenly.output)
    assert evenly.longest_of(9) == pytest.approx(0.9 * 100, abs=2)


ESTIMATE = ("--model", "1b", "--target", "v5e:1x1", "--workload", "200/20", "--no-simulate")


def test_an_estimate_judges_means_and_says_so(capsys):
    assert plan.main([*ESTIMATE, "--slo", "ttft_ms=200"]) == 0
    report = capsys.readouterr().out
    assert "best, mean within TTFT 200 ms: scripts/serve" in report
    assert "preemptions" not in report
    assert plan.main([*ESTIMATE, "--slo", "ttft_ms=200", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["latencies_ms"]["ttft"].keys() == {"mean"}
    assert best["latencies_ms"]["ttft"]["mean"] <= 200


def test_a_rate_that_is_too_high_is_answered_with_the_highest(capsys):
    assert plan.main([*ESTIMATE, "--request-rate", "1e5"]) == 1
    error = capsys.readouterr().err
    most = float(error.split("serves at most ")[1].split()[0])
    assert "--request-rate 100000 is too high" in error
    assert plan.main([*ESTIMATE, "--request-rate", str(most * 0.99)]) == 0


def test_listed_prices_have_dates_and_sources():
    prices = listed()
    assert prices["chips"].keys() <= CHIPS.keys()
    assert {api["model"] for api in prices["apis"]} == NAMES.keys()
    for price in (*prices["chips"].values(), *prices["apis"]):
        assert price["as_of"].startswith("20") and price["source"]
        assert all(price[name] > 0 for name in ("per_hour", "input", "output") if name in price)
