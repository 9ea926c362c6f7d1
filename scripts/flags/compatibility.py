"""Flags of vLLM's command line without a meaning here: they are accepted with a warning, or refused with a reason.

vLLM's other flags are unknown, and refused by name.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
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
# why -> the flags that are refused
_REFUSED = {
    "no code of a checkpoint is ever run: only Llama 3's architecture is known": "--trust-remote-code",
    "a model is shared by heads only: --tensor-parallel-size": "--pipeline-parallel-size= -pp=",
    "input other than text is not supported yet": "--default-mm-loras= --limit-mm-per-prompt= --mm-processor-kwargs=",
    "adapters for longer contexts are not supported yet": "--long-lora-scaling-factors=",
    "weights are on the chips only: --tensor-parallel-size, --quantization": "--cpu-offload-gb=",
    "the model has no experts": "--enable-expert-parallel --enable-dbo --enable-eplb",
    "the checkpoint's config is served as it is": "--hf-overrides= --rope-scaling= --hf-config-path= --rope-theta=",
    "K/V move between servers by --kv-role and --prefill-url": "--kv-transfer-config=",
    "requests ask for it: the field `return_tokens_as_token_ids`": "--return-tokens-as-token-ids",
    "only the newest revision is downloaded; --model takes a folder with another one": "--revision=",
    "no code of a plug-in is ever run: --tool-call-parser": "--tool-parser-plugin=",
    "all headers are allowed": "--allowed-headers=",
    "all methods are allowed": "--allowed-methods=",
    "templates get the content of a message as one text": "--chat-template-content-format=",
    "no code of a checkpoint is ever run": "--code-revision=",
    "the engines of a host are processes of this server": "--data-parallel-backend=",
    "requests have their own: the field `chat_template_kwargs`": "--default-chat-template-kwargs=",
    "/docs and /openapi.json show the types of requests only, and are always there": "--disable-fastapi-docs",
    "HF_HOME says where downloads are kept": "--download-dir=",
    "several hosts are served with --coordinator, --num-hosts and --host-id": (
        "--headless --master-addr= --nnodes= --node-rank="
    ),
    "everybody on the machine could read it: HF_TOKEN holds it": "--hf-token=",
    "--memory-utilization says how much memory the pages get": "--kv-cache-memory-bytes=",
    "the log goes to stderr: --log-level": "--log-config-file=",
    "no code of a plug-in is ever run": "--logits-processors= --middleware=",
    f"a token has at most {MAX_LOGPROBS}; --max-request-logprobs is for all of a request": "--max-logprobs=",
    "long prompts have --max-num-partial-prefills and --long-prefill-token-threshold": "--max-long-partial-prefills=",
    "answers are the assistant's": "--response-role=",
    "texts need a tokenizer: --tokenizer": "--skip-tokenizer-init",
    "every step's tokens are sent at once": "--stream-interval=",
    "the tokenizer is read from tokenizer.json, tokenizer.model or a GGUF file": "--tokenizer-mode=",
    "only the newest revision is downloaded; --tokenizer takes a folder with another one": "--tokenizer-revision=",
}


def _by_flag(table: Mapping[str, str]) -> dict[str, str]:
    return {flag.rstrip("="): reason for reason, flags in table.items() for flag in flags.split()}


WITHOUT_EFFECT, REFUSED = _by_flag(_WITHOUT_EFFECT), _by_flag(_REFUSED)
_ALL = " ".join((*_WITHOUT_EFFECT.values(), *_REFUSED.values())).split()
WITH_VALUE = {flag.rstrip("=") for flag in _ALL if flag.endswith("=")}
# values, and whether they mean --enable-embeddings; text is generated with all of them
EMBEDDING_FLAGS = {
    "--task": {"auto": False, "generate": False, "embed": True, "embedding": True},
    "--runner": {"auto": False, "generate": False, "pooling": True},
    "--convert": {"auto": False, "none": False, "embed": True},
}
# values of refused flags with which they change nothing
HARMLESS = {
    "--allowed-headers": ("*", '["*"]'),
    "--allowed-methods": ("*", '["*"]'),
    "--chat-template-content-format": ("auto", "string"),
    "--cpu-offload-gb": ("0",),
    "--data-parallel-backend": ("mp",),
    "--default-chat-template-kwargs": ("{}",),
    "--max-logprobs": (str(MAX_LOGPROBS),),
    "--nnodes": ("1",),
    "--node-rank": ("0",),
    "--pipeline-parallel-size": ("1",),
    "-pp": ("1",),
    "--response-role": ("assistant",),
    "--stream-interval": ("1",),
    "--tokenizer-mode": ("auto", "hf", "slow"),
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
    if value not in HARMLESS.get(flag, ()):
        parser.error(f"{flag}: {REFUSED[flag]}")


def _embed(_parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: str, value: Any) -> None:
    namespace.enable_embeddings = EMBEDDING_FLAGS[flag][value] or namespace.enable_embeddings


def add_compatibility_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, hidden from the help. The namespace's `compatibility_warnings` has the warnings."""
    parser.set_defaults(compatibility_warnings=[])
    hidden: dict[str, Any] = {"action": _Do, "dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flags, work in ((WITHOUT_EFFECT, _warn), (REFUSED, _refuse)):
        for flag in flags:
            parser.add_argument(flag, nargs=None if flag in WITH_VALUE else 0, const=work, **hidden)
    for flag, values in EMBEDDING_FLAGS.items():
        parser.add_argument(flag, choices=values, const=_embed, **hidden)


def log_warnings(warnings: Sequence[str]) -> None:
    """Logs the warnings of the flags of `add_compatibility_flags`."""
    for warning in warnings:
        logger.warning("%s", warning)
