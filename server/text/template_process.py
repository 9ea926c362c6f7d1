"""The process that runs the chat template of one request: `python -m server.text.template_process`.

A request's template is a program, and its work cannot be checked in advance: `{{ 'a' | center(300000000) }}` is one
call into C that takes gigabytes and holds the interpreter's lock. So this process has bounded memory, and a timer ends
it at the deadline, also if the server is gone. The process has no secrets: its environment is nearly empty, and it
inherits only its stdin and stdout, which carry a Job and a Reply.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from server.text.chat_template import ChatTemplate
from server.text.special_tokens import Part
from server.text.template_environment import TemplateError, TemplateLengthError, TemplateLimitError

MEMORY_BYTES = 256 << 20  # in addition to the memory of the process at its start
MEMORY_PER_BYTE = 64  # of the conversation, because several renderings have it, with up to four bytes a character
MAX_ERROR_CHARS = 2000
ERRORS = {error.__name__: error for error in (TemplateError, TemplateLengthError, TemplateLimitError)}


class Job(msgspec.Struct):
    """A template to run: its source, the values that the tokenizer gives to it, and the arguments of
    `ChatTemplate.render`."""

    source: str
    special_tokens: list[str]
    variables: dict[str, str]
    timeout_s: float
    call: dict[str, Any]


class Reply(msgspec.Struct):
    """The rendering, and the names of the variables that the template reads; or an error."""

    parts: list[Part] = []
    variables_read: frozenset[str] = frozenset()
    error: tuple[str, str] | None = None  # a name of ERRORS, and the message


def main() -> None:
    """Answers one job."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold conversations
    own_bytes = _address_space()
    frame = sys.stdin.buffer.read()
    job = msgspec.json.decode(frame, type=Job)
    signal.setitimer(signal.ITIMER_REAL, job.timeout_s)  # SIGALRM ends the process, even in C
    _limit_memory(own_bytes + MEMORY_BYTES + MEMORY_PER_BYTE * len(frame))
    try:
        answer = msgspec.json.encode(_reply(job))
    except MemoryError:
        answer = None
    _limit_memory(resource.RLIM_INFINITY)
    if answer is None:
        error = (TemplateLimitError.__name__, "The chat template needs more memory than a conversation may take.")
        answer = msgspec.json.encode(Reply(error=error))
    sys.stdout.buffer.write(answer)


def _reply(job: Job) -> Reply:
    try:
        template = ChatTemplate(job.source, special_tokens=job.special_tokens, variables=job.variables)
        return Reply(parts=template.render(**job.call), variables_read=template.variables_read)
    except TemplateError as error:
        return Reply(error=(type(error).__name__, str(error)[:MAX_ERROR_CHARS]))


def _address_space() -> int:
    """The bytes that this process has mapped; 0 on systems that do not report them."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except FileNotFoundError:
        return 0
    return int(pages) * resource.getpagesize()


def _limit_memory(num_bytes: int) -> None:
    """Limits the memory of this process. Has an effect on Linux only: macOS has no such limit."""
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if most < 0 or num_bytes < most else most, most))


if __name__ == "__main__":
    main()
