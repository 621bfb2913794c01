"""LMCache as processes beside this one: its server, and an engine of ours (`lmcache_engine.py`) in its own environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiercache.bench import tied
from tiercache.bench.served import environment
from tiercache.spec import KVSpec

INTERPRETER = "TIERCACHE_PEER_LMCACHE"
"""Environment variable: the Python of an environment that LMCache is installed in."""
CHUNKS = 8
SEED = 0
_ROOT = Path(__file__).resolve().parent
_HERE = _ROOT.parent / ".venv-lmcache" / "bin" / "python"
_END_SECONDS = 20


def interpreter() -> Path | None:
    """Return the Python that has LMCache: what the environment names, else what `make peer-lmcache` made; None without either."""
    named = os.environ.get(INTERPRETER)
    path = Path(named) if named else _HERE
    return path if path.exists() else None


class Peer:
    """The engine's process. Calls block, and return what it measured."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def call(self, name: str, number: int = 0, way: str = "slots") -> Any:
        """Have the engine do something with prompt `number`, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, number, way]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine beside LMCache ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def served(python: Path, spec: KVSpec, folder: Path, *, memory: int, disk: Path | None = None) -> Iterator[Peer]:
    """Run LMCache's server with `memory` bytes, and an engine beside it; with `disk`, what is stored goes to that folder, too.

    Their output is kept in `folder`.
    """
    port, http = _free_port(), _free_port()
    name = f"tiercache-bench-{os.getpid()}-{port}"
    command = tied.command(
        *(str(python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http)),
        *("--l1-size-gb", str(memory / (1 << 30)), "--no-l1-use-lazy", "--eviction-policy", "LRU", "--shm-name", name),
        *("--supported-transfer-mode", "auto", "--disable-observability"),
    )
    if disk is not None:
        disk.mkdir()
        command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(disk)})]
    log = folder / "lmcache-server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=_environment(), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        with _engine(python, spec, folder, url=f"tcp://127.0.0.1:{port}", disk=disk, memory=memory) as peer:
            yield peer
    finally:
        end(server)
        Path("/dev/shm", name).unlink(missing_ok=True)


@contextmanager
def in_process(python: Path, spec: KVSpec, folder: Path, *, memory: int) -> Iterator[Peer]:
    """Run LMCache's storage manager with `memory` bytes in the engine's own process."""
    with _engine(python, spec, folder, url=None, disk=None, memory=memory) as peer:
        yield peer


@contextmanager
def _engine(python: Path, spec: KVSpec, folder: Path, *, url: str | None, disk: Path | None, memory: int) -> Iterator[Peer]:
    shape = {"layers": spec.layers, "heads": spec.kv_heads, "head_dim": spec.head_dim, "chunk": spec.block_size, "chunks": CHUNKS}
    said = {"shape": {**shape, "seed": SEED}, "url": url, "folder": str(disk) if disk else None, "memory": memory}
    # Without this file's folder on the path, where our modules have names that a library may look for.
    command = tied.command(str(python), "-P", str(_ROOT / "lmcache_engine.py"), json.dumps(said))
    pipe = subprocess.PIPE
    with (folder / "lmcache-engine.log").open("wb") as errors:
        process = subprocess.Popen(command, env=_environment(), stdin=pipe, stdout=pipe, stderr=errors, text=True)
    try:
        yield Peer(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        end(process)


def _environment() -> dict[str, str]:
    return environment() | {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}


def end(process: subprocess.Popen[Any]) -> None:
    """Tell a process to end and wait for it; one that doesn't is killed."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
