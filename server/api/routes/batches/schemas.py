"""The request bodies of files and batches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.api.request.fields import FieldTable, Refused
from server.api.request.schemas import Declared


class FileUpload(Declared, kw_only=True):
    """The form of a file."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: str


class BatchRequest(Declared, kw_only=True):
    """The body of a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


BATCH_FIELDS = FieldTable(
    kind=BatchRequest,
    refused={"output_expires_after": Refused("files do not expire here: delete them")},
)
