"""The commands that run a model on the daemon's cache: `generate` and `chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tiercache.errors import TierCacheError
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import runners
from tiercache.service.address import socket_path
from tiercache.service.cli_client import Socket, give_up
from tiercache.service.cli_text import found_line
from tiercache.service.client.client import connect
from tiercache.service.client.portal import Portal
from tiercache.spec import KVSpec

if TYPE_CHECKING:
    from tiercache.service.runners import Generation, Loaded, Runner

Model = Annotated[str | None, typer.Option(help="A folder, a GGUF file or a name on the hub; default: a small one.")]
Tokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")]
Seed = Annotated[int, typer.Option(min=0, help="What the tokens are drawn with.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads that compute.")]
Prefetch = Annotated[str, typer.Option(help="How long to wait for SSD: wait, best-effort, or seconds.")]
System = Annotated[str | None, typer.Option(help="What the model is told first.")]

_ENDS = ("/quit", "/exit")
_TORN = "\ufffd"  # what the decoder gives for half a character


def generate(
    prompt: Annotated[str, typer.Argument(help="What the model is asked; `-` reads it from stdin.")],
    socket: Socket = None,
    model: Model = None,
    tokens: Tokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = 1,
    system: System = None,
    prefetch: Prefetch = "wait",
) -> None:
    """Answer one prompt with a model on the daemon's cache.

    Shows where the KV of the prompt was found. The answer goes to stdout, all else to stderr. Without a daemon everything is
    computed.
    """
    asked = sys.stdin.read() if prompt == "-" else prompt
    with _talker(socket, model, tokens, temperature, seed, threads, system, prefetch) as talker:
        talker.answer(asked)


def chat(
    socket: Socket = None,
    model: Model = None,
    tokens: Tokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = 1,
    system: System = None,
    prefetch: Prefetch = "wait",
) -> None:
    """Talk with a model on the daemon's cache. Ends with Ctrl-D or /quit.

    Each answer shows where its prefix was found.
    """
    with _talker(socket, model, tokens, temperature, seed, threads, system, prefetch) as talker:
        while True:
            try:
                asked = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if asked in _ENDS:
                return
            if asked:
                talker.answer(asked)


class _Talker:
    """A conversation whose answers are printed as they come."""

    def __init__(self, portal: Portal, runner: Runner, loaded: Loaded, options: dict[str, Any], system: str | None) -> None:
        self._portal = portal
        self._runner = runner
        self._tokenizer = loaded.tokenizer
        self._longest = getattr(loaded.model.config, "max_position_embeddings", None)
        self._options = options
        self._conversation = runners.Conversation(loaded.tokenizer, system=system)

    def answer(self, asked: str) -> None:
        prompt = self._conversation.ask(asked)
        room = self._options["max_new_tokens"]
        if self._longest is not None and len(prompt) + room > self._longest:
            give_up(f"{len(prompt)} tokens and {room} new ones are more than the {self._longest} that this model takes")
        generation = self._portal.run(self._streamed(prompt))
        self._conversation.reply(generation.tokens)
        typer.echo()
        line = found_line(generation.hit, generation.computed, generation.first_token_seconds)
        _errors().print(line, soft_wrap=True)

    async def _streamed(self, prompt: list[int]) -> Generation:
        tokens: list[int] = []
        shown = ""
        async with self._runner.stream(prompt, **self._options) as stream:
            async for token in stream:
                tokens.append(token)
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                if text.startswith(shown) and not text.endswith(_TORN):
                    typer.echo(text[len(shown) :], nl=False)
                    shown = text
        generation: Generation = stream.generation
        typer.echo(generation.text[len(shown) :], nl=False)
        return generation


@contextmanager
def _talker(
    socket: str | None,
    model: str | None,
    tokens: int,
    temperature: float,
    seed: int,
    threads: int,
    system: str | None,
    prefetch: str,
) -> Iterator[_Talker]:
    """Load the model, connect, and give a conversation; what can't be is one line and status 2."""
    out = _errors()
    try:
        path, policy = socket_path(socket), PrefetchPolicy.of(prefetch)
        with out.status("loading the model") as status:
            loaded = runners.load_model(model, threads=threads, progress=_progress(status.update))
        if getattr(loaded.tokenizer, "chat_template", None) is None:
            give_up(f"{loaded.namespace.model} has no chat template")
        client = connect(f"unix://{path}", prefetch=policy)
        portal = Portal("tiercache-cli", client.close)
        portal.start()
        try:
            portal.run(client.__aenter__())
            if client.boot is None:
                out.print(f"No daemon at {path}: everything is computed.", style="yellow", soft_wrap=True)
            elif out.is_terminal:
                out.print(f"{loaded.namespace.model} with the cache of the daemon at {path}", style="dim", soft_wrap=True)
            options = {"max_new_tokens": tokens, "temperature": temperature, "seed": seed}
            with _runner(portal, client, loaded, out) as runner:
                yield _Talker(portal, runner, loaded, options, system)
        finally:
            portal.stop()
    except TierCacheError as error:
        give_up(error)
    except ModuleNotFoundError as error:
        give_up(f"this needs {error.name}: install tiercache[runner]")


@contextmanager
def _runner(portal: Portal, client: Any, loaded: Loaded, out: Console) -> Iterator[Runner]:
    spec = KVSpec.from_config(loaded.model.config, dtype=str(loaded.model.dtype).removeprefix("torch."))
    kv = None
    try:
        kv = portal.run(client.open(loaded.namespace, spec))
    except TierCacheError as error:
        out.print(f"The daemon can't hold this model's KV, everything is computed: {error}", style="yellow", soft_wrap=True)
    runner = runners.Runner(loaded.model, loaded.tokenizer, kv, block_size=spec.block_size)
    try:
        yield runner
    finally:
        portal.run(runner.close())


def _progress(show: Callable[[str], None]) -> Callable[[str, float | None], None]:
    return lambda stage, fraction: show(stage if fraction is None else f"{stage} {fraction:.0%}")


def _errors() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (generate, chat):
        app.command()(command)
