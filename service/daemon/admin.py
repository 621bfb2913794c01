"""The admin part: plain HTTP for people, probes and Prometheus. It carries no KV, no prompt and no token id."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import exposition

from tiercache.draw import draw
from tiercache.errors import AuditFailed, InvalidInput, TierCacheError
from tiercache.residency import Space
from tiercache.service.daemon.metrics import registry_of
from tiercache.service.daemon.openapi import PAGE, document
from tiercache.service.daemon.peers import connection_of, peer_of
from tiercache.service.daemon.report import health, namespaces, stats
from tiercache.service.face import Extent
from tiercache.service.invalidation import Choice, chosen_by, selection_of
from tiercache.service.stack import Stack
from tiercache.spec import Namespace

if TYPE_CHECKING:
    from tiercache.service.daemon.daemon import Daemon

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Guard = Callable[[Handler], Handler]

MOST_BODY = 64 * 1024
"""Bytes of a request's body."""
_MOST_LINES = 100_000


class Admin:
    """The routes of one daemon, for its Unix socket and for TCP."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._registry = registry_of(daemon)

    def add_to(self, app: web.Application, guard: Guard) -> None:
        """Add the routes to `app`, for those whom `guard` lets in."""
        for path, handler in (
            ("/", self._page),
            ("/openapi.json", self._openapi),
            ("/health", self._health),
            ("/metrics", self._metrics),
            ("/v1/stats", self._stats),
            ("/v1/namespaces", self._namespaces),
            ("/v1/tree", self._tree),
        ):
            app.router.add_get(path, guard(_answered(handler)))
        app.router.add_post("/v1/check", guard(_answered(self._check)))
        app.router.add_post("/v1/clear", guard(_answered(self._clear)))

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(document())

    async def _health(self, request: web.Request) -> web.Response:
        found = await health(self._daemon)
        return _json(found, status=200 if found["status"] in ("ok", "degraded") else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        await health(self._daemon)  # looks at the disk again
        encode, kind = exposition.choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": kind})

    async def _stats(self, request: web.Request) -> web.Response:
        self._require_serving()
        await health(self._daemon)  # looks at the disk again
        return _json(stats(self._daemon))

    async def _namespaces(self, request: web.Request) -> web.Response:
        self._require_serving()
        return _json({"namespaces": await namespaces(self._daemon)})

    async def _tree(self, request: web.Request) -> web.Response:
        self._require_serving()
        limit = request.query.get("limit", "200")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LINES:
            raise InvalidInput(f"limit must be a number from 1 to {_MOST_LINES}, not {limit!r:.20}")
        form = request.query.get("format", "json")
        if form not in ("json", "text"):
            raise InvalidInput(f"format must be json or text, not {form!r:.20}")
        found = self._spaces(request.query.get("namespace", ""))
        drawn = [
            {"namespace": space.digest.hex(), "tree": draw(space, stack.cache.tiers, limit=int(limit))} for stack, space in found
        ]
        if form == "json":
            return _json({"trees": drawn})
        return web.Response(text="".join(f"{one['namespace']}\n{one['tree']}\n" for one in drawn))

    async def _check(self, request: web.Request) -> web.Response:
        self._require_serving()
        try:
            return _json({"counts": await self._daemon.cache.check(), "faults": []})
        except AuditFailed as error:
            return _json({"counts": {}, "faults": [str(fault) for fault in error.fields["faults"]]})

    async def _clear(self, request: web.Request) -> web.Response:
        self._require_serving()
        wanted = _Clear.read(await self._body(request))
        cache, choose = self._daemon.cache, wanted.choice()
        if wanted.namespace and not any(digest.hex().startswith(wanted.namespace.lower()) for digest in await cache.digests()):
            raise InvalidInput(f"no namespace has a digest that begins with {wanted.namespace!r:.70}")
        found = await (cache.extents(choose) if wanted.preview else cache.forget(choose))
        return _json({"blocks": sum(extent.blocks for extent in found), "namespaces": [_extent(extent) for extent in found]})

    async def _body(self, request: web.Request) -> bytes:
        """Return the body; one that does not come whole in time, because it was announced longer than it is, is a 408."""
        if not request.can_read_body:
            return b""
        if request.content_length is not None and request.content_length > MOST_BODY:
            raise web.HTTPRequestEntityTooLarge(max_size=MOST_BODY, actual_size=request.content_length)
        try:
            async with asyncio.timeout(self._daemon.config.limits.idle_seconds):
                return await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text="the body is shorter than its Content-Length\n") from error

    def _spaces(self, prefix: str) -> list[tuple[Stack, Space]]:
        """Return the namespaces whose digest begins so, in hexadecimal. Raises InvalidInput when it names none."""
        found = [
            (stack, space)
            for stack in self._daemon.cache.stacks
            for space in stack.cache.residency.spaces.values()
            if space.digest.hex().startswith(prefix.lower())
        ]
        if prefix and not found:
            raise InvalidInput(f"no namespace has a digest that begins with {prefix!r:.70}")
        return found

    def _require_serving(self) -> None:
        if self._daemon.state not in ("serving", "draining"):
            raise web.HTTPServiceUnavailable(text=f"the daemon is {self._daemon.state}\n")


class _Clear(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to clear: how a namespace's digest begins, and values of its fields; all of them without.

    With `preview` nothing goes, and the answer says what would.
    """

    namespace: str | None = None
    model: str | msgspec.UnsetType = msgspec.UNSET
    weights: str | msgspec.UnsetType = msgspec.UNSET
    adapter: str | msgspec.UnsetType | None = msgspec.UNSET
    salt: str | msgspec.UnsetType | None = msgspec.UNSET
    preview: bool = False

    def choice(self) -> Choice:
        """Return which namespaces are meant. Raises InvalidSpec."""
        fields = {name: getattr(self, name) for name in ("model", "weights", "adapter", "salt")}
        named = {name: value for name, value in fields.items() if value is not msgspec.UNSET}
        covered = chosen_by(selection_of(named)) if named else None
        begins = (self.namespace or "").lower()

        def choose(digest: bytes, namespace: Namespace | None) -> bool:
            return digest.hex().startswith(begins) and (covered is None or covered(digest, namespace))

        return choose

    @classmethod
    def read(cls, body: bytes) -> _Clear:
        try:
            # msgspec takes the last of two values of one key, and what is cleared then is not what the other one says.
            return msgspec.convert(json.loads(body or b"{}", object_pairs_hook=_distinct), type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidInput(f"the body can't be read: {error}") from error


def _extent(extent: Extent) -> dict[str, Any]:
    """Return what is shown of a namespace that goes: of its tenant that there is one, and not which."""
    who = extent.namespace
    return {
        "digest": extent.digest.hex(),
        "model": who.model if who is not None else None,
        "weights": who.weights if who is not None else None,
        "adapter": who.adapter if who is not None else None,
        "salted": who.salt is not None if who is not None else None,
        "blocks": extent.blocks,
        "tokens": extent.tokens,
    }


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


# Wrappers, not aiohttp's middlewares: those it keeps in a cache of the module's, and with them the daemon and its memory.


def _answered(handler: Handler) -> Handler:
    """Answer what the caller did wrong with 400 and what we can't do now with 503, as JSON."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except InvalidInput as error:
            return _json({"error": type(error).__name__, "message": str(error)}, status=400)
        except TierCacheError as error:
            return _json({"error": type(error).__name__, "message": str(error)}, status=503)

    return answer


def peers_only(handler: Handler) -> Handler:
    """Let in whom the kernel calls this user, or root."""

    async def check(request: web.Request) -> web.StreamResponse:
        if request.transport is None:
            raise web.HTTPForbidden(text="the connection is gone\n")
        with connection_of(request.transport) as connection:
            if not peer_of(connection).may_enter():
                raise web.HTTPForbidden(text="the daemon belongs to another user\n")
        return await handler(request)

    return check


def bearers_only(token: str) -> Guard:
    """Return a guard that lets in who has the token."""
    expected = f"Bearer {token}".encode()

    def guard(handler: Handler) -> Handler:
        async def check(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise web.HTTPUnauthorized(text="a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"})
            return await handler(request)

        return check

    return guard
