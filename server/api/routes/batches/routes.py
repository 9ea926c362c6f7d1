"""/v1/files and /v1/batches, in OpenAI's forms. A file or a batch belongs to the API key that made it.

Every process of the server answers these routes from the database.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from server.api.answers.answer import JsonAnswer
from server.api.request.kept_objects import ListQuery, list_object
from server.api.request.schemas import Declared, Metadata
from server.api.route import FORM
from server.api.routes.batches.work import new_batch
from server.api.routes.endpoints import Routes, route
from server.batches.batch_file import EMBEDDINGS, URLS
from server.batches.store import BATCH, FILE, INPUT, MAX_FILE_BYTES, MAX_FILES, OVER, BatchStore, Fields, new_id
from server.http.auth import current_key
from server.http.body import read_form, read_query
from server.http.request_error import NOT_FOUND, RequestError, given, invalid, unsupported

FILES, BATCHES = "/v1/files", "/v1/batches"
WINDOWS = {"24h": 24 * 3600}  # seconds
MAX_FORM_BYTES = MAX_FILE_BYTES + 2**20
MAX_FIELDS = 3  # purpose, and two of expires_after, which is refused by name
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 200


class FileUpload(Declared, kw_only=True):
    """The form of a file."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: str


class BatchRequest(Declared, kw_only=True):
    """The body of a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None


class FileQuery(ListQuery, kw_only=True):
    """The query of the list of files."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILES)] = MAX_FILES
    purpose: Literal["batch", "batch_output"] | None = None


class Batches(Routes):
    """Answers the routes of files and batches. Without --batch-folder they answer 404, with the reason."""

    @route(f"POST {FILES}", body=FileUpload, body_type=FORM)
    async def upload(self, request: Request) -> Response:
        """Keeps a file (--batch-folder)."""
        store, owner = self._store(), current_key.get()
        num_bytes = min(int(request.headers.get("content-length", MAX_FORM_BYTES)), MAX_FORM_BYTES)
        id = await asyncio.to_thread(store.reserve, owner, num_bytes)
        try:
            limits = {"max_bytes": MAX_FORM_BYTES, "max_fields": MAX_FIELDS, "max_field_bytes": MAX_FIELD_BYTES}
            form = await read_form(request, **limits)
            try:
                file = _file_of(form)
                name = (file.filename or "file")[:MAX_NAME_CHARS]
                return JsonAnswer(await asyncio.to_thread(store.keep, id, file.file, name))
            finally:
                await form.close()
        finally:
            await asyncio.to_thread(store.release, id)

    @route(f"GET {FILES}")
    async def files(self, request: Request) -> Response:
        """The files, in pages (--batch-folder)."""
        query = read_query(request.query_params, FileQuery)
        return await self._page(FILE, query, query.purpose)

    @route(f"GET {FILES}/{{id}}")
    async def file(self, request: Request) -> Response:
        """The description of a file (--batch-folder)."""
        return JsonAnswer(await self._find(request, FILE))

    @route(f"DELETE {FILES}/{{id}}")
    async def delete(self, request: Request) -> Response:
        """Forgets it (--batch-folder)."""
        id = (await self._find(request, FILE))["id"]
        await asyncio.to_thread(self._store().delete_file, id)
        return JsonAnswer({"id": id, "object": "file", "deleted": True})

    @route(f"GET {FILES}/{{id}}/content")
    async def content(self, request: Request) -> Response:
        """The content of a file (--batch-folder)."""
        fields = await self._find(request, FILE)
        path = self._store().content(fields["id"])
        return FileResponse(path, media_type="application/octet-stream", filename=fields["filename"])

    @route(f"POST {BATCHES}", BatchRequest)
    async def create(self, request: Request, body: BatchRequest) -> Response:
        """Answers the requests of a file, after all others (--batch-folder).

        The process that runs the batches finds it in the database.
        """
        store, owner = self._store(), current_key.get()
        if body.endpoint not in URLS:
            raise invalid("endpoint", f"must be one of {', '.join(URLS)}, got {body.endpoint[:80]!r}")
        if body.endpoint == EMBEDDINGS and self._state.engine.info.embedding_size is None:
            raise invalid("endpoint", "this server makes no embeddings: start it with --enable-embeddings")
        if body.completion_window not in WINDOWS:
            raise invalid("completion_window", f"must be {', '.join(WINDOWS)}, got {body.completion_window[:40]!r}")
        file = await asyncio.to_thread(store.find, owner, FILE, body.input_file_id)
        if file is None or file["purpose"] != INPUT:
            raise invalid("input_file_id", f"there is no file of purpose {INPUT!r} with this id")
        window = body.completion_window
        batch = new_batch(new_id(BATCH), file["id"], body.endpoint, window, WINDOWS[window], body.metadata)
        await asyncio.to_thread(store.new_batch, owner, batch)
        return JsonAnswer(batch)

    @route(f"GET {BATCHES}")
    async def batches(self, request: Request) -> Response:
        """The batches, in pages (--batch-folder)."""
        return await self._page(BATCH, read_query(request.query_params, ListQuery))

    @route(f"GET {BATCHES}/{{id}}")
    async def batch(self, request: Request) -> Response:
        """How far a batch is (--batch-folder)."""
        return JsonAnswer(await self._find(request, BATCH))

    @route(f"POST {BATCHES}/{{id}}/cancel")
    async def cancel(self, request: Request) -> Response:
        """Ends one that is running (--batch-folder)."""
        batch = await self._find(request, BATCH)
        if batch["status"] in OVER:
            raise RequestError(409, f"The batch is over: {batch['status']}.", code="batch_not_cancellable")
        await asyncio.to_thread(self._store().cancel, current_key.get(), batch["id"])
        return JsonAnswer(await self._find(request, BATCH))

    def check_served(self) -> None:
        """Raises RequestError 404 if there is no folder."""
        self._store()

    def _store(self) -> BatchStore:
        """The store of files and batches. Raises RequestError 404 if there is none."""
        if self._state.batches is None:
            message = "This server keeps no files and runs no batches: start it with --batch-folder DIR."
            raise RequestError(404, message, type=NOT_FOUND)
        return self._state.batches

    async def _find(self, request: Request, kind: str) -> Fields:
        id = request.path_params["id"]
        found = await asyncio.to_thread(self._store().find, current_key.get(), kind, id)
        if found is None:
            raise RequestError(404, f"There is no {kind} with the id {id[:100]!r}.", type=NOT_FOUND, param=f"{kind}_id")
        return found

    async def _page(self, kind: str, query: ListQuery, purpose: str | None = None) -> Response:
        read = partial(self._store().page, current_key.get(), kind, after=query.after, purpose=purpose)
        entries = await asyncio.to_thread(read, query.limit + 1, ascending=query.order == "asc")
        shown = entries[: query.limit]
        return JsonAnswer(list_object([entry["id"] for entry in shown], shown, has_more=len(entries) > query.limit))


def _file_of(form: FormData) -> UploadFile:
    """The file of an upload. Raises RequestError 400 for a form that is not supported, or 413 for a large file."""
    file, purpose = given("file", form.get("file")), form.get("purpose", "")
    if not isinstance(file, UploadFile):
        raise invalid("file", "must have a filename")
    if (file.size or 0) > MAX_FILE_BYTES:
        raise RequestError(413, f"file: has more than {MAX_FILE_BYTES} bytes", param="file")
    if any(name.startswith("expires_after") for name in form):
        raise unsupported("expires_after", "files that expire are")
    if purpose != INPUT:
        raise invalid("purpose", f"must be {INPUT!r}, got {str(purpose)[:40]!r}")
    return file
