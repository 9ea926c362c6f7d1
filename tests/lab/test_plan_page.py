"""The page's choices as flags, and the page as a file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from scripts.lab import plan
from scripts.lab.planning.page import CUSTOM, SERVED, chosen, flags, options, targets
from scripts.lab.planning.target import parse_target
from server.api.routes.planner import PlanRequest

BASE = {"model": "1b", "target": "1xl4", "workload": "chat"}
FULL = BASE | {
    "workload": CUSTOM, "prompt_tokens": 300, "output_tokens": 20, "request_rate": 1.5, "itl_ms": 30.0,
    "quantization": "int8", "kv_cache_dtype": "fp8", "price_per_hour": 0.8, "api_prices": ["Some One=0.05/0.08"],
}  # fmt: skip


class Links(HTMLParser):
    """What a page asks a browser to load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]


def test_every_target_of_the_form_is_one_of_the_command():
    for name, target in targets().items():
        parsed = parse_target(name)
        assert parsed.chip.name == target["chip"]
        assert parsed.num_devices == target["count"] * parsed.devices_per_process


def test_a_choice_and_its_flags_are_the_same():
    argv = flags(PlanRequest(**FULL), [])
    assert {name: value for name, value in chosen(plan.parser().parse_args(argv)).items() if value is not None} == {
        name: str(value) if name in ("prompt_tokens", "output_tokens") else value for name, value in FULL.items()
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "/etc"}, "model"),
        ({"model": SERVED}, "model"),
        ({"target": "v6e:1000x1000"}, "target"),
        ({"workload": "/etc/trace.csv"}, "workload"),
        ({"workload": CUSTOM, "output_tokens": 3}, "prompt_tokens"),
        ({"workload": CUSTOM, "prompt_tokens": 3}, "output_tokens"),
        ({"quantization": "int3"}, "quantization"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
    ],
)
def test_a_choice_that_cannot_be_used_names_its_field(change, field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        flags(PlanRequest(**BASE | change), [])


def test_the_served_model_is_offered_first_and_only_by_its_name():
    served = ["--model", "/models/mine", "--load-format", "auto"]
    assert next(iter(options("mine")["models"].items())) == (SERVED, "mine")
    assert flags(PlanRequest(**BASE | {"model": SERVED}), served)[:4] == served


def test_the_file_needs_no_network_and_has_the_choice_and_the_planners_figures(tmp_path, capsys):
    file = tmp_path / "plan.html"
    argv = flags(PlanRequest(**FULL), [])
    assert plan.main([*argv, "--json", "--html", str(file)]) == 0
    figures = json.loads(capsys.readouterr().out)
    page = file.read_text()
    assert Links(page).found == []
    assert not re.search(r"https?:|@import|url\(|^import |fetch\(", page, re.MULTILINE)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert data["choice"] == chosen(plan.parser().parse_args(argv))
    command = data["plan"].pop("plan_command")
    assert data["plan"] == figures
    assert "--html" in command
