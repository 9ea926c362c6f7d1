"""Makes a response that no connection waits for."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Message

from server.api.answers.answer import GenerationAnswer
from server.api.routes.responses.record import ResponseRecord
from server.api.routes.responses.store import ResponseStore
from server.api.routes.responses.writer import ResponsesWriter
from server.api.state import Place
from server.http.request_error import RequestError, internal

logger = logging.getLogger("pallas_serve")

COUNTED_BYTES = 64 * 1024  # of events; the store counts them after each growth by this number


async def make_in_background(
    record: ResponseRecord, answer: GenerationAnswer, writer: ResponsesWriter, store: ResponseStore, place: Place
) -> None:
    """The answer goes to the record's log, or to nobody: the record has what it says.

    Args:
        store: has the record, and counts its growth.
        place: is held for it, and released in the end.
    """
    log = record.log
    num_counted = 0  # bytes of the log

    async def send(message: Message) -> None:
        nonlocal num_counted
        if log is not None and message["type"] == "http.response.body":
            log.add(message["body"])
            if log.num_bytes >= num_counted + COUNTED_BYTES:
                num_counted = log.num_bytes
                store.put_again(record)

    def fail(error: RequestError) -> None:
        events = writer.failed(error)
        if log is not None:
            log.add(events)

    try:
        await answer({}, _never, send)
    except RequestError as error:
        error.__traceback__ = None  # its frames hold the generation
        fail(error)
    except Exception:
        logger.exception("response %s failed", record.id)
        fail(internal("The server has failed on this request."))
    finally:
        if log is not None:
            log.close()
        store.put_again(record)
        place.release()


async def _never() -> Message:
    """The messages of a client that is not there."""
    forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await forever
