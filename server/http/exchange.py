"""One request and its answer, as uvicorn passes them to the application."""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

REFUSED = "pallas_serve.refused"  # of a scope: the status with which the connection has answered in the app's place


class Exchange(RequestResponseCycle):
    """uvicorn's, which says in time that the connection ends with it, and leaves the closing to the connection.

    `closes` is for the connection to read when the answer is complete. `keep_alive` is uvicorn's: whether the answer's
    head says that the connection stays.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.closes = False

    def make_last(self) -> None:
        """No request follows on the connection. The answer's head says so, where it has not been sent."""
        self.keep_alive = self.response_started and self.keep_alive
        self.closes = True

    def refuse(self, status: int) -> None:
        """The connection answers instead of the application."""
        cast("dict[str, Any]", self.scope)[REFUSED] = status
        self.cut_off()

    def cut_off(self) -> None:
        """The application learns that the client has gone; what it still sends is dropped."""
        if not self.response_complete:
            self.disconnected = True
            self.message_event.set()

    async def send(self, message: Any) -> None:
        if self.response_started:
            await super().send(message)
            return
        if self.more_body:  # answered before the request was read: the rest of it is not read as the next request
            self.keep_alive = False
        await super().send(message)
        self.closes = self.closes or not self.keep_alive
        self.keep_alive = True  # or uvicorn would close with bytes unread, and the client might lose the answer
