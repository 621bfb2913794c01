"""`tiercache config`: what the daemon would run with, and where each value came from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tiercache.config import Config, Limits
from tiercache.errors import TierCacheError
from tiercache.service.address import socket_path
from tiercache.service.cli_client import console, give_up, print_json
from tiercache.service.cli_serve import effective
from tiercache.service.cli_text import plain_table


def config(
    file: Annotated[Path | None, typer.Option("--config", "-c", help="The configuration, a TOML file.")] = None,
    socket: Annotated[str | None, typer.Option("--socket", "-s", help="The path of the socket.")] = None,
    hbm: Annotated[str | None, typer.Option(help="Size of the HBM tier, such as 512MiB.")] = None,
    dram: Annotated[str | None, typer.Option(help="Size of the DRAM tier.")] = None,
    ssd: Annotated[str | None, typer.Option(help="Size of the SSD tier.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the HBM tier lies: cpu, or a card such as cuda:0.")] = None,
    directory: Annotated[str | None, typer.Option(help="The SSD tier's directory.")] = None,
    admin: Annotated[str | None, typer.Option(help="ADDRESS:PORT of the admin part on TCP.")] = None,
    admin_token_file: Annotated[str | None, typer.Option(help="The file with the bearer token for it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what `serve` would run with, and why.

    That is with the same options; each value comes from a default, the file or a flag.
    """
    sizes = {"hbm": hbm, "dram": dram, "ssd": ssd}
    given = {"device": device, "directory": directory, "admin": admin, "admin_token_file": admin_token_file}
    try:
        found = effective(file, sizes, given)
        values = _values(found) | {"socket": str(socket_path(socket if socket is not None else found.socket))}
    except TierCacheError as error:
        give_up(error)
    flags = {name for name, value in (given | {"socket": socket}).items() if value is not None}
    if any(size is not None for size in sizes.values()):
        flags.add("tiers")
    written = _keys(tomllib.loads(file.read_text())) if file is not None else set()
    sources = {name: "flag" if name in flags else "file" if name in written else "default" for name in values}
    if json:
        print_json({name: {"value": value, "from": sources[name]} for name, value in values.items()})
        return
    table = plain_table("key", "value", "from", left=["value", "from"])
    table.columns[1].no_wrap = False
    table.columns[1].overflow = "fold"
    for name, value in values.items():
        table.add_row(name, _said(name, value), sources[name], style="dim" if sources[name] == "default" else "")
    console().print(table)


def _values(found: Config) -> dict[str, Any]:
    values: dict[str, Any] = {name: msgspec.to_builtins(getattr(found, name)) for name in Config.__struct_fields__}
    limits = values.pop("limits")
    return values | {"directory": str(found.path)} | {f"limits.{name}": limits[name] for name in Limits.__struct_fields__}


def _keys(written: dict[str, Any]) -> set[str]:
    return {*written, *(f"limits.{name}" for name in written.get("limits", {}))}


def _said(name: str, value: Any) -> str:
    if name == "tiers":
        return ", ".join(f"{tier['tier']} {tier['capacity']}" for tier in value)
    if name == "shares":
        return ", ".join(f"{one['block_bytes']} B {one['fraction']:g}" for one in value) or "none"
    return "none" if value is None else str(value)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(config)
