"""Flags of vLLM's command line without a meaning here: they are accepted with a warning, or refused with a reason.

vLLM's other flags are unknown, and refused by name.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

from batcher.request import MAX_LOGPROBS

logger = logging.getLogger("pallas_serve")

# flags -> the behaviour without them
WITHOUT_EFFECT = {
    "--enforce-eager": "every step is a program that was compiled before the first request",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks",
    "--disable-log-requests": "requests are not logged",
    "--no-enable-log-requests": "requests are not logged",
    "--disable-log-stats": "statistics are on /metrics and not logged",
    "--disable-uvicorn-access-log": "requests are not logged",
    "--disable-frontend-multiprocessing": "the engine always runs in a process of its own",
    "--enable-prompt-tokens-details": "usage always says how many tokens of a prompt were cached",
    "--async-scheduling": "the next step is always scheduled while the device runs: --pipeline-depth",
    "--enable-log-requests": "requests are not logged",
    "--enable-sleep-mode": "administrators can always use /sleep and /wake_up: --admin-api-key",
    "--enable-request-id-headers": "answers always have the header X-Request-Id",
    "--enable-server-load-tracking": "/load always counts the running requests",
    "--compilation-config": "every step is a program that was compiled before the first request",
    "--distributed-executor-backend": "one process drives the chips of an engine on each host",
    "--guided-decoding-backend": "grammars are compiled by llguidance",
    "--max-seq-len-to-capture": "every step is a program that was compiled before the first request",
    "--swap-space": "a request that gives up its pages is computed again",
    "--allow-credentials": "clients show their keys in headers, not in cookies",
    "--disable-cascade-attn": "there is no such attention",
    "--disable-custom-all-reduce": "sums between chips are those of the compiler",
    "--disable-hybrid-kv-cache-manager": "all layers have pages of one form",
    "--disable-sliding-window": "the model has none",
    "--enable-log-outputs": "requests are not logged",
    "--enable-offline-docs": "/docs names no other host",
    "--exclude-tools-when-tool-choice-none": "tools are never shown where none may be called",
    "--fingerprint-mode": "answers have no fingerprint",
    "--h11-max-header-count": "the head of a request has limits of its own",
    "--h11-max-incomplete-event-size": "the head of a request has limits of its own",
    "--language-model-only": "only the language model is ever loaded",
    "--max-cudagraph-capture-size": "every step is a program that was compiled before the first request",
    "--max-log-len": "requests are not logged",
    "--enable-lora-bias": "an adapter with biases is refused when it is loaded",
    "--fully-sharded-loras": "adapters are on the chips as the projections are that they change",
    "--lora-dtype": "adapters have the type of the computation",
    "--lora-extra-vocab-size": "an adapter that adds tokens is refused when it is loaded",
    "--model-impl": "there is one implementation of the model",
    "--no-async-scheduling": "--pipeline-depth 1 schedules a step after the one before it",
    "--no-disable-log-stats": "statistics are on /metrics and not logged",
    "--no-use-tqdm-on-load": "a start prints a line for each of its phases",
    "--optimization-level": "every step is a program that was compiled before the first request",
    "-O": "every step is a program that was compiled before the first request",
    "--performance-mode": "the shapes of steps follow --max-num-seqs and --max-num-batched-tokens",
    "--scheduling-policy": "requests go by their priority; those of one priority share the rows of a step",
    "--show-hidden-metrics-for-version": "metrics have their old names next to the new ones",
    "--structured-outputs-config": "grammars are compiled by llguidance",
    "--use-tqdm-on-load": "a start prints a line for each of its phases",
    "--uvicorn-log-level": "--log-level is for all of the server",
}
REFUSED = {
    "--trust-remote-code": "no code of a checkpoint is ever run: only Llama 3's architecture is known",
    "--pipeline-parallel-size": "a model is shared by heads only: --tensor-parallel-size",
    "-pp": "a model is shared by heads only: --tensor-parallel-size",
    "--default-mm-loras": "input other than text is not supported yet",
    "--long-lora-scaling-factors": "adapters for longer contexts are not supported yet",
    "--cpu-offload-gb": "weights are on the chips only: --tensor-parallel-size, --quantization",
    "--enable-expert-parallel": "the model has no experts",
    "--hf-overrides": "the checkpoint's config is served as it is",
    "--kv-transfer-config": "K/V move between servers by --kv-role and --prefill-url",
    "--limit-mm-per-prompt": "input other than text is not supported yet",
    "--return-tokens-as-token-ids": "requests ask for it: the field `return_tokens_as_token_ids`",
    "--revision": "only the newest revision is downloaded; --model takes a folder with another one",
    "--rope-scaling": "the checkpoint's config is served as it is",
    "--tool-parser-plugin": "no code of a plug-in is ever run: --tool-call-parser",
    "--allowed-headers": "all headers are allowed",
    "--allowed-methods": "all methods are allowed",
    "--chat-template-content-format": "templates get the content of a message as one text",
    "--code-revision": "no code of a checkpoint is ever run",
    "--data-parallel-backend": "the engines of a host are processes of this server",
    "--default-chat-template-kwargs": "requests have their own: the field `chat_template_kwargs`",
    "--disable-fastapi-docs": "/docs and /openapi.json show the types of requests only, and are always there",
    "--download-dir": "HF_HOME says where downloads are kept",
    "--enable-dbo": "the model has no experts",
    "--enable-eplb": "the model has no experts",
    "--headless": "several hosts are served with --coordinator, --num-hosts and --host-id",
    "--hf-config-path": "the checkpoint's config is served as it is",
    "--hf-token": "everybody on the machine could read it: HF_TOKEN holds it",
    "--kv-cache-memory-bytes": "--memory-utilization says how much memory the pages get",
    "--log-config-file": "the log goes to stderr: --log-level",
    "--logits-processors": "no code of a plug-in is ever run",
    "--master-addr": "several hosts are served with --coordinator, --num-hosts and --host-id",
    "--max-logprobs": f"a token has at most {MAX_LOGPROBS}; --max-request-logprobs is for all of a request",
    "--max-long-partial-prefills": "long prompts have --max-num-partial-prefills and --long-prefill-token-threshold",
    "--middleware": "no code of a plug-in is ever run",
    "--mm-processor-kwargs": "input other than text is not supported yet",
    "--nnodes": "several hosts are served with --coordinator, --num-hosts and --host-id",
    "--node-rank": "several hosts are served with --coordinator, --num-hosts and --host-id",
    "--response-role": "answers are the assistant's",
    "--rope-theta": "the checkpoint's config is served as it is",
    "--skip-tokenizer-init": "texts need a tokenizer: --tokenizer",
    "--stream-interval": "every step's tokens are sent at once",
    "--tokenizer-mode": "the tokenizer is read from tokenizer.json, tokenizer.model or a GGUF file",
    "--tokenizer-revision": "only the newest revision is downloaded; --tokenizer takes a folder with another one",
}
# values, and whether they mean --enable-embeddings; text is generated with all of them
EMBEDDING_FLAGS = {
    "--task": {"auto": False, "generate": False, "embed": True, "embedding": True},
    "--runner": {"auto": False, "generate": False, "pooling": True},
    "--convert": {"auto": False, "none": False, "embed": True},
}
WITH_VALUE = frozenset(
    "--compilation-config --cpu-offload-gb --distributed-executor-backend --guided-decoding-backend "
    "--hf-overrides --kv-transfer-config --limit-mm-per-prompt --max-seq-len-to-capture "
    "--pipeline-parallel-size --revision --rope-scaling --swap-space --tool-parser-plugin "
    "--allowed-headers --allowed-methods --chat-template-content-format --code-revision --data-parallel-backend "
    "--default-chat-template-kwargs --download-dir --fingerprint-mode --h11-max-header-count "
    "--h11-max-incomplete-event-size --hf-config-path --hf-token --kv-cache-memory-bytes "
    "--log-config-file --logits-processors --master-addr --max-cudagraph-capture-size --max-log-len "
    "--max-logprobs --max-long-partial-prefills --middleware --mm-processor-kwargs --model-impl --nnodes --node-rank "
    "--default-mm-loras --long-lora-scaling-factors --lora-dtype --lora-extra-vocab-size "
    "-O --optimization-level -pp --performance-mode --response-role --rope-theta "
    "--scheduling-policy --show-hidden-metrics-for-version --stream-interval --structured-outputs-config "
    "--tokenizer-mode --tokenizer-revision --uvicorn-log-level".split()
)
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


class _Warn(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        getattr(namespace, self.dest).append(f"{flag} has no effect: {WITHOUT_EFFECT[flag]}")


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        if values in HARMLESS.get(flag, ()):
            return
        parser.error(f"{flag}: {REFUSED[flag]}")


class _Embed(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        namespace.enable_embeddings = EMBEDDING_FLAGS[flag][values] or namespace.enable_embeddings


def add_compatibility_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, hidden from the help. The namespace's `compatibility_warnings` has the warnings."""
    parser.set_defaults(compatibility_warnings=[])
    for flag in WITHOUT_EFFECT:
        nargs = None if flag in WITH_VALUE else 0
        parser.add_argument(flag, dest="compatibility_warnings", nargs=nargs, action=_Warn, help=argparse.SUPPRESS)
    for flag, values in EMBEDDING_FLAGS.items():
        parser.add_argument(flag, choices=values, action=_Embed, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flag in REFUSED:
        nargs = None if flag in WITH_VALUE else 0
        parser.add_argument(flag, dest=argparse.SUPPRESS, nargs=nargs, action=_Refuse, help=argparse.SUPPRESS)


def log_warnings(warnings: Sequence[str]) -> None:
    """Logs the warnings of the flags of `add_compatibility_flags`."""
    for warning in warnings:
        logger.warning("%s", warning)
