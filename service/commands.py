"""What the command line can do: a demo, the daemon, questions to a daemon, a model on its cache, measurements."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tiercache.service import cli_client, cli_config, cli_model
from tiercache.service.cli_serve import serve
from tiercache.service.demo.run import Options, run

app = typer.Typer(
    help="A tiered KV cache: attention KV in HBM, DRAM and SSD, given back by longest token prefix.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve)
cli_client.register(app)
cli_config.register(app)
cli_model.register(app)


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="A folder, a GGUF file or a name on the hub; default: a small one.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="What the samples are drawn with.")] = 0,
    directory: Annotated[Path | None, typer.Option(help="For the SSD tier and the daemon's log; it stays.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary directory that is used instead.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write what was found to this file.")] = None,
) -> None:
    """Run a small model with and without the cache, and compare.

    The cache is that of a daemon, which is started, restarted and ended. The exit status is 0 when every text is the same and
    blocks moved in all directions, 1 when not, 2 when the demo can't run.
    """
    options = Options(model=model, threads=threads, seed=seed, directory=directory, keep=keep, json=json)
    raise typer.Exit(run(options, Console(highlight=False, emoji=False)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure this machine: `bench --help` says what."""
    # By name: bench stands above the service, as a program that uses it.
    program = importlib.import_module("tiercache.bench.__main__")
    raise typer.Exit(program.main(context.args))


@app.command()
def version() -> None:
    """Say the version of tiercache and of what it runs on."""
    typer.echo(f"tiercache {importlib.import_module('tiercache').__version__}, Python {platform.python_version()}")
