"""Runs chat templates in processes that can be killed, with bounded memory and time.

The server cannot check a template's work in advance: `{{ 'a' | center(300000000) }}` is one call into C that takes
gigabytes and holds the interpreter's lock. So no template runs in the server's own process. The processes are started
when they are first needed, and are kept. A failure in one of them does not end the server: a process is killed at the
deadline, and the next job starts another one if it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from server.text.special_tokens import Part
from server.text.template_messages import Fault, Job, Program, Reply, TemplateError, receive, send
from server.text.tokenizer import ByteLevelTokenizer

START_TIMEOUT_S = 60.0  # for the imports, on a busy machine
MIN_TIMEOUT_S = 1e-3  # 0 would mean a socket that does not wait
BYTES_OF_REPLY = 1 << 20  # of a reply without its rendering: the names of a template's variables, or an error
BYTES_PER_CHAR = 16  # of a rendering, in which each character may be a separate part
FLAGS = ("-S", "-P", "-m", "server.text.template_process")  # -S: of the installed packages only their files are used
KEPT_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")  # templates may show the date

_reply = msgspec.msgpack.Decoder(Reply)


class TemplateLimitError(TemplateError):
    """The template took more time or memory than it may, or ended its process."""


class TooManyTemplatesError(Exception):
    """Too many conversations wait to be rendered."""


class Lane(enum.Enum):
    """The queues of conversations. A request's own slow template delays other such requests, but no ordinary
    conversation."""

    ORDINARY = "ordinary"  # the model's template, with messages, tools and documents
    SPECIAL = "special"  # the request's own template, or variables that the request sets


NUM_THREADS = {Lane.ORDINARY: 2, Lane.SPECIAL: 1}  # each waits for a process
MAX_WAITING = {Lane.ORDINARY: 8192, Lane.SPECIAL: 64}


class TemplateRunner:
    """A few processes, and a thread of the server for each, which waits for it.

    `in_thread` is called on the event loop's thread. The functions that it runs may call `ask`.
    """

    def __init__(self) -> None:
        self._threads = {
            lane: ThreadPoolExecutor(number, f"{lane.value}-templates") for lane, number in NUM_THREADS.items()
        }
        self._num_waiting = dict.fromkeys(Lane, 0)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    async def in_thread[R](self, lane: Lane, function: Callable[[], R]) -> R:
        """Calls the function in a thread of the lane. Raises TooManyTemplatesError."""
        if self._num_waiting[lane] >= MAX_WAITING[lane]:
            raise TooManyTemplatesError
        self._num_waiting[lane] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[lane], function)
        finally:
            self._num_waiting[lane] -= 1

    def ask(self, job: Job) -> Reply:
        """Sends a job to a process and waits for the reply. Raises TemplateLimitError, and OSError if no process can be
        started."""
        frame = pickle.dumps(tuple(job))
        for is_last in (False, True):
            try:
                with self._process() as process:
                    return process.ask(frame, job)
            except ChildProcessError:  # killed by others at its start, or it can never start
                if is_last:
                    raise
            except _EndedError as error:
                # An idle process may have been killed by others. Two that die are killed by the template.
                if is_last:
                    raise TemplateLimitError(f"The chat template has ended its process ({error}).") from error
        raise AssertionError("the second try returns or raises")

    def close(self) -> None:
        """Kills the processes. Running jobs end with an error."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            process.close()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def _process(self) -> Iterator[_Process]:
        """An idle process, or a new one."""
        with self._lock:
            if self._closed:
                raise TemplateLimitError("The server is ending.")
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.is_alive:
            process.close()
            process = None
        process = process or _Process()
        with self._lock:
            self._busy.add(process)
            if self._closed:
                process.kill()
        try:
            yield process
        finally:
            with self._lock:
                self._busy.discard(process)
                is_idle = process.is_alive and not self._closed
                if is_idle:
                    self._idle.append(process)
            if not is_idle:
                process.close()


class _EndedError(Exception):
    """The process has ended without being killed here. The argument is its exit code."""


class _Process:
    """One process. One thread at a time uses it; any thread may kill it."""

    def __init__(self) -> None:
        """Raises OSError if it cannot be started."""
        paths = [str(Path(__file__).parents[2]), *map(os.path.abspath, sys.path)]
        kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *FLAGS],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=kept | {"PYTHONPATH": os.pathsep.join(paths)},
                    process_group=0,  # Ctrl-C in a terminal is for the server, which then lets requests finish
                )
            except BaseException:
                self._channel.close()
                raise
        self._is_new = True

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, frame: bytes, job: Job) -> Reply:
        """The answer to the job, which `frame` holds. If anything is raised, the process has been killed.

        Raises TemplateLimitError, _EndedError if the process has ended by itself, and OSError if it does not start.
        """
        try:
            if self._is_new:
                self._wait_for_start()
            answer = self._answer(frame, job.timeout_s, BYTES_OF_REPLY + BYTES_PER_CHAR * job.max_chars)
            if answer is None:
                self.kill()
                raise _EndedError(self._process.returncode)
            reply = _reply.decode(answer)
            if reply.fault is Fault.MEMORY:
                raise TemplateLimitError("The chat template needs more memory than a conversation may take.")
            return reply
        except BaseException:
            self.kill()
            raise

    def _wait_for_start(self) -> None:
        self._channel.settimeout(START_TIMEOUT_S)
        if receive(self._channel, 0) is None:
            self.kill()
            raise ChildProcessError(f"it ended at its start, with exit code {self._process.returncode}")
        self._is_new = False

    def _answer(self, frame: bytes, timeout_s: float, max_bytes: int) -> bytes | None:
        """Sends a frame and returns the reply; None: the process has ended. Raises TemplateLimitError at the
        deadline."""
        try:
            deadline = time.monotonic() + timeout_s
            self._channel.settimeout(max(timeout_s, MIN_TIMEOUT_S))
            send(self._channel, frame)
            self._channel.settimeout(max(deadline - time.monotonic(), MIN_TIMEOUT_S))
            return receive(self._channel, max_bytes)
        except TimeoutError as error:
            message = f"The chat template took longer than {timeout_s:g} s for this conversation and was stopped."
            raise TemplateLimitError(message) from error
        except (BrokenPipeError, ConnectionResetError):
            return None

    def kill(self) -> None:
        """Ends the process, and a wait for its answer in another thread."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # it is not connected any more
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process, which no other thread uses, and frees its socket."""
        self.kill()
        self._channel.close()


class ServedTemplate:
    """A template that is compiled and rendered in the processes of a runner. Its construction and its methods block.

    Raises TemplateError if the source is not valid Jinja.
    """

    def __init__(self, source: str, tokenizer: ByteLevelTokenizer, runner: TemplateRunner, *, timeout_s: float) -> None:
        program = Program(source, tuple(tokenizer.special_tokens), dict(tokenizer.template_variables))
        self._program = pickle.dumps(tuple(program))
        self._runner, self._timeout_s = runner, timeout_s
        self._variables = frozenset(self._ask(0, None).variables)

    def reads(self, variable: str) -> bool:
        """Whether the template uses a variable, such as `tools` or `documents`."""
        return variable in self._variables

    def render(self, max_chars: int, **call: Any) -> tuple[int, list[Part]]:
        """Calls `ChatTemplate.render(**call)`. Returns the number of characters and the parts. There are no parts if
        there are more than `max_chars` characters. Raises TemplateError."""
        reply = self._ask(max_chars, call)
        return reply.num_chars, [Part(text, special) for text, special in reply.parts]

    def _ask(self, max_chars: int, call: dict[str, Any] | None) -> Reply:
        reply = self._runner.ask(Job(self._program, self._timeout_s, max_chars, call))
        if reply.fault is Fault.REFUSED:
            raise TemplateError(reply.error)
        return reply
