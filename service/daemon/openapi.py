"""What the admin part offers, as an OpenAPI document and as a page."""

from __future__ import annotations

from typing import Any

_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_JSON = {"application/json": {"schema": {"type": "object"}}}


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the admin part."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "tiercache", "version": "1", "summary": "The admin part of a tiercache daemon"},
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"bearer": []}],
        "paths": {path: {verb: _operation(path, verb, says)} for (verb, path), says in _OPERATIONS.items()},
    }


_OPERATIONS = {
    ("get", "/health"): "How it goes: starting, ok, degraded with reasons, draining, failed. 503 unless it serves.",
    ("get", "/metrics"): "Counts and gauges for Prometheus.",
    ("get", "/v1/stats"): "All counts, by tier and by block size.",
    ("get", "/v1/namespaces"): "The namespaces, how many blocks each has, and whose they are.",
    ("get", "/v1/tree"): "The trees of the namespaces, drawn with their tiers.",
    ("post", "/v1/check"): "Audits the books of every tier; faults is empty when they agree.",
    ("post", "/v1/clear"): "Removes all blocks of some namespaces, or of all of them; with preview it says what that would be.",
    ("get", "/openapi.json"): "This document.",
}
_ANYWHERE = {
    401: "On TCP: the bearer token is missing or wrong",
    403: "On the socket: the daemon belongs to another user",
    429: "Too many connections; the limit is in the text",
}
_WITH_A_BODY = {408: "The body did not come whole in time", 413: "The body is too long; the limit is in the text"}
_PARAMETERS = {
    "/v1/tree": [
        {"name": "namespace", "in": "query", "schema": {"type": "string"}, "description": "How the digest begins."},
        {"name": "format", "in": "query", "schema": {"enum": ["json", "text"], "default": "json"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100000, "default": 200}},
    ]
}
_CLEAR = {
    "type": "object",
    "properties": {
        "namespace": {"type": ["string", "null"], "description": "How the digest begins."},
        "model": {"type": "string"},
        "weights": {"type": "string"},
        "adapter": {"type": ["string", "null"], "description": "null: those without an adapter."},
        "salt": {"type": ["string", "null"], "description": "null: those without a salt."},
        "preview": {"type": "boolean", "default": False, "description": "Remove nothing."},
    },
    "additionalProperties": False,
}


def _operation(path: str, verb: str, says: str) -> dict[str, Any]:
    content = _TEXT if path == "/metrics" else _JSON
    responses = {"200": {"description": "Done", "content": content}} | {str(code): _refusal(code) for code in _ANYWHERE}
    found: dict[str, Any] = {"summary": says, "responses": responses}
    if path in _PARAMETERS:
        found["parameters"] = _PARAMETERS[path]
    if path == "/v1/clear":
        found["requestBody"] = {"content": {"application/json": {"schema": _CLEAR}}}
        responses |= {str(code): _refusal(code) for code in _WITH_A_BODY}
    if verb == "post" or path.startswith("/v1/"):
        responses["400"] = {"description": "What was asked for can't be", "content": _JSON}
        responses["503"] = {"description": "Not now", "content": _TEXT}
    elif path == "/health":
        responses["503"] = {"description": "It does not serve", "content": _JSON}
    return found


def _refusal(code: int) -> dict[str, Any]:
    return {"description": (_ANYWHERE | _WITH_A_BODY)[code], "content": _TEXT}


def _page() -> str:
    rows = "".join(
        f"<tr><td>{verb.upper()}</td><td>{f'<a href={path!r}>{path}</a>' if verb == 'get' else path}</td><td>{says}</td></tr>"
        for (verb, path), says in _OPERATIONS.items()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>tiercache</title>"
        "<style>body{font:16px/1.5 system-ui;margin:2rem;max-width:60rem}td{padding:.2rem 1rem .2rem 0;vertical-align:top}</style>"
        f"<h1>tiercache</h1><table>{rows}</table></html>\n"
    )


PAGE = _page()
