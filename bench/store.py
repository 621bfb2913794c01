"""Results as files: one JSON document a program, beside its plots."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tiercache.bench.figures import Result

_decoder = msgspec.json.Decoder(Result)


def write(result: Result, folder: Path) -> Path:
    """Write a result to `folder`, which is made if it is not there; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.program}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def read(path: Path) -> Result:
    """Return a result. Raises msgspec.ValidationError for a file that is none, OSError for one that can't be read."""
    return _decoder.decode(path.read_bytes())


def read_all(folder: Path) -> dict[str, Result]:
    """Return the results in `folder` by program, in the order of their names."""
    return {result.program: result for result in map(read, sorted(folder.glob("*.json")))}
