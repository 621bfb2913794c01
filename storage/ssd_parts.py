"""The parts of a put: each is brought together in memory while the one before it is being written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import Untrusted
from tiercache.storage.contract import Put
from tiercache.storage.ssd_records import Records, Staged

_BUFFERS = 2
"""One that is written and one that is filled."""


class Part(NamedTuple):
    """Records that are ready to be written; they end before `rotten`, if there is one, the block whose source was bad."""

    staged: list[Staged]
    rotten: Untrusted | None = None


def parts(records: Records, items: Sequence[Put], most: int) -> Generator[Part, None, None]:
    """Yield `items` in parts of at most `most`. A part is valid until the next is asked for; a rotten one is the last.

    Where there are several, a thread of this call's own stages ahead; it has ended when the iterator has ended or is closed, so
    that no source is read after that.
    """
    pieces = [items[first : first + most] for first in range(0, len(items), most)]
    # Fresh memory costs page faults: the same buffers for all parts.
    width = max(map(len, pieces), default=0)
    buffers = [np.empty((width, records.stage_bytes), np.uint8) for _ in pieces[:_BUFFERS]]
    if len(pieces) > 1:
        ahead = _Ahead(records, pieces, buffers)
        if ahead.start():
            yield from ahead.parts()
            return
    for piece in pieces:
        part = _stage(records, piece, buffers[0])
        yield part
        if part.rotten is not None:
            return


def _stage(records: Records, items: Sequence[Put], buffer: NDArray[np.uint8]) -> Part:
    staged: list[Staged] = []
    for item, row in zip(items, buffer, strict=False):
        try:
            staged.append(records.stage(item, row))
        except Untrusted as error:
            return Part(staged, error)
    return Part(staged)


class _Ahead:
    """A thread that stages, and buffers that go to and fro between it and who writes."""

    def __init__(self, records: Records, pieces: Sequence[Sequence[Put]], buffers: Sequence[NDArray[np.uint8]]) -> None:
        self._records = records
        self._pieces = pieces
        self._free: queue.SimpleQueue[NDArray[np.uint8] | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Part, NDArray[np.uint8]] | BaseException] = queue.SimpleQueue()
        self._ended = False
        for buffer in buffers:
            self._free.put(buffer)
        self._thread = threading.Thread(target=self._run, name="tiercache-stage", daemon=True)

    def start(self) -> bool:
        """Start the thread; return False where none can be had."""
        try:
            self._thread.start()
        except RuntimeError:
            return False
        return True

    def parts(self) -> Generator[Part, None, None]:
        """Yield the parts in order."""
        try:
            for _ in self._pieces:
                found = self._full.get()
                if isinstance(found, BaseException):
                    raise found
                part, buffer = found
                yield part
                if part.rotten is not None:
                    return
                self._free.put(buffer)
        finally:
            self._ended = True
            self._free.put(None)
            self._thread.join()  # it waits for nothing but a buffer

    def _run(self) -> None:
        try:
            for piece in self._pieces:
                buffer = self._free.get()
                if buffer is None or self._ended:
                    return
                part = _stage(self._records, piece, buffer)
                self._full.put((part, buffer))
                if part.rotten is not None:
                    return
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits
            self._full.put(error)
