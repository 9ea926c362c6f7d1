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
from collections.abc import Sequence
from pathlib import Path

from model.inputs.json_file import read_text
from model.inputs.limits import MAX_TEMPLATE_BYTES
from model.inputs.paths import local_path, place, place_argument
from model.loading.source import DEMO, Kind, ModelSource, local_folder, resolve
from scripts.wiring.cluster import add_cluster_flags, cluster_of
from scripts.wiring.compatibility import add_compatibility_flags, log_warnings
from scripts.wiring.completion import PrintCompletion
from scripts.wiring.config_file import CONFIG, with_config
from scripts.wiring.device import runs_on_tpu
from scripts.wiring.errors import add_debug_flag, failed
from scripts.wiring.grouped_help import add_grouped_help
from scripts.wiring.repeated import EachCounts
from scripts.wiring.replicas import add_replica_flags, replicas_of
from scripts.wiring.settings import EngineSettings, ServedSettings, add_engine_flags
from scripts.wiring.stand_in_tokenizer import tokenizer_folder
from scripts.wiring.tls import add_tls_flags, tls_files
from server.engine.scratch_folder import ScratchFolder
from server.http.descriptors import open_standard_streams
from server.logs import FORMAT as LOG_FORMAT
from server.main import run
from server.settings import (
    DEFAULT_BATCH_CONCURRENCY,
    DEFAULT_BATCH_FOLDER_GIB,
    DEFAULT_MAX_REQUEST_LOGPROBS,
    DEFAULT_METRICS_PREFIX,
    MOST_COUNT,
    GenerationDefaults,
    Settings,
    check_range,
    flag_of,
)
from server.text.reasoning import REASONING_FORMATS
from server.text.tool_calls.formats import FORMATS

logger = logging.getLogger("pallas_serve")

ENGINE = "scripts.wiring.engine:build_served"
LEADER = "scripts.wiring.several_hosts:build_leader"
FOLLOWER = "scripts.wiring.several_hosts:build_follower"
MOST_REPLICAS = 1024
KEY_VARIABLE = "PALLAS_SERVE_API_KEY"
# Those of `--help` without a group.
COMMON_FLAGS = (
    "--model --max-model-len --quantization --kv-cache-dtype --tensor-parallel-size --data-parallel-size "
    "--memory-utilization --max-num-seqs --host --port --api-key --config"
).split()
CONNECTION_FLAGS = {
    "max_connections": (
        "N",
        int,
        "Connections. For one more, the one that has waited longest is closed, or the new one is answered 503 "
        "(default: what `ulimit -Hn` allows, at most 8192).",
    ),
    "head_timeout_s": ("S", float, "Seconds for the head of a request, and for the first byte on a connection"),
    "body_timeout_s": ("S", float, "Seconds within each of which a body must come at 1 KiB/s"),
    "idle_timeout_s": ("S", float, "Seconds between the requests of a connection; a load balancer's must be shorter"),
    "send_timeout_s": ("S", float, "Seconds in which a client must read some of what waits for it"),
    "max_body_memory_mib": ("N", int, "MiB of all requests that are being read. Beyond it they are answered 503"),
}


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
    _add_server_flags(p.add_argument_group("server", "The address, the processes and the log."))
    _add_access_flags(p.add_argument_group("access", "API keys and origins."))
    add_tls_flags(p.add_argument_group("tls", "HTTPS in place of HTTP."))
    _add_request_flags(p.add_argument_group("requests", "Defaults and limits of requests."))
    _add_connection_flags(p.add_argument_group("connections", "What a client may take, for the server's own sake."))
    return p


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="The address to listen on (default: 127.0.0.1).")
    group.add_argument("--port", type=int, default=8000, help="The port; 0: any free one (default: 8000).")
    group.add_argument(
        "--api-server-count", type=int, default=1, metavar="N",
        help="HTTP processes that share the address and the engines (default: 1).",
    )  # fmt: skip
    group.add_argument("--uds", type=local_path, metavar="PATH", help="A Unix socket in place of host and port.")
    group.add_argument(
        "--root-path", default="", metavar="PATH",
        help="The path under which a proxy serves this server, for /openapi.json (default: none).",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", nargs="+", action=EachCounts, metavar="NAME",
        help="The names of the model for clients; answers have the first (default: as --model).",
    )  # fmt: skip
    group.add_argument("--no-ui", dest="ui", action="store_false", help="There is no page at /.")
    group.add_argument(
        "--metrics-prefix", metavar="P", default=DEFAULT_METRICS_PREFIX,
        help="The prefix of the metrics' names; `vllm:` keeps existing dashboards (default: %(default)s).",
    )  # fmt: skip
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="The collector that gets an OpenTelemetry span of each request. It needs the extra `otel` "
        "(default: none).",
    )  # fmt: skip
    group.add_argument(
        "--enable-tokenizer-info-endpoint", action="store_true", help="The server answers /tokenizer_info."
    )
    group.add_argument(
        "--batch-folder", type=local_path, metavar="DIR",
        help="The server answers /v1/files and /v1/batches, and keeps files and batches in this folder, which other "
        "users must not be able to enter (default: none).",
    )  # fmt: skip
    group.add_argument(
        "--batch-folder-size", type=float, default=DEFAULT_BATCH_FOLDER_GIB, metavar="GIB",
        help="The most that the files of --batch-folder take (default: %(default)s).",
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
        help="The keys that open the routes, all but probes, /metrics and /docs (default: open to all).",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", type=local_path, action="append", default=[], metavar="FILE",
        help=f"A file with one key a line. Unlike --api-key, `ps` shows neither it nor ${KEY_VARIABLE}.",
    )  # fmt: skip
    group.add_argument("--api-key-all-routes", action="store_true", help="Probes, /metrics and /docs need a key, too.")
    group.add_argument(
        "--admin-api-key", nargs="+", action=EachCounts, default=[], metavar="KEY",
        help="The keys of the administrators' routes (default: these routes are closed).",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrent-per-key", type=int, metavar="N",
        help="Requests that one API key may have running. One more is answered 429 (default: any number).",
    )  # fmt: skip
    group.add_argument(
        "--prefix-caching-per-key", action="store_true",
        help="An API key finds cached prefixes of its own requests only.",
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
        "--trust-request-chat-template", action="store_true", help="A request may have a chat template of its own."
    )
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
    group.add_argument(
        "--tool-call-parser", choices=FORMATS,
        help="The form in which the model writes tool calls (default: hermes if the template has <tool_call>, else "
        "llama3_json).",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", choices=REASONING_FORMATS,
        help="How the model marks its reasoning, which answers have apart from their content; `none` leaves it in the "
        "content (default: qwen3 if the template has </think>, else none).",
    )  # fmt: skip
    group.add_argument(
        "--no-enable-auto-tool-choice", dest="enable_auto_tool_choice", action="store_false",
        help="A request with tools must say by `tool_choice` whether one is called.",
    )  # fmt: skip
    group.add_argument("--enable-auto-tool-choice", action="store_true", default=True, help=argparse.SUPPRESS)
    group.add_argument(
        "--enable-force-include-usage", action="store_true", help="Every stream ends with its usage, asked for or not."
    )
    group.add_argument(
        "--strict-fields", action="store_true", help="A request with an unknown field is refused, not only logged."
    )
    group.add_argument(
        "--queue-timeout", type=float, metavar="S",
        help="Seconds that a request may wait for its first step before it is answered 503 (default: any time).",
    )  # fmt: skip
    group.add_argument(
        "--max-request-logprobs", type=int, default=DEFAULT_MAX_REQUEST_LOGPROBS, metavar="N",
        help="Log-probabilities of one request: n x max_tokens x (logprobs + 1), and those of its prompt "
        "(default: %(default)s).",
    )  # fmt: skip


def _add_connection_flags(group: argparse._ArgumentGroup) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, (metavar, kind, text) in CONNECTION_FLAGS.items():
        default = defaults[name]
        text = text if default is None else f"{text} (default: {default:g})."
        group.add_argument(flag_of(name), dest=name, type=kind, default=default, metavar=metavar, help=text)


def server_settings(args: argparse.Namespace, source: ModelSource, tokenizer: Path) -> Settings:
    """The server's settings. Raises ValueError or OSError for invalid values."""
    names = args.served_model_name or (DEMO if source.name == DEMO else args.model,)
    return Settings(
        tokenizer_folder=tokenizer,
        vocab_size=source.config.vocab_size,
        model_names=tuple(names),
        model_root=str(source.weights or source.name),
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_server_count=args.api_server_count,
        tls=tls_files(args),
        root_path=args.root_path,
        api_keys=api_keys(args),
        api_key_all_routes=args.api_key_all_routes,
        admin_api_keys=tuple(args.admin_api_key),
        enable_tokenizer_info=args.enable_tokenizer_info_endpoint,
        allowed_origins=tuple(args.allowed_origins),
        chat_template=read_text(args.chat_template, MAX_TEMPLATE_BYTES) if args.chat_template else None,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        generation_defaults=_generation_defaults(args, source),
        batch_folder=args.batch_folder,
        batch_folder_gib=args.batch_folder_size,
        batch_concurrency=_batch_concurrency(args),
        metrics_prefix=args.metrics_prefix,
        ui=args.ui,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        version=version(),
        force_usage=args.enable_force_include_usage,
        queue_timeout_s=args.queue_timeout,
        strict_fields=args.strict_fields,
        trust_request_chat_template=args.trust_request_chat_template,
        max_concurrent_per_key=args.max_concurrent_per_key,
        prefix_caching_per_key=args.prefix_caching_per_key,
        debug=args.debug,
        max_request_logprobs=args.max_request_logprobs,
        **{name: getattr(args, name) for name in CONNECTION_FLAGS},
    )


def _batch_concurrency(args: argparse.Namespace) -> int:
    """Raises ValueError if batches would fill the queue: other requests would be refused."""
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
    """The API keys from flags and environment. Raises ValueError if a given source has no key: access would be open."""
    keys = list(args.api_key)
    for file in args.api_key_file:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ValueError(f"--api-key-file {file}: there is no key in it")
        keys += in_file
    if KEY_VARIABLE in os.environ:
        key = os.environ[KEY_VARIABLE].strip()
        if not key:
            raise ValueError(f"{KEY_VARIABLE} is set and holds no key: unset it to let everybody in")
        keys.append(key)
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


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
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
            served = ServedSettings(engine=engine, tokenizer=tokenizer, cluster=cluster)
            say(f"pallas-serve {settings.version}: {args.model}")

            def on_ready(url: str) -> None:
                where = url if settings.uds else f"{url}/v1"
                say(f"ready after {time.perf_counter() - started:.1f} s: {where}\ntry:\n  {curl_line(url, settings)}")

            def on_following(url: str) -> None:
                say(f"following after {time.perf_counter() - started:.1f} s: {url}/health")

            first, *others = replicas_of(served, args.data_parallel_size, spare.path)
            if cluster is None:
                return run(settings, ENGINE, first, more_engines=others, report=say, on_ready=on_ready)
            if cluster.is_leader:
                return run(settings, LEADER, served, report=say, on_ready=on_ready)
            from server.follower import run_follower

            return run_follower(settings, FOLLOWER, served, report=say, on_ready=on_following)
    except (Exception, KeyboardInterrupt) as error:
        return failed("scripts/serve", error, debug=args.debug)


def say(line: str) -> None:
    """Prints a line at once, also into a pipe. The server goes on if it cannot be written."""
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written to (%s); not printed: %s", error, line)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
