"""Flags of vLLM's command line without a meaning here: they are accepted with a warning, or refused with a reason.

vLLM's other flags are unknown, and refused by name.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

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
}
REFUSED = {
    "--trust-remote-code": "no code of a checkpoint is ever run: only Llama 3's architecture is known",
    "--pipeline-parallel-size": "a model is shared by heads only: --tensor-parallel-size",
    "--enable-lora": "LoRA is not supported yet",
    "--lora-modules": "LoRA is not supported yet",
    "--cpu-offload-gb": "weights are on the chips only: --tensor-parallel-size, --quantization",
    "--enable-expert-parallel": "the model has no experts",
    "--hf-overrides": "the checkpoint's config is served as it is",
    "--kv-transfer-config": "moving K/V between servers is not supported yet",
    "--limit-mm-per-prompt": "input other than text is not supported yet",
    "--reasoning-parser": "reasoning apart from the answer is not supported yet",
    "--return-tokens-as-token-ids": "requests ask for it: the field `return_tokens_as_token_ids`",
    "--revision": "only the newest revision is downloaded; --model takes a folder with another one",
    "--rope-scaling": "the checkpoint's config is served as it is",
    "--tool-parser-plugin": "no code of a plug-in is ever run: --tool-call-parser",
}
# values, and whether they mean --enable-embeddings; text is generated with all of them
EMBEDDING_FLAGS = {
    "--task": {"auto": False, "generate": False, "embed": True, "embedding": True},
    "--runner": {"auto": False, "generate": False, "pooling": True},
    "--convert": {"auto": False, "none": False, "embed": True},
}
WITH_VALUE = frozenset(
    "--compilation-config --cpu-offload-gb --distributed-executor-backend --guided-decoding-backend "
    "--hf-overrides --kv-transfer-config --limit-mm-per-prompt --lora-modules --max-seq-len-to-capture "
    "--pipeline-parallel-size --reasoning-parser --revision --rope-scaling --swap-space --tool-parser-plugin".split()
)
HARMLESS = {"--pipeline-parallel-size": "1", "--cpu-offload-gb": "0"}


class _Warn(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None):
        getattr(namespace, self.dest).append(f"{flag} has no effect: {WITHOUT_EFFECT[flag]}")


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None):
        if flag in HARMLESS and values == HARMLESS[flag]:
            return
        parser.error(f"{flag}: {REFUSED[flag]}")


class _Embed(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None):
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
