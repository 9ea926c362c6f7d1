"""Runs chat templates away from the event loop: the model's in threads, and those of requests in processes.

A request's template may take any time and memory, so each runs in a process of its own, which ends at the deadline.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from server.text.special_tokens import Part
from server.text.template_environment import TemplateLimitError
from server.text.template_process import ERRORS, Job, Reply
from server.text.tokenizer import ByteLevelTokenizer

START_TIMEOUT_S = 60.0  # for the imports of a process, on a busy machine
FLAGS = ("-S", "-P", "-m", "server.text.template_process")  # -S: of the installed packages only their files are used
KEPT_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")  # templates may show the date
NUM_THREADS = 2
NUM_PROCESSES = 2
MAX_WAITING = 64  # requests with templates of their own

_reply = msgspec.json.Decoder(Reply)


class TooManyTemplatesError(Exception):
    """Too many conversations wait to be rendered."""


class TemplateRunner:
    """Renders conversations. Each rendering may take `timeout_s`.

    A request's own slow template delays other such requests, but no ordinary conversation.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, "templates")
        self._processes = asyncio.Semaphore(NUM_PROCESSES)
        self._num_waiting = 0

    async def run[*P, R](self, function: Callable[[*P], R], *args: *P) -> R:
        """Calls a function that renders a conversation, or a part of this work, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def render_source(
        self, source: str, tokenizer: ByteLevelTokenizer, **call: Any
    ) -> tuple[list[Part], frozenset[str]]:
        """Compiles a template and calls its `render(**call)`, in a process. Returns the rendering, and the names of the
        variables that the template reads.

        Raises TemplateError, TooManyTemplatesError, and OSError if no process can be started.
        """
        variables = dict(tokenizer.template_variables)
        job = Job(source, list(tokenizer.special_tokens), variables, self.timeout_s, call)
        frame = msgspec.json.encode(job)
        if self._num_waiting >= MAX_WAITING:
            raise TooManyTemplatesError
        self._num_waiting += 1
        try:
            async with self._processes:
                reply = await self._answer(frame)
        finally:
            self._num_waiting -= 1
        if reply.error is not None:
            kind, message = reply.error
            raise ERRORS[kind](message)
        return reply.parts, reply.variables_read

    async def _answer(self, frame: bytes) -> Reply:
        paths = [str(Path(__file__).parents[2]), *map(os.path.abspath, sys.path)]
        kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *FLAGS,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=kept | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which then lets requests finish
        )
        code = -signal.SIGALRM
        try:
            async with asyncio.timeout(START_TIMEOUT_S + self.timeout_s):
                answer, _ = await process.communicate(frame)
                code = await process.wait()
        except TimeoutError:  # the process could not start in time, or has not ended itself
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code == -signal.SIGALRM:
            message = f"The chat template took longer than {self.timeout_s:g} s for this conversation and was stopped."
            raise TemplateLimitError(message)
        if code < 0:
            raise TemplateLimitError(f"The chat template has ended its process ({code}).")
        if code > 0:
            raise ChildProcessError(f"it ended with exit code {code}")
        return _reply.decode(answer)
