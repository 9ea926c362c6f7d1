"""A Google Cloud Storage on a real socket: as much of its JSON API as gcsfs and TensorStore ask for.

Objects are in memory. `requests` has what was asked for, and `bytes_read` counts the bytes of each object that were
sent. The API: https://cloud.google.com/storage/docs/json_api/v1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Stored:
    """An object."""

    content: bytes
    generation: int


@dataclass
class FakeGcs:
    """The store. Tests change its fields while it serves."""

    url: str
    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path with query
    bytes_read: Counter[str] = field(default_factory=Counter)  # of the objects, by "bucket/name"
    refuse: Callable[[str, str, str], tuple[int, str] | None] = lambda method, bucket, name: None
    cut: Callable[[str], int] = lambda name: 0  # bytes that are missing at the end of an answer
    lock: threading.Lock = field(default_factory=threading.Lock)
    generations: Iterator[int] = field(default_factory=lambda: count(1))
    uploads: dict[str, tuple[str, str, bytearray]] = field(default_factory=dict)

    def reset(self, *buckets: str) -> None:
        """Forgets all objects and counts. `buckets` are there, and empty."""
        with self.lock:
            self.buckets = {name: {} for name in buckets}
            self.requests.clear()
            self.bytes_read.clear()
            self.refuse, self.cut = lambda method, bucket, name: None, lambda name: 0

    def put(self, bucket: str, name: str, content: bytes) -> Stored:
        with self.lock:
            stored = Stored(content, next(self.generations))
            self.buckets[bucket][name] = stored
            return stored

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Puts the files of a folder into the bucket. Returns the folder's URL."""
        self.buckets.setdefault(bucket, {})
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(bucket, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"gs://{bucket}/{prefix}"

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def environment(self) -> dict[str, str]:
        """What leads the clients here."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "NO_GCE_CHECK": "true",
            "CLOUDSDK_CONFIG": "/nonexistent",
        }


@contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """A store without buckets, until the end of the context."""
    server = _Server(("127.0.0.1", 0), _Handler)
    store = FakeGcs(f"http://127.0.0.1:{server.server_address[1]}")
    server.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # gcsfs closes what it does not wait for
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def store(self) -> FakeGcs:
        return self.server.store  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(iter(self._chunk, b""))
        with self.store.lock:
            self.store.requests.append((self.command, self.path))
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        found = re.fullmatch(r"(/download|/upload)?/storage/v1/b/([^/]+)(/o)?(?:/(.+))?", url.path)
        if found is None:
            self._fail(404, f"no such path: {self.path}")
            return
        kind, bucket, of_objects, name = found.groups()
        bucket, name = unquote(bucket), unquote(name or "") or self.query.get("name", "")
        if kind == "/upload" and not name and "multipart" in self.query.get("uploadType", ""):
            name = json.loads(self._parts()[0])["name"]
        refused = self.store.refuse(self.command, bucket, name)
        if refused is not None:
            self._fail(*refused)
        elif bucket not in self.store.buckets:
            self._fail(404, "The specified bucket does not exist.")
        elif kind == "/upload":
            self._upload(bucket, name)
        elif not of_objects:
            self._json({"kind": "storage#bucket", "name": bucket})
        elif not name:
            self._list(bucket)
        elif self.command == "DELETE":
            self._delete(bucket, name)
        else:
            self._get(bucket, name, is_content=kind == "/download" or self.query.get("alt") == "media")

    def _get(self, bucket: str, name: str, *, is_content: bool) -> None:
        stored = self.store.buckets[bucket].get(name)
        if stored is None:
            self._fail(404, f"No such object: {bucket}/{name}")
        elif not is_content:
            self._json(_metadata(bucket, name, stored))
        else:
            start, end, size = 0, len(stored.content), len(stored.content)
            asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if asked:
                first, last = asked.groups()
                start = int(first) if first else size - int(last)
                end = min(size, int(last) + 1) if first and last else size
                if start >= size > 0 or start > end:
                    self._fail(416, "The requested range cannot be satisfied.")
                    return
            end = max(start, end - self.store.cut(name))
            with self.store.lock:
                self.store.bytes_read[f"{bucket}/{name}"] += end - start
            headers = {"X-Goog-Generation": str(stored.generation), "Content-Type": "application/octet-stream"}
            if asked:
                headers["Content-Range"] = f"bytes {start}-{max(start, end - 1)}/{size}"
            self._send(206 if asked else 200, stored.content[start:end], headers)

    def _list(self, bucket: str) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        first = self.query.get("startOffset", "")
        items, prefixes = [], set()
        for name in sorted(self.store.buckets[bucket]):
            if not name.startswith(prefix) or name < first:
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(_metadata(bucket, name, self.store.buckets[bucket][name]))
        self._json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def _delete(self, bucket: str, name: str) -> None:
        with self.store.lock:
            found = self.store.buckets[bucket].pop(name, None)
        if found is None:
            self._fail(404, f"No such object: {bucket}/{name}")
        else:
            self._send(204, b"", {})

    def _upload(self, bucket: str, name: str) -> None:
        if "upload_id" in self.query:
            self._upload_part()
            return
        stored = self.store.buckets[bucket].get(name)
        condition = self.query.get("ifGenerationMatch")
        if condition is not None and int(condition) != (stored.generation if stored else 0):
            self._fail(412, "At least one of the pre-conditions you specified did not hold.")
            return
        match self.query["uploadType"]:
            case "resumable":
                with self.store.lock:
                    number = f"u{len(self.store.uploads)}"
                    self.store.uploads[number] = (bucket, name, bytearray())
                place = f"{self.store.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}"
                self._send(200, b"", {"Location": place})
            case "multipart":
                self._json(_metadata(bucket, name, self.store.put(bucket, name, self._parts()[1])))
            case _:
                self._json(_metadata(bucket, name, self.store.put(bucket, name, self.body)))

    def _upload_part(self) -> None:
        bucket, name, content = self.store.uploads[self.query["upload_id"]]
        if self.command == "DELETE":
            self._fail(499, "cancelled")
            return
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers["Content-Range"])
        assert found is not None, self.headers["Content-Range"]
        assert found[1] is None or int(found[1]) == len(content)
        content += self.body
        if found[3] == "*" or len(content) < int(found[3]):
            self._send(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
        else:
            self._json(_metadata(bucket, name, self.store.put(bucket, name, bytes(content))))

    def _parts(self) -> list[bytes]:
        """The parts of a multipart/related body."""
        head = BytesParser().parsebytes(f"Content-Type: {self.headers['Content-Type']}\n\n".encode())
        boundary = b"--" + str(head.get_boundary()).encode()
        _, *parts, _ = self.body.split(boundary)
        newline = b"\r\n" if parts[0].startswith(b"\r\n") else b"\n"
        return [part.split(2 * newline, maxsplit=1)[1].removesuffix(newline) for part in parts]

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        content = self.rfile.read(size)
        self.rfile.readline()
        return content

    def _json(self, answer: dict[str, Any]) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _fail(self, code: int, message: str) -> None:
        body = json.dumps({"error": {"code": code, "message": message, "errors": [{"message": message}]}}).encode()
        self._send(code, body, {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _metadata(bucket: str, name: str, stored: Stored) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{stored.generation}",
        "bucket": bucket,
        "name": name,
        "size": str(len(stored.content)),
        "generation": str(stored.generation),
        "metageneration": "1",
        "md5Hash": base64.b64encode(hashlib.md5(stored.content).digest()).decode(),
        "updated": "2026-11-23T00:00:00.000Z",
        "timeCreated": "2026-11-23T00:00:00.000Z",
    }
