"""/openapi.json and /docs: the routes and their request types. Descriptions come from the types."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import JsonAnswer
from server.api.route import JSON, Access, ApiRoute
from server.settings import Settings

_REF = "#/components/schemas/{name}"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>pallas-serve: routes</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
code, pre {{ font-family: ui-monospace, monospace; }}
td, th {{ text-align: left; vertical-align: top; padding: 0.2rem 1rem 0.2rem 0; }}
summary {{ cursor: pointer; padding: 0.3rem 0; }}
</style></head><body>
<h1>pallas-serve {version}</h1>
<p>An OpenAI-compatible server. The same as data: <a href="openapi.json">openapi.json</a></p>
{routes}
</body></html>
"""


def docs_routes(routes: Sequence[ApiRoute], settings: Settings) -> list[ApiRoute]:
    """The routes that describe `routes`."""
    document = openapi(routes, settings)
    page = _page(document, settings.version).encode()

    async def schema(request: Request) -> Response:
        return JsonAnswer(document)

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    return [
        ApiRoute(path="/openapi.json", endpoint=schema, access=Access.OPEN),
        ApiRoute(path="/docs", endpoint=docs, access=Access.OPEN),
    ]


def openapi(routes: Sequence[ApiRoute], settings: Settings) -> dict[str, Any]:
    """An OpenAPI 3.1 document of this server's routes. They need a key only if the server has keys."""
    types = {route.body for route in routes if route.body is not None} | {route.errors.type for route in routes}
    bodies = sorted(types, key=lambda body: body.__name__)
    references, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    for schema in components.values():
        schema.pop("additionalProperties", None)  # `server.api.request.fields` decides about further fields
    schemas = dict(zip(bodies, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        needs_key = bool(settings.api_keys) and (settings.api_key_all_routes or route.access is not Access.OPEN)
        if route.access is Access.ADMIN:
            needs_key = bool(settings.admin_api_keys)  # else the route is closed to all
        operation = _operation(route, schemas, needs_key=needs_key)
        if names := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(path, {})[route.method.lower()] = operation
    keys = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pallas-serve", "version": settings.version},
        **({"servers": [{"url": settings.root_path}]} if settings.root_path else {}),
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": keys}},
    }


def _operation(
    route: ApiRoute, schemas: dict[type[msgspec.Struct], dict[str, Any]], *, needs_key: bool
) -> dict[str, Any]:
    answer = {kind: {"schema": {"type": route.answer_type}} if kind == JSON else {} for kind in route.media_types}
    error = {JSON: {"schema": schemas[route.errors.type]}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "default": {"description": "A refusal or a failure.", "content": error},
        },
    }
    if needs_key:
        operation["security"] = [{"key": []}]
    if route.body is not None:
        content = {route.body_type: {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _page(document: dict[str, Any], version: str) -> str:
    schemas = document["components"]["schemas"]
    sections = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            content = operation.get("requestBody", {}).get("content", {})
            fields = "".join(_fields(schemas, body["schema"]) for body in content.values())
            sections.append(f"<details><summary>{title}</summary>{fields}</details>" if fields else f"<p>{title}</p>")
    return _PAGE.format(version=html.escape(version), routes="\n".join(sections))


def _fields(schemas: dict[str, Any], body: dict[str, Any]) -> str:
    schema = schemas[body["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>"


def _kind(field: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any JSON"))
