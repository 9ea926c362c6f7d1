"""The process that runs chat templates: `python -m server.text.template_process`, with a socket as its stdin.

Templates are programs, and a client's input decides how much they compute. This process has bounded memory, and the
server kills it at the deadline. A timer ends it if the server is gone. The process has no secrets: its environment is
nearly empty, and it inherits only this socket from the server.
"""

from __future__ import annotations

import pickle
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from server.text.chat_template import ChatTemplate
from server.text.template_messages import Fault, Job, Program, Reply, TemplateError, receive, send

MEMORY_BYTES = 256 << 20  # in addition to the memory of the process at its start
MEMORY_PER_BYTE = 64  # of the conversation, because several renderings have it, with up to four bytes a character
KEPT_TEMPLATES = 16
TIMER_SLACK_S = 5.0  # the server's own deadline comes first
MAX_ERROR_CHARS = 2000
_MAX_FRAME = 1 << 40


def main() -> None:
    """Answers jobs until the server closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold conversations
    channel = socket.socket(fileno=sys.stdin.fileno())
    templates: dict[bytes, ChatTemplate] = {}
    own_bytes = _address_space()
    send(channel, b"")
    while (frame := receive(channel, _MAX_FRAME)) is not None:
        job = Job(*pickle.loads(frame))
        signal.setitimer(signal.ITIMER_REAL, job.timeout_s + TIMER_SLACK_S)  # SIGALRM ends the process, even in C
        _limit_memory(own_bytes + MEMORY_BYTES + MEMORY_PER_BYTE * len(frame))
        try:
            reply = msgspec.msgpack.encode(_answer(job, templates))
        except MemoryError:
            reply = None
        _limit_memory(resource.RLIM_INFINITY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(channel, msgspec.msgpack.encode(Reply(fault=Fault.MEMORY)) if reply is None else reply)
        if reply is None:
            return  # what is left of the memory is not known


def _answer(job: Job, templates: dict[bytes, ChatTemplate]) -> Reply:
    try:
        template = templates.get(job.program) or _compiled(job.program, templates)
        if job.call is None:
            return Reply(variables=sorted(template.variables_read))
        parts = template.render(**job.call)  # type: ignore[arg-type]
        num_chars = sum(len(part.text) for part in parts)
        shown = [(part.text, part.special) for part in parts] if num_chars <= job.max_chars else []
        for text, _ in shown:
            text.encode()  # half of a surrogate pair, which a template can write
        return Reply(num_chars=num_chars, parts=shown)
    except (TemplateError, UnicodeEncodeError) as error:
        return Reply(fault=Fault.REFUSED, error=str(error)[:MAX_ERROR_CHARS])


def _compiled(program: bytes, templates: dict[bytes, ChatTemplate]) -> ChatTemplate:
    source, special_tokens, variables = Program(*pickle.loads(program))
    template = ChatTemplate(source, special_tokens=special_tokens, variables=variables)
    while len(templates) >= KEPT_TEMPLATES:
        del templates[next(iter(templates))]
    templates[program] = template
    return template


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
