"""Serves a model over HTTP. scripts/serve installs the packages and then runs this."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from model.inputs.words import report_lines
from model.loading.source import DEMO, Kind, ModelSource
from scripts.building.device import runs_on_tpu
from scripts.building.replicas import replicas_of
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.flags.cluster import ClusterFlags, cluster_of
from scripts.flags.compatibility import log_level, unread_variables
from scripts.flags.config_file import CONFIG, with_config
from scripts.flags.errors import add_debug_flag, failed
from scripts.flags.lora import check_names_differ, lora_modules, named_models
from scripts.flags.parsing import add_grouped_help, parse_flags
from scripts.flags.serve import (
    DECLARED,
    KEY_VARIABLE,
    ServeFlags,
    answer_settings,
    api_keys,
    batch_concurrency,
    tls_files,
)
from scripts.flags.settings import EngineSettings, ServedSettings, add_engine_flags
from server.engine.routing import Router
from server.engine.scratch_folder import ScratchFolder
from server.flag import add_flags, values_of
from server.http.descriptors import open_standard_streams
from server.logs import configure_log
from server.main import run
from server.settings import Settings

logger = logging.getLogger("pallas_serve")

ENGINE = "scripts.building.build:build_served"
LEADER = "scripts.building.several_hosts:build_leader"
FOLLOWER = "scripts.building.several_hosts:build_follower"
_PLAN = (sys.executable, "-m", "scripts.lab", "plan")  # `scripts/plan`, which plans for the page
_PROGRAM = re.compile(r"(/.*/)?(vllm|trl|python[\d.]*)|serve|vllm-serve|-m|vllm\.entrypoints\.[\w.]+")
# The flags that `--help` shows without a group, and README.md.
COMMON_FLAGS = (
    "--model --max-model-len --quantization --kv-cache-dtype --tensor-parallel-size --data-parallel-size "
    "--memory-utilization --max-num-seqs --host --port --api-key --config"
).split()


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="scripts/serve",
        description="Serves a Llama 3 behind an OpenAI-compatible endpoint; without flags, the demo on 127.0.0.1:8000.",
        usage="%(prog)s [MODEL] [flags]",
        allow_abbrev=False,
        add_help=False,
    )
    add_grouped_help(p, common=COMMON_FLAGS)
    p.add_argument("positional_model", nargs="?", metavar="MODEL", help="The model, as --model names it.")
    p.add_argument(CONFIG, metavar="FILE", help="A YAML file of `flag: value` lines; the command line counts first.")
    add_debug_flag(p)
    add_engine_flags(p)
    for declared in DECLARED:
        add_flags(p, declared)
    return p


def server_settings(args: argparse.Namespace, source: ModelSource, tokenizer: Path) -> Settings:
    """The server's settings. Raises ValueError or OSError for invalid values."""
    names = args.served_model_name or (DEMO if source.name == DEMO else args.model,)
    check_names_differ(named_models(args.models or ()), lora_modules(args.lora_modules or ()), names)
    return Settings(
        tokenizer_folder=tokenizer,
        vocab_size=source.config.vocab_size,
        model_names=tuple(names),
        model_root=str(source.weights or source.name),
        version=version(),
        tls=tls_files(args),
        api_keys=api_keys(args),
        planner=(*_PLAN, "--model", args.model, "--load-format", args.load_format, "--answer-choices", names[0]),
        lora_folder=args.lora_folder,
        models_folder=args.models_folder,
        batch_concurrency=batch_concurrency(args),
        debug=args.debug,
        **answer_settings(args, source.path),
        **values_of(Settings, args),
    )


def version() -> str:
    """The package's version, from its metadata."""
    return importlib.metadata.version("pallas-serve")


def follower_settings(settings: Settings) -> Settings:
    """The settings of a host that follows a leader. It serves plain HTTP from one process, and no requests."""
    return dataclasses.replace(
        settings, is_follower=True, api_server_count=1, tls=None, batch_folder=None, ui=False, otlp_traces_endpoint=None
    )


def curl_line(url: str, settings: Settings) -> str:
    """A curl command to try the server."""
    question = "What is 47 + 35?" if settings.model_names[0] == DEMO else "Hello!"
    body = {"model": settings.model_names[0], "messages": [{"role": "user", "content": question}]}
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if settings.api_keys else ""
    if settings.uds is not None:
        scheme = "http" if settings.tls is None else "https"
        url = f"--unix-socket {shlex.quote(str(settings.uds))} {scheme}://localhost"
    header = "-H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions {header}{key} \\\n    -d '{json.dumps(body)}'"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the command line and of `--config`. The line may begin with the name of vLLM's program. Raises
    ValueError or OSError for an unreadable file."""
    own, given = (argv[:2], argv[2:]) if argv[:1] == ["--device"] else ([], argv)  # of scripts/serve, of the user
    while len(given) > 1 and _PROGRAM.fullmatch(given[0]):
        given = given[1:]
    args = parse_flags(parser(), with_config([*own, *given]))
    for kind in (ClusterFlags, ServeFlags):
        kind(**values_of(kind, args))  # checks the values
    if args.positional_model is not None:
        if args.model not in (DEMO, args.positional_model):
            raise ValueError(f"two models are named: {args.positional_model} and --model {args.model}")
        args.model = args.positional_model
    return args


def main(argv: list[str] | None = None, router: Router | None = None) -> int:
    """Runs the command and returns its exit code. `router` chooses among several engines; None: the usual one does."""
    started = time.perf_counter()
    open_standard_streams()
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        return failed("scripts/serve", error, debug=False)
    try:
        configure_log(log_level(args.log_level, os.environ), args.log_format)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        for line in unread_variables(os.environ):
            logger.info("%s", line)
        engine = EngineSettings.from_namespace(args)
        cluster = cluster_of(args, os.environ, has_tpu=lambda: runs_on_tpu(engine))
        source = engine.source()
        if source.kind is Kind.HUB:  # downloaded once, by this process
            engine = dataclasses.replace(engine, model=str(source.weights), revision=None)
        with ScratchFolder() as spare:
            tokenizer = tokenizer_folder(args.tokenizer, source, spare.path, args.tokenizer_revision)
            settings = server_settings(args, source, tokenizer)
            served = ServedSettings(engine=engine, tokenizer=tokenizer, cluster=cluster)
            say(f"pallas-serve {settings.version}: {args.model}")

            def on_ready(url: str) -> None:
                if settings.is_follower:
                    say(f"following after {time.perf_counter() - started:.1f} s: {url}/health")
                    return
                where = url if settings.uds else f"{url}/v1"
                say(f"ready after {time.perf_counter() - started:.1f} s: {where}\ntry:\n  {curl_line(url, settings)}")

            def tell(line: str) -> None:
                say(report_lines(line, verbose=logger.isEnabledFor(logging.DEBUG)))

            first, *others = replicas_of(served, args.data_parallel_size, spare.path)
            if cluster is None:
                return run(settings, ENGINE, first, more_engines=others, router=router, report=tell, on_ready=on_ready)
            if not cluster.is_leader:
                settings = follower_settings(settings)
            return run(settings, LEADER if cluster.is_leader else FOLLOWER, served, report=tell, on_ready=on_ready)
    except (Exception, KeyboardInterrupt) as error:
        return failed("scripts/serve", error, debug=args.debug)


def say(line: str) -> None:
    """Prints a line at once, even into a pipe. The server continues if the line cannot be written."""
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written to (%s); not printed: %s", error, line)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
