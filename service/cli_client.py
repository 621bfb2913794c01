"""The commands that ask a running daemon: `stats`, `tree`, `top`, `check`, `clear`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json as json_module
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import aiohttp
import typer
from rich.console import Console
from rich.live import Live

from tiercache.errors import Refused, TierCacheError
from tiercache.service.address import socket_path
from tiercache.service.cli_text import Found, clear_view, many, stats_view, top_view, tree_view

R = TypeVar("R")
Socket = Annotated[str | None, typer.Option("--socket", "-s", help="The path of the daemon's socket.")]
Json = Annotated[bool, typer.Option("--json", help="Print the daemon's answer as JSON.")]

FAULTS, CANNOT = 1, 2
_PATIENCE = 10.0
_LONG_PATIENCE = 600.0
"""For what walks through everything."""


def console() -> Console:
    """Return a console for what was asked for."""
    return Console(highlight=False, emoji=False, markup=False)


def give_up(why: object) -> NoReturn:
    """Say in one line why it can't be, and end with status 2."""
    typer.echo("tiercache: " + " ".join(str(why).split()), err=True)
    raise typer.Exit(CANNOT)


class Asker:
    """Asks the admin part of the daemon at a socket over HTTP. Raises Refused, in one line, for all that goes wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def ask(self, target: str, *, body: Found | None = None, patience: float = _PATIENCE) -> Any:
        """Return the answer to GET `target`, or to POST with the object `body`."""
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(path=str(self.path)), timeout=aiohttp.ClientTimeout(total=patience)
                ) as http,
                http.request("GET" if body is None else "POST", f"http://daemon{target}", json=body) as response,
            ):
                text = await response.text()
        except TimeoutError as error:
            raise Refused(f"the daemon at {self.path} did not answer within {patience:.0f} s") from error
        except aiohttp.ClientConnectorError as error:
            raise Refused(f"no daemon at {self.path}: {error.os_error.strerror or error.os_error}") from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise Refused(f"the daemon at {self.path} did not answer: {str(error) or type(error).__name__}") from error
        try:
            found = json_module.loads(text)
        except ValueError:
            found = None
        if response.status == 200 and isinstance(found, dict):
            return found
        said = found.get("message") if isinstance(found, dict) else None
        raise Refused(f"the daemon at {self.path} refuses: {said or text.strip()[:200] or response.reason}")


def with_daemon(socket: str | None, work: Callable[[Asker], Awaitable[R]]) -> R:
    """Run `work` with the daemon at `socket`; what goes wrong is one line and status 2."""

    async def all_of_it() -> R:
        return await work(Asker(socket_path(socket)))

    try:
        return asyncio.run(all_of_it())
    except TierCacheError as error:
        give_up(error)


def print_json(value: Any) -> None:
    """Print `value` for programs."""
    typer.echo(json_module.dumps(value, indent=2, ensure_ascii=False))


def stats(socket: Socket = None, json: Json = False) -> None:
    """Show what the daemon counted: tiers, hits, moves, sessions."""
    found = with_daemon(socket, lambda asker: asker.ask("/v1/stats"))
    if json:
        print_json(found)
    else:
        console().print(stats_view(found))


def tree(
    socket: Socket = None,
    namespace: Annotated[str, typer.Option(help="How the digest of the namespace begins; default: all.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Lines of a tree.")] = 200,
    json: Json = False,
) -> None:
    """Draw the trees of token prefixes with the tiers that hold them."""
    if namespace.strip("0123456789abcdefABCDEF"):
        raise typer.BadParameter(f"{namespace!r} is not hexadecimal", param_hint="--namespace")

    async def ask(asker: Asker) -> tuple[Any, Any]:
        found = await asker.ask(f"/v1/tree?limit={limit}&namespace={namespace}")
        return found, {} if json else await asker.ask("/v1/namespaces")

    found, spaces = with_daemon(socket, ask)
    if json:
        print_json(found)
    else:
        out = console()
        out.print(tree_view(found["trees"], {one["digest"]: one for one in spaces["namespaces"]}, out.width))


def check(socket: Socket = None, json: Json = False) -> None:
    """Audit the daemon's books. The exit status is 1 when there are faults."""
    found = with_daemon(socket, lambda asker: asker.ask("/v1/check", body={}, patience=_LONG_PATIENCE))
    faults = found["faults"]
    if json:
        print_json(found)
    elif faults:
        out = console()
        out.print(f"{len(faults)} fault{'s' if len(faults) != 1 else ''}:", style="bold red")
        for fault in faults:
            out.print(f"  {fault}")
    else:
        counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items())
        console().print(f"The books are right: {counts or 'nothing is held'}.", style="green")
    raise typer.Exit(FAULTS if faults else 0)


def clear(
    socket: Socket = None,
    namespace: Annotated[str | None, typer.Option(help="How the digest of the namespace begins; default: any.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name.")] = None,
    weights: Annotated[str | None, typer.Option(help="The digest of the weights.")] = None,
    adapter: Annotated[str | None, typer.Option(help="The adapter, with its version.")] = None,
    no_adapter: Annotated[bool, typer.Option("--no-adapter", help="What has no adapter.")] = False,
    salt: Annotated[str | None, typer.Option(help="The tenant's salt; - reads it from standard input.")] = None,
    no_salt: Annotated[bool, typer.Option("--no-salt", help="What belongs to no tenant.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Remove blocks from all tiers and for good.

    All of them, or those of the namespaces of which all that is said is true, to the letter. Says what would go, and asks.
    """
    for value, without, name in ((adapter, no_adapter, "adapter"), (salt, no_salt, "salt")):
        if value is not None and without:
            raise typer.BadParameter("either one or none", param_hint=f"--{name} / --no-{name}")
    if salt == "-":
        salt = sys.stdin.readline().removesuffix("\n")
    said = {"namespace": namespace, "model": model, "weights": weights, "adapter": adapter, "salt": salt}
    body: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    body |= {name: None for name, without in (("adapter", no_adapter), ("salt", no_salt)) if without}
    out = console()
    if not yes:
        found = with_daemon(socket, lambda asker: asker.ask("/v1/clear", body=body | {"preview": True}, patience=_LONG_PATIENCE))
        out.print(clear_view(found["namespaces"]))
        if not found["namespaces"]:
            return
        typer.confirm(f"Remove {many(found['blocks'], 'block')} from all tiers?", abort=True)
    found = with_daemon(socket, lambda asker: asker.ask("/v1/clear", body=body, patience=_LONG_PATIENCE))
    out.print(f"{many(found['blocks'], 'block')} removed")


def top(
    socket: Socket = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Between frames.")] = 1.0,
) -> None:
    """Watch the tiers: use, hit rates, moves, sessions. Ends with q or Ctrl-C.

    Without a terminal it prints one frame.
    """
    out = console()

    async def watch(asker: Asker) -> bool:
        found = await asker.ask("/v1/stats")
        if once or not out.is_terminal:
            out.print(top_view(found, None, str(asker.path)))
            return False
        told = asyncio.Event()
        before: Found | None = None
        with _ended_by_keys(told), Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(top_view(found, before, f"{asker.path}   q ends"), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), seconds)
                if told.is_set():
                    return True
                before, found = found, await asker.ask("/v1/stats")

    if with_daemon(socket, watch):
        out.print("ended; the daemon runs on")


@contextlib.contextmanager
def _ended_by_keys(told: asyncio.Event) -> Iterator[None]:
    """Set `told` at a q on the terminal, and at SIGINT and SIGTERM; leave the terminal as it was."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    kept = None if keys is None else termios.tcgetattr(keys)
    for number in numbers:
        loop.add_signal_handler(number, told.set)

    def pressed() -> None:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"\x04", b""):
            told.set()

    try:
        if keys is not None:
            tty.setcbreak(keys)
            loop.add_reader(keys, pressed)
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if keys is not None and kept is not None:
            loop.remove_reader(keys)
            termios.tcsetattr(keys, termios.TCSADRAIN, kept)


def _understood(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, for which an answer without what it shows is one line and status 2."""

    @functools.wraps(command)
    def guarded(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # Another program's answer, or that of a daemon of another version: there is no telling what it lacks.
            give_up(f"the answer at the socket is none of this version's daemon: {type(error).__name__}: {error}")

    return guarded


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (stats, tree, top, check, clear):
        app.command()(_understood(command))
