"""SGLang's trees as a peer: a child process of an environment of its own (`make peer-sglang`), asked over its pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

import msgspec

from tiercache.bench.tree_ours import Times
from tiercache.bench.tree_workloads import Turn

VARIABLE = "TIERCACHE_PEER_SGLANG"
"""Names the peer's interpreter, where it is not the one that `make peer-sglang` makes beside the checkout."""
ABSENT = f"SGLang's trees are not measured beside ours: `make peer-sglang` installs them, or {VARIABLE} names an interpreter."
Core = Literal["radix", "unified", "native"]
NAMES: dict[Core, str] = {
    "radix": "SGLang RadixCache, Python",
    "unified": "SGLang unified core, Python",
    "native": "SGLang unified core, native",
}


class PeerTree(NamedTuple):
    """One of the child's trees, open under its core's name."""

    peer: Peer
    core: Core

    def turns(self, turns: Sequence[Turn]) -> Times:
        """Make the turns."""
        answer = self.peer.ask({"do": "turns", "tree": self.core, "turns": turns})
        return Times([int(hit) for hit in answer["hits"]], answer["match"], answer["insert"])

    def evict(self, tokens: int, times: int) -> list[float]:
        """Evict that many tokens, several times, and return the seconds of each."""
        return self.peer.ask({"do": "evict", "tree": self.core, "tokens": tokens, "times": times})["evict"]

    def convert(self, tokens: int, times: int) -> list[float]:
        """Make a key of a list of ids, several times, and return the seconds of each."""
        return self.peer.ask({"do": "convert", "tree": self.core, "tokens": tokens, "times": times})["convert"]


class Peer:
    """The child. It ends with the block, and with this process at the latest: its input ends then."""

    def __init__(self, python: Path) -> None:
        script = Path(__file__).with_name("sglang_child.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, "-I", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            self._read()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def open(self, core: Core, block_size: int, file: Path) -> PeerTree:
        """Open a new tree over the tokens of `file`, in the place of the last one of that core."""
        self.ask({"do": "open", "tree": core, "core": core, "page": block_size, "file": str(file)})
        return PeerTree(self, core)

    def ask(self, what: dict[str, object]) -> dict[str, list[float]]:
        """Send a request and return its answer. Raises EOFError if the child has ended; what it said stands on standard error."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(what).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError("the peer has ended") from error
        return msgspec.json.decode(self._read(), type=dict[str, list[float]])

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the peer has ended with status {self._process.wait()}")
        return line

    def _end(self) -> None:
        with self._process as process:
            process.kill()


def interpreter() -> Path | None:
    """Return the peer's interpreter: the one named by `VARIABLE`, or that of `.venv-sglang` beside the checkout; None without."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else Path(__file__).resolve().parent.parent / ".venv-sglang" / "bin" / "python"
    return path if path.exists() else None


def available() -> bool:
    """Return whether there is a peer."""
    return sys.platform == "linux" and interpreter() is not None
