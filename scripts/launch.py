"""Serves a model over HTTP. scripts/serve installs the packages and then runs this."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from model.inputs.json_file import read_text
from model.inputs.limits import MAX_TEMPLATE_BYTES
from model.inputs.paths import local_path, place, place_argument
from model.loading.source import DEMO, Kind, ModelSource, local_folder, resolve
from scripts.building.device import runs_on_tpu
from scripts.building.replicas import add_replica_flags, replicas_of
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.flags.cluster import add_cluster_flags, cluster_of
from scripts.flags.compatibility import add_compatibility_flags, log_warnings
from scripts.flags.config_file import CONFIG, with_config
from scripts.flags.errors import add_debug_flag, failed
from scripts.flags.lora import check_not_of_model, lora_modules
from scripts.flags.parsing import EachCounts, PrintCompletion, add_grouped_help
from scripts.flags.settings import EngineSettings, ServedSettings, add_engine_flags
from scripts.flags.tls import add_tls_flags, tls_files
from server.engine.routing import Router
from server.engine.scratch_folder import ScratchFolder
from server.flag import MOST_COUNT, add_flags, check_range, flags_of
from server.http.descriptors import open_standard_streams
from server.logs import FORMAT as LOG_FORMAT
from server.main import run
from server.settings import DEFAULT_BATCH_CONCURRENCY, GROUPS, GenerationDefaults, Settings
from server.text.reasoning import REASONING_FORMATS
from server.text.tool_calls.formats import FORMATS

logger = logging.getLogger("pallas_serve")

ENGINE = "scripts.building.build:build_served"
LEADER = "scripts.building.several_hosts:build_leader"
FOLLOWER = "scripts.building.several_hosts:build_follower"
MOST_REPLICAS = 1024
_PLAN = (sys.executable, "-m", "scripts.lab", "plan")  # `scripts/plan`, which plans for the page
KEY_VARIABLE = "PALLAS_SERVE_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's variable with the default of --api-key
# The flags that `--help` shows without a group.
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
    p.add_argument(
        "--print-completion", action=PrintCompletion, help="Prints a completion of flags for bash and zsh to `eval`."
    )
    add_engine_flags(p)
    add_replica_flags(p)
    add_cluster_flags(p)
    add_compatibility_flags(p)
    parsers: dict[str, Collection[str]] = {"tool_call_parser": FORMATS, "reasoning_parser": REASONING_FORMATS}
    groups = add_flags(p, Settings, GROUPS, choices=parsers)
    _add_server_flags(groups["server"])
    _add_access_flags(groups["access"])
    _add_request_flags(groups["requests"])
    add_tls_flags(p.add_argument_group("tls", "HTTPS in place of HTTP."))
    return p


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name", nargs="+", action=EachCounts, metavar="NAME",
        help="The names of the model for clients; answers have the first (default: as --model).",
    )  # fmt: skip
    group.add_argument(
        "--batch-concurrency", type=int, metavar="N",
        help="Requests of batches that are in the engine at once, after all others (default: 64, and no more than half "
        "of --max-queue).",
    )  # fmt: skip
    group.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"),
        help="The least severe lines of the log (default: info).",
    )  # fmt: skip


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key", nargs="+", action=EachCounts, default=[], metavar="KEY",
        help="The keys that open the routes, all but probes, /metrics and /docs (default: the key in the environment "
        f"variable {VLLM_KEY_VARIABLE}; without it, open to all).",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", type=local_path, action="append", default=[], metavar="FILE",
        help=f"A file with one key a line. Unlike --api-key, `ps` shows neither it nor ${KEY_VARIABLE}.",
    )  # fmt: skip
    group.add_argument(
        "--admin-api-key", nargs="+", action=EachCounts, default=[], metavar="KEY",
        help="The keys of the administrators' routes (default: these routes are closed).",
    )  # fmt: skip
    group.add_argument(
        "--allowed-origins", nargs="+", action=EachCounts, default=["*"], metavar="ORIGIN",
        help="The origins that browsers may call from, CORS (default: all).",
    )  # fmt: skip


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer", type=place_argument, metavar="DIR",
        help="A folder with the tokenizer (default: the model's own).",
    )  # fmt: skip
    group.add_argument(
        "--chat-template", type=place_argument, metavar="FILE",
        help="A Jinja file in place of the model's chat templates (default: the model's own).",
    )  # fmt: skip
    group.add_argument(
        "--generation-config", default="auto", metavar="FROM",
        help="Defaults of requests: `auto` (the model's), `vllm` (none of the model's) or a folder's "
        "generation_config.json (default: auto). Its `max_new_tokens` is the most output of any request.",
    )  # fmt: skip
    group.add_argument(
        "--override-generation-config", metavar="JSON",
        help="""Defaults of requests that count before those, such as '{"temperature": 0.5}'.""",
    )  # fmt: skip
    group.add_argument(
        "--max-output-tokens", type=int, metavar="N",
        help="The most output tokens of any request, whatever it asks for (default: what fits the context).",
    )  # fmt: skip


def server_settings(args: argparse.Namespace, source: ModelSource, tokenizer: Path) -> Settings:
    """The server's settings. Raises ValueError or OSError for invalid values."""
    _check_role(args)
    names = args.served_model_name or (DEMO if source.name == DEMO else args.model,)
    check_not_of_model(lora_modules(args.lora_modules or ()), names)
    return Settings(
        tokenizer_folder=tokenizer,
        vocab_size=source.config.vocab_size,
        model_names=tuple(names),
        model_root=str(source.weights or source.name),
        version=version(),
        tls=tls_files(args),
        api_keys=api_keys(args),
        admin_api_keys=tuple(args.admin_api_key),
        allowed_origins=tuple(args.allowed_origins),
        chat_template=read_text(args.chat_template, MAX_TEMPLATE_BYTES) if args.chat_template else None,
        generation_defaults=_generation_defaults(args, source),
        planner=(*_PLAN, "--model", args.model, "--load-format", args.load_format, "--answer-choices", names[0]),
        lora_folder=args.lora_folder,
        batch_concurrency=_batch_concurrency(args),
        computes_for_others=args.kv_role == "prefill",
        transfer_timeout_s=args.kv_transfer_timeout,
        debug=args.debug,
        **{name: getattr(args, name) for name in flags_of(Settings)},
    )


def _check_role(args: argparse.Namespace) -> None:
    """Raises ValueError if the role and its flags contradict each other."""
    if (args.kv_role == "decode") != bool(args.prefill_url):
        raise ValueError(
            "--kv-role decode and --prefill-url need each other: the URLs are those of its prefill servers"
        )
    if args.kv_role == "prefill" and args.data_parallel_size > 1:
        raise ValueError(
            "--kv-role prefill has one engine: start several servers in place of --data-parallel-size, and name them "
            "all by --prefill-url"
        )


def _batch_concurrency(args: argparse.Namespace) -> int:
    """The number of batch requests at once. Raises ValueError if they would fill the queue, because other requests
    would then be refused."""
    if args.batch_concurrency is None:
        return max(1, min(DEFAULT_BATCH_CONCURRENCY, args.max_queue // 2))
    if args.batch_folder is not None and args.batch_concurrency > args.max_queue:
        message = f"requests would fill the queue of --max-queue {args.max_queue}: choose fewer, or a longer queue"
        raise ValueError(f"--batch-concurrency: {args.batch_concurrency} {message}")
    concurrency: int = args.batch_concurrency
    return concurrency


def _generation_defaults(args: argparse.Namespace, source: ModelSource) -> GenerationDefaults:
    defaults = GenerationDefaults()
    match args.generation_config:
        case "vllm":
            pass
        case "auto":
            defaults = defaults if source.path is None else GenerationDefaults.from_folder(source.path)
        case folder:
            where = place(folder, "--generation-config")
            if not (where / "generation_config.json").is_file():
                raise ValueError(f"--generation-config {folder}: there is no generation_config.json in this folder")
            defaults = GenerationDefaults.from_folder(local_folder(where))
    changes = args.override_generation_config
    if changes is not None:
        defaults = defaults.overridden(changes, where="--override-generation-config")
    check_range("--max-output-tokens", args.max_output_tokens, 1, MOST_COUNT)
    limits = [limit for limit in (defaults.max_new_tokens, args.max_output_tokens) if limit is not None]
    return dataclasses.replace(defaults, max_new_tokens=min(limits, default=None))


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The API keys from flags and environment. Raises ValueError if a given source has no key, because access would be
    open."""
    keys = list(args.api_key)
    for file in args.api_key_file:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ValueError(f"--api-key-file {file}: there is no key in it")
        keys += in_file
    for variable in (KEY_VARIABLE, *(() if args.api_key else (VLLM_KEY_VARIABLE,))):
        if variable in os.environ:
            key = os.environ[variable].strip()
            if not key:
                raise ValueError(f"{variable} is set and holds no key: unset it to let everybody in")
            keys.append(key)
            if variable == VLLM_KEY_VARIABLE:
                logger.info("requests need the key of the environment variable %s", variable)
    return tuple(keys)


def version() -> str:
    """The package's version, from its metadata."""
    return importlib.metadata.version("pallas-serve")


def curl_line(url: str, settings: Settings) -> str:
    """A curl command to try the server."""
    question = "What is 47 + 35?" if settings.model_names[0] == DEMO else "Hello!"
    body = {"model": settings.model_names[0], "messages": [{"role": "user", "content": question}]}
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if settings.api_keys else ""
    if settings.uds is not None:
        scheme = "http" if settings.tls is None else "https"
        url = f"--unix-socket {shlex.quote(str(settings.uds))} {scheme}://localhost"
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the command line and of `--config`. Raises ValueError or OSError for an unreadable file."""
    args = parser().parse_args(with_config(argv))
    check_range("--data-parallel-size", args.data_parallel_size, 1, MOST_REPLICAS)
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
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT)
    log_warnings(args.compatibility_warnings)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        engine = EngineSettings.from_namespace(args)
        cluster = cluster_of(args, os.environ, has_tpu=lambda: runs_on_tpu(engine))
        source = resolve(engine.model, weights=engine.load_format != "dummy")
        if source.kind is Kind.HUB:
            engine = dataclasses.replace(engine, model=str(source.path))  # downloaded once, by this process
        with ScratchFolder() as spare:
            tokenizer = tokenizer_folder(args.tokenizer, source, spare.path)
            settings = server_settings(args, source, tokenizer)
            served = ServedSettings(engine=engine, tokenizer=tokenizer, cluster=cluster, host=settings.host)
            say(f"pallas-serve {settings.version}: {args.model}")

            def on_ready(url: str) -> None:
                where = url if settings.uds else f"{url}/v1"
                say(f"ready after {time.perf_counter() - started:.1f} s: {where}\ntry:\n  {curl_line(url, settings)}")

            def on_following(url: str) -> None:
                say(f"following after {time.perf_counter() - started:.1f} s: {url}/health")

            first, *others = replicas_of(served, args.data_parallel_size, spare.path)
            if cluster is None:
                return run(settings, ENGINE, first, more_engines=others, router=router, report=say, on_ready=on_ready)
            if cluster.is_leader:
                return run(settings, LEADER, served, report=say, on_ready=on_ready)
            from server.follower import run_follower

            return run_follower(settings, FOLLOWER, served, report=say, on_ready=on_following)
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
