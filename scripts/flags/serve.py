"""The flags of `scripts/serve` from which it computes settings, with what the environment and files say."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from model.inputs.json_file import read_text
from model.inputs.limits import MAX_TEMPLATE_BYTES
from model.inputs.paths import Place, local_path, place
from model.loading.copies import local_folder
from scripts.flags.cluster import ClusterFlags
from scripts.flags.compatibility import LEVEL_VARIABLE, LEVELS
from scripts.flags.parsing import json_object
from server.flag import MOST_COUNT, check_flags, flag_name, flags_of, setting, values_of
from server.settings import (
    DEFAULT_BATCH_CONCURRENCY,
    MOST_BATCH_REQUESTS,
    RESERVED_VARIABLES,
    GenerationDefaults,
    GenerationRules,
    Settings,
    TlsFiles,
)
from server.text.reasoning import REASONING_FORMATS
from server.text.tool_calls.formats import FORMATS

logger = logging.getLogger("pallas_serve")

VARIABLES_EXAMPLE = '{"enable_thinking": false}'

KEY_VARIABLE = "PALLAS_SERVE_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's variable with the default of --api-key
_of_server, _of_access, _of_requests = (partial(setting, group=group) for group in ("server", "access", "requests"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeFlags:
    """The flags."""

    GROUPS: ClassVar[dict[str, str]] = {}  # it adds to groups that are there

    served_model_name: Sequence[str] | None = _of_server(
        None, "The names of the model for clients; answers have the first", unset="as --model", nargs="+",
        metavar="NAME",
    )  # fmt: skip
    batch_concurrency: int | None = _of_server(
        None, "Requests of batches that are in the engine at once, after all others",
        unset=f"{DEFAULT_BATCH_CONCURRENCY}, and no more than half of --max-queue", least=1, most=MOST_BATCH_REQUESTS,
    )  # fmt: skip
    log_level: str | None = _of_server(
        None, "The least severe lines of the log; debug also shows the details of the start",
        unset=f"the environment's {LEVEL_VARIABLE}, or info", choices=LEVELS,
    )  # fmt: skip
    api_key: Sequence[str] = _of_access(
        (), "The keys that open the routes, all but probes, /metrics and /docs",
        unset=f"the key in the environment variable {VLLM_KEY_VARIABLE}; without it, open to all", nargs="+",
        metavar="KEY",
    )  # fmt: skip
    api_key_file: Sequence[Path] = _of_access(
        (), f"A file with one key a line. Unlike --api-key, `ps` shows neither it nor ${KEY_VARIABLE}", type=local_path,
        action="append", metavar="FILE",
    )  # fmt: skip
    tool_call_parser: str | None = _of_requests(
        None, "The form in which the model writes tool calls", unset="hermes or xlam if the template shows it, else "
        "llama3_json", choices=FORMATS,
    )  # fmt: skip
    reasoning_parser: str | None = _of_requests(
        None, "How the model marks its reasoning, which answers have apart from their content; `none` leaves it in the "
        "content", unset="qwen3 if the template or a system message shows reasoning",
        choices=REASONING_FORMATS,
    )  # fmt: skip
    tokenizer: Place | None = _of_requests(  # noqa: RUF009
        None, "A folder or a Hugging Face name with the tokenizer", unset="the model's own", metavar="DIR",
    )  # fmt: skip
    tokenizer_revision: str | None = _of_requests(
        None, "The branch, tag or commit of the tokenizer on the Hugging Face hub", unset="the newest commit",
        metavar="REF",
    )  # fmt: skip
    chat_template: Place | None = _of_requests(  # noqa: RUF009
        None, "A Jinja file in place of the model's chat templates", unset="the model's own", metavar="FILE",
    )  # fmt: skip
    default_chat_template_kwargs: str | None = _of_requests(
        None, "The variables of the chat template for requests that do not set them in `chat_template_kwargs`, such as "
        f"'{VARIABLES_EXAMPLE}'", metavar="JSON",
    )  # fmt: skip
    generation_config: str = _of_requests(
        "auto", "Defaults of requests: `auto` (the model's), `vllm` (none of the model's) or a folder's "
        "generation_config.json. Its `max_new_tokens` is the most output of any request", metavar="FROM",
    )  # fmt: skip
    override_generation_config: str | None = _of_requests(
        None, """Defaults of requests that count before those, such as '{"temperature": 0.5}'""", metavar="JSON",
    )  # fmt: skip
    max_output_tokens: int | None = _of_requests(
        None, "An upper limit of the output tokens of every request", unset="what fits the context", least=1,
        most=MOST_COUNT,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_flags(self)


DECLARED = (ClusterFlags, Settings, ServeFlags, TlsFiles)  # the classes of the server's flags, in the order of the help


def answer_settings(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Those fields of `Settings` that are computed here and decide answers. Raises ValueError or OSError for invalid
    values. `folder`: of the model's files, if it has some."""
    rules = generation_rules(args)
    return {
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
        "chat_template": read_text(args.chat_template, MAX_TEMPLATE_BYTES) if args.chat_template else None,
        "template_variables": template_variables(args.default_chat_template_kwargs),
        "generation_defaults": rules.defaults_of(folder),
        "generation_rules": rules,
    }


def template_variables(given: str | None) -> dict[str, Any]:
    """The value of `--default-chat-template-kwargs`. Raises ValueError."""
    flag = "--default-chat-template-kwargs"
    variables = {} if given is None else json_object(flag, given, VARIABLES_EXAMPLE)
    if reserved := RESERVED_VARIABLES.intersection(variables):
        raise ValueError(f"{flag} must not set {', '.join(sorted(reserved))}")
    return variables


def offline_settings(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """The fields of `Settings` for an application without HTTP. The log names flags of HTTP, which have no effect.
    Raises ValueError for several engines or hosts, and as `answer_settings`."""
    found = answer_settings(args, folder)
    for declared in DECLARED:
        for field, (flag, default) in flags_of(declared).items():
            value = getattr(args, flag.dest)
            is_default = (tuple(value) if isinstance(value, list) else value) == default
            if flag.group == "requests":
                found |= {field: value} if declared is Settings else {}
            elif flag.group in ClusterFlags.GROUPS and not is_default:
                raise ValueError(f"{flag.dest}: an LLM has one engine on this host; scripts/serve has several")
            elif not is_default:
                logger.warning("%s has no effect: an LLM serves no HTTP", flag.dest)
    return found


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


def batch_concurrency(args: argparse.Namespace) -> int:
    """The number of batch requests at once. Raises ValueError if they would fill the queue, because other requests
    would then be refused."""
    asked: int | None = args.batch_concurrency
    if asked is None:
        return max(1, min(DEFAULT_BATCH_CONCURRENCY, args.max_queue // 2))
    if args.batch_folder is not None and asked > args.max_queue:
        message = f"requests would fill the queue of --max-queue {args.max_queue}: choose fewer, or a longer queue"
        raise ValueError(f"--batch-concurrency: {asked} {message}")
    return asked


def generation_rules(args: argparse.Namespace) -> GenerationRules:
    """How the flags change the defaults of models. Raises ValueError for a folder without a file of them."""
    replacement = None
    match args.generation_config:
        case "auto":
            pass
        case "vllm":
            replacement = GenerationDefaults()
        case folder:
            where = place(folder, "--generation-config")
            if not (where / "generation_config.json").is_file():
                raise ValueError(f"--generation-config {folder}: there is no generation_config.json in this folder")
            replacement = GenerationDefaults.from_folder(local_folder(where))
    changes, most = args.override_generation_config, args.max_output_tokens
    return GenerationRules(replacement=replacement, changes=changes, most_tokens=most)


def tls_files(args: argparse.Namespace) -> TlsFiles | None:
    """The TLS files of the flags; None: plain HTTP. Raises ValueError for a flag without the flags that it needs."""
    given = values_of(TlsFiles, args)
    if given["certfile"] is not None:
        return TlsFiles(**given)
    for field, value in given.items():
        if value:
            raise ValueError(f"{flag_name(TlsFiles, field)} has no effect without --ssl-certfile")
    return None
