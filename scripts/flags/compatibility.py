"""Flags of vLLM's command line without a meaning here: they are accepted with a warning, or with some values only.

vLLM's other flags are unknown, and argparse refuses them by name.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

from batcher.request import MAX_LOGPROBS

logger = logging.getLogger("pallas_serve")

# what a server does anyway -> the flags that ask for it or for something else; those with a value end in `=`
_WITHOUT_EFFECT = {
    "every step is a program that was compiled before the first request": (
        "--enforce-eager --compilation-config= --max-seq-len-to-capture= --max-cudagraph-capture-size= "
        "--optimization-level= -O="
    ),
    "prompts are always computed in chunks": "--enable-chunked-prefill --no-enable-chunked-prefill",
    "requests are not logged": (
        "--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log --enable-log-requests "
        "--enable-log-outputs --max-log-len="
    ),
    "statistics are on /metrics and not logged": "--disable-log-stats --no-disable-log-stats",
    "the engine always runs in a process of its own": "--disable-frontend-multiprocessing",
    "usage always says how many tokens of a prompt were cached": "--enable-prompt-tokens-details",
    "the next step is always scheduled while the device runs: --pipeline-depth": "--async-scheduling",
    "administrators can always use /sleep and /wake_up: --admin-api-key": "--enable-sleep-mode",
    "answers always have the header X-Request-Id": "--enable-request-id-headers",
    "/load always counts the running requests": "--enable-server-load-tracking",
    "one process drives the chips of an engine on each host": "--distributed-executor-backend=",
    "grammars are compiled by llguidance": "--guided-decoding-backend= --structured-outputs-config=",
    "a request that gives up its pages is computed again": "--swap-space=",
    "clients show their keys in headers, not in cookies": "--allow-credentials",
    "there is no such attention": "--disable-cascade-attn",
    "sums between chips are those of the compiler": "--disable-custom-all-reduce",
    "all layers have pages of one form": "--disable-hybrid-kv-cache-manager",
    "the model has none": "--disable-sliding-window",
    "/docs names no other host": "--enable-offline-docs",
    "tools are never shown where none may be called": "--exclude-tools-when-tool-choice-none",
    "answers have no fingerprint": "--fingerprint-mode=",
    "the head of a request has limits of its own": "--h11-max-header-count= --h11-max-incomplete-event-size=",
    "only the language model is ever loaded": "--language-model-only",
    "an adapter with biases is refused when it is loaded": "--enable-lora-bias",
    "adapters are on the chips as the projections are that they change": "--fully-sharded-loras",
    "adapters have the type of the computation": "--lora-dtype=",
    "an adapter that adds tokens is refused when it is loaded": "--lora-extra-vocab-size=",
    "there is one implementation of the model": "--model-impl=",
    "--pipeline-depth 1 schedules a step after the one before it": "--no-async-scheduling",
    "a start prints a line for each of its phases": "--no-use-tqdm-on-load --use-tqdm-on-load",
    "the shapes of steps follow --max-num-seqs and --max-num-batched-tokens": "--performance-mode=",
    "requests go by their priority; those of one priority share the rows of a step": "--scheduling-policy=",
    "metrics have their old names next to the new ones": "--show-hidden-metrics-for-version=",
    "--log-level is for all of the server": "--uvicorn-log-level=",
}
# The values with which a flag changes nothing, and why others are refused.
ONLY_WITH: dict[str, tuple[tuple[str, ...], str]] = {
    "--allowed-headers": (("*", '["*"]'), "all headers are allowed"),
    "--allowed-methods": (("*", '["*"]'), "all methods are allowed"),
    "--chat-template-content-format": (("auto", "string"), "templates get the content of a message as one text"),
    "--cpu-offload-gb": (("0",), "weights are on the chips only: --tensor-parallel-size, --quantization"),
    "--data-parallel-backend": (("mp",), "the engines of a host are processes of this server"),
    "--default-chat-template-kwargs": (("{}",), "requests have their own: the field `chat_template_kwargs`"),
    "--max-logprobs": (
        (str(MAX_LOGPROBS),), f"a token has at most {MAX_LOGPROBS}; --max-request-logprobs is for all of a request",
    ),
    "--nnodes": (("1",), "several hosts are served with --coordinator, --num-hosts and --host-id"),
    "--node-rank": (("0",), "several hosts are served with --coordinator, --num-hosts and --host-id"),
    "--pipeline-parallel-size": (("1",), "a model is shared by heads only: --tensor-parallel-size"),
    "-pp": (("1",), "a model is shared by heads only: --tensor-parallel-size"),
    "--response-role": (("assistant",), "answers are the assistant's"),
    "--stream-interval": (("1",), "every step's tokens are sent at once"),
    "--tokenizer-mode": (
        ("auto", "hf", "slow"), "the tokenizer is read from tokenizer.json, tokenizer.model or a GGUF file",
    ),
}  # fmt: skip
WITHOUT_EFFECT = {flag.rstrip("="): reason for reason, flags in _WITHOUT_EFFECT.items() for flag in flags.split()}
WITH_VALUE = {
    flag[:-1] for flags in _WITHOUT_EFFECT.values() for flag in flags.split() if flag.endswith("=")
} | ONLY_WITH.keys()
# values, and whether they mean --enable-embeddings; text is generated with all of them
EMBEDDING_FLAGS = {
    "--task": {"auto": False, "generate": False, "embed": True, "embedding": True},
    "--runner": {"auto": False, "generate": False, "pooling": True},
    "--convert": {"auto": False, "none": False, "embed": True},
}


class _Do(argparse.Action):
    """Calls the function `const` with the parser, the namespace, the flag and its value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        self.const(parser, namespace, flag, values)


def _warn(_parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: str, _value: Any) -> None:
    namespace.compatibility_warnings.append(f"{flag} has no effect: {WITHOUT_EFFECT[flag]}")


def _refuse(parser: argparse.ArgumentParser, _namespace: argparse.Namespace, flag: str, value: Any) -> None:
    values, reason = ONLY_WITH[flag]
    if value not in values:
        parser.error(f"{flag}: {reason}")


def _embed(_parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: str, value: Any) -> None:
    namespace.enable_embeddings = EMBEDDING_FLAGS[flag][value] or namespace.enable_embeddings


def add_compatibility_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, hidden from the help. The namespace's `compatibility_warnings` has the warnings."""
    parser.set_defaults(compatibility_warnings=[])
    hidden: dict[str, Any] = {"action": _Do, "dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flags, work in ((WITHOUT_EFFECT, _warn), (ONLY_WITH, _refuse)):
        for flag in flags:
            parser.add_argument(flag, nargs=None if flag in WITH_VALUE else 0, const=work, **hidden)
    for flag, values in EMBEDDING_FLAGS.items():
        parser.add_argument(flag, choices=values, const=_embed, **hidden)


def log_warnings(warnings: Sequence[str]) -> None:
    """Logs the warnings of the flags of `add_compatibility_flags`."""
    for warning in warnings:
        logger.warning("%s", warning)
