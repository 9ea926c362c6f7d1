"""The planner's end of the page: the form's choice becomes the command's flags, and a plan becomes JSON or a file."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from model.inputs.words import one_line
from model.quantization.forms import FORM_NAMES
from pallas_kernels.chips import TPUS
from scripts.flags.errors import FailedError
from scripts.flags.settings import KV_CACHE_DTYPES
from scripts.lab.load.presets import TRAFFIC
from scripts.lab.planning.compiled import slice_name
from scripts.lab.planning.cost import ApiPrice, listed
from scripts.lab.planning.planner import NAMES, Planner
from scripts.lab.planning.target import CHIPS, Target
from server.api.routes.planner import PlanRequest
from server.api.routes.ui import FOLDER

Plan = Callable[[Sequence[str]], Planner]  # of flags
SERVED = "served"
CUSTOM = "custom"
COUNTS = (1, 2, 4, 8, 16)  # chips
# Kind of traffic -> limits of latency that the form begins with.
LIMITS: dict[str, dict[str, float]] = {
    "chat": {"ttft_ms": 500, "itl_ms": 50},
    "code": {"ttft_ms": 500, "itl_ms": 30},
    "rag": {"ttft_ms": 2000, "itl_ms": 50},
    "batch": {},
    "agents": {"ttft_ms": 2000, "itl_ms": 50},
}
TARGET_FLAGS = {"target-ttft": "ttft_ms", "target-itl": "itl_ms"}
_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
  <title>{title}</title>
  <style>{style}</style>
</head>
<body>
  <header class="bar"><h1>{title}</h1></header>
  <div id="view">{main}</div>
  <script type="application/json" id="data">{data}</script>
  <script type="module">{script}
startPlan({{ page: JSON.parse(document.querySelector("#data").textContent) }});</script>
</body>
</html>
"""  # noqa: E501


def targets() -> dict[str, dict[str, Any]]:
    """The chips that the form offers, as `--target` names them, with their listed prices together."""
    offered = {}
    for chip in CHIPS:
        for num in COUNTS:
            name = f"{chip}:{slice_name(chip, num)}" if chip in TPUS else f"{num}x{chip}"
            price = listed()["chips"].get(chip)
            together = {"price_per_hour": round(num * price["per_hour"], 2), **price} if price else {}
            offered[name] = {"chip": chip, "count": num, **together}
    return offered


def options(served: str | None) -> dict[str, Any]:
    """What the form offers. `served` is the name of the server's model."""
    return {
        "models": {**({} if served is None else {SERVED: served}), **NAMES},
        "targets": targets(),
        "workloads": LIMITS,
        "quantizations": FORM_NAMES,
        "kv_cache_dtypes": KV_CACHE_DTYPES,
        "apis": listed()["apis"],
    }


def flags(choice: PlanRequest, served: Sequence[str]) -> list[str]:
    """The flags of `scripts/plan` for a choice. A client names neither files nor other models than `served`, whose
    flags these are. Raises ValueError, whose message begins with the field."""
    if choice.model not in (*NAMES, *([SERVED] if served else [])):
        raise ValueError(f"model: there are {', '.join(NAMES)} and the server's own, not {choice.model!r}")
    if choice.target not in targets():
        raise ValueError(f"target: there are {', '.join(targets())}, not {choice.target!r}")
    workload = choice.workload
    if workload == CUSTOM:
        for field in ("prompt_tokens", "output_tokens"):
            if getattr(choice, field) is None:
                raise ValueError(f"{field}: the workload {CUSTOM!r} needs it")
        workload = f"{choice.prompt_tokens}/{choice.output_tokens}"
    elif workload not in TRAFFIC:
        raise ValueError(f"workload: there are {', '.join(TRAFFIC)} and {CUSTOM}, not {workload!r}")
    for field, known in (("quantization", FORM_NAMES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
        if getattr(choice, field) not in (None, *known):
            raise ValueError(f"{field}: there are {', '.join(known)}, not {getattr(choice, field)!r}")
    given = {
        "target": choice.target,
        "quantization": choice.quantization,
        "kv-cache-dtype": None if choice.kv_cache_dtype == "auto" else choice.kv_cache_dtype,
        "workload": workload,
        **{flag: None if (ms := getattr(choice, name)) is None else f"{ms:g}" for flag, name in TARGET_FLAGS.items()},
        "request-rate": None if choice.request_rate is None else f"{choice.request_rate:g}",
        "price-per-hour": None if choice.price_per_hour is None else f"{choice.price_per_hour:g}",
    }
    words = list(served) if choice.model == SERVED else ["--model", choice.model]
    for name, value in given.items():
        words += [] if value is None else [f"--{name}", value]
    for price in choice.api_prices if choice.price_per_hour else []:
        words += ["--api-price", price]
    return [*words, "--no-compile", *([] if choice.simulate else ["--no-simulate"])]


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The choice that flags make: the inverse of `flags`."""
    lengths = re.fullmatch(r"(\d+)/(\d+)", args.workload)
    return {
        "model": args.model,
        "target": args.target,
        "workload": CUSTOM if lengths else args.workload,
        **({"prompt_tokens": lengths[1], "output_tokens": lengths[2]} if lengths else {}),
        "ttft_ms": args.target_ttft,
        "itl_ms": args.target_itl,
        "request_rate": args.request_rate,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "price_per_hour": args.price_per_hour,
        "api_prices": args.api_price,
    }


def add_listed_prices(args: argparse.Namespace, target: Target) -> None:
    """Fills in prices that are not given, if they are known."""
    if args.price_per_hour is None:
        args.price_per_hour = targets().get(target.name, {}).get("price_per_hour")
    if args.price_per_hour is not None and not args.api_price:
        prices = [api for api in listed()["apis"] if api["model"] == args.model.lower()]
        args.api_price = [str(ApiPrice(**{name: api[name] for name in ("name", "input", "output")})) for api in prices]


def plan_json(planner: Planner, argv: Sequence[str]) -> dict[str, Any]:
    """What the page shows. `argv` are the planner's flags."""
    return {**planner.figures(), "plan_command": shlex.join(["scripts/plan", *argv])}


def write_file(path: Path, planner: Planner, argv: Sequence[str]) -> None:
    """The page as one file that needs neither a server nor a network, with one plan. Its form shows the choice."""
    plan = plan_json(planner, argv)
    data = json.dumps({"options": options(None), "choice": chosen(planner.args), "plan": plan})
    page = (FOLDER / "index.html").read_text()
    (main,) = re.findall(r'<main id="plan" hidden>.*?</main>', page, re.DOTALL)
    path.write_text(
        _DOCUMENT.format(
            title=f"Plan: {plan['model']} on {plan['target']}",
            style=(FOLDER / "style.css").read_text(),
            main=main.replace(" hidden>", ">", 1),
            data=data.replace("<", "\\u003c"),
            script=(FOLDER / "plan.js").read_text().replace("export function", "function"),
        )
    )


def answer_choices(plan: Plan, served: Sequence[str], name: str) -> None:
    """Answers the server: reads a line of JSON for each choice, or `null` for the options, and writes lines of JSON.

    Args:
        served: flags that name the server's model.
        name: of that model.
    """
    os.nice(5)  # the server comes first
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else may write among the answers

    def write(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    def progress(planner: Planner) -> Callable[[str], None]:
        reported = count(1)
        return lambda line: write({"progress": min(next(reported) / planner.num_candidates, 1), "note": line})

    for line in sys.stdin:
        choice = msgspec.json.decode(line, type=PlanRequest | None)
        if choice is None:
            write(options(name))
            _ = plan(
                ["--model", "1b", "--target", "h100", "--no-simulate"]
            ).chosen  # imports what the first choice needs
            continue
        try:
            argv = flags(choice, served)
            planner = plan(argv)
            planner.report = progress(planner) if choice.simulate else lambda _line: None
            write(plan_json(planner, argv))
        except (ValueError, FailedError) as error:
            message = one_line(str(error))
            named = re.match(r"--([a-z-]+) |([a-z_]+):", message)  # the flag, or the field
            field = named and (named[2] or named[1].replace("-", "_"))
            write({"refusal": {"param": field, "message": message}})
