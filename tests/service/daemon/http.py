"""HTTP as an operator uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp


async def get(path: Path, target: str, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Ask the socket at `path`; return the status and what came, decoded where it is JSON."""
    return await ask(aiohttp.UnixConnector(path=str(path)), "GET", f"http://daemon{target}", headers=headers)


async def post(path: Path, target: str, body: bytes = b"") -> tuple[int, Any]:
    """Send `body` to the socket at `path`."""
    return await ask(aiohttp.UnixConnector(path=str(path)), "POST", f"http://daemon{target}", body=body)


async def ask(
    connector: aiohttp.BaseConnector, method: str, url: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
) -> tuple[int, Any]:
    """Send a request and return status and content."""
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.request(method, url, headers=headers, data=body) as response,
    ):
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text
