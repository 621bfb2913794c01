"""`tiercache serve`: the daemon in the foreground, until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tiercache.config import Config
from tiercache.errors import InvalidInput, TierCacheError
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.daemon.logs import log_to_stderr

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
"""The command line with this one command alone, which loads faster than all of it."""
_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("auto", "json", "text")


@app.callback()
def only() -> None:
    """Let `serve` be named although there is nothing else."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The configuration, a TOML file.")] = None,
    socket: Annotated[str | None, typer.Option("--socket", "-s", help="The path of the socket.")] = None,
    hbm: Annotated[str | None, typer.Option(help="Size of the HBM tier, such as 512MiB, without a file.")] = None,
    dram: Annotated[str | None, typer.Option(help="Size of the DRAM tier, without a file.")] = None,
    ssd: Annotated[str | None, typer.Option(help="Size of the SSD tier, without a file.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the HBM tier lies: cpu, or a card such as cuda:0.")] = None,
    directory: Annotated[str | None, typer.Option(help="The SSD tier's directory.")] = None,
    admin: Annotated[str | None, typer.Option(help="ADDRESS:PORT of the admin part on TCP.")] = None,
    admin_token_file: Annotated[str | None, typer.Option(help="The file with the bearer token for it.")] = None,
    log_level: Annotated[str, typer.Option(help=f"One of {', '.join(_LEVELS)}.")] = "info",
    log_format: Annotated[str, typer.Option(help="json, text, or auto: text on a terminal.")] = "auto",
) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    The exit status is 0 after an orderly stop, 2 for a configuration that cannot be, 1 when it can't start.
    """
    if log_level not in _LEVELS:
        raise typer.BadParameter(f"{log_level!r} is none of {', '.join(_LEVELS)}", param_hint="--log-level")
    if log_format not in _FORMATS:
        raise typer.BadParameter(f"{log_format!r} is none of {', '.join(_FORMATS)}", param_hint="--log-format")
    log_to_stderr(log_level, words=log_format == "text" or (log_format == "auto" and sys.stderr.isatty()))
    sizes = {"hbm": hbm, "dram": dram, "ssd": ssd}
    given = {"device": device, "directory": directory, "admin": admin, "admin_token_file": admin_token_file}
    try:
        daemon = Daemon(effective(config, sizes, given), socket)
        run(lambda: until_told(daemon))
    except TierCacheError as error:
        typer.echo(f"tiercache: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, InvalidInput) else 1) from error


def effective(file: Path | None, sizes: Mapping[str, str | None], given: Mapping[str, str | None]) -> Config:
    """Return the configuration of `file` with what was given on the command line in its place.

    Without a file and without sizes it has a DRAM tier of 1 GiB. Raises InvalidConfig.
    """
    tiers: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    fields = {name: value for name, value in given.items() if value is not None}
    if file is None:
        return Config.of(**(tiers or {"dram": "1 GiB"}), **fields)
    found = Config.from_toml(file)
    if tiers:
        fields["tiers"] = Config.of(**tiers).tiers  # type: ignore[assignment]
    return msgspec.structs.replace(found, **fields) if fields else found


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on uvloop where there is one, else on asyncio's own loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    # What was imported stays to the end: looking it through again and again would hold the loop for tens of milliseconds each time.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work())


async def until_told(daemon: Daemon) -> None:
    """Start the daemon, and stop it at SIGTERM or SIGINT. Raises what starting it raises."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    starting = loop.create_task(daemon.__aenter__())
    waiting = loop.create_task(told.wait())
    try:
        await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return
        await starting
        await waiting
    finally:
        waiting.cancel()
        await daemon.stop()
