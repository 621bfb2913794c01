"""What an LMDB data file must be before it is mapped: LMDB believes its pages, and a wrong one is a signal, not an error.

A page that the tree needs beyond the end of the file is a bus error; one in the middle that is no page of a tree (zeros, after a
copy that was cut short or a disk that lost writes) ends in an assertion, or in a write over pages that are in use. So all pages
of the trees are read here first, with plain reads, and the list of free pages is compared with them. Values are not read: each
has a checksum of its own.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import StoreError

# mdb.c of LMDB 0.9, 64-bit, little-endian: MDB_page, MDB_db, MDB_meta, MDB_node.
_HEAD = 16
_META = struct.Struct("<IIQQ IHHQQQQQ IHHQQQQQ QQ")
_TREE = struct.Struct("<IHHQQQQQ")
_OVERFLOW_HEAD = struct.Struct("<QHHI")
_NODE = 8
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _IS_META = 0x01, 0x02, 0x04, 0x08
_BIG, _SUBTREE = 0x01, 0x02
_NONE = (1 << 64) - 1
_SIZES = frozenset(1 << power for power in range(8, 17))
_FIRST_PAGE = 2
"""Pages 0 and 1 are the meta pages."""
_DEPTH = 32
"""Levels that LMDB's cursors have room for."""
_CHUNK = 1024
"""Pages that are looked at together."""

_Numbers = NDArray[np.int64]


class _Tree(NamedTuple):
    depth: int
    branches: int
    leaves: int
    entries: int
    root: int

    @classmethod
    def of(cls, fields: tuple[int, ...]) -> _Tree:
        return cls(fields[2], fields[3], fields[4], fields[6], fields[7])


class _Meta(NamedTuple):
    page: int
    free: _Tree
    main: _Tree
    last_page: int
    txnid: int


class _Nodes(NamedTuple):
    """The nodes of some pages: of branches the pages they lead to, of leaves where in `bytes` their data is and how long."""

    children: _Numbers
    total: int
    flags: _Numbers
    begins: _Numbers
    sizes: _Numbers
    bytes: NDArray[np.uint8]


def check_file(path: Path, *, values: bool = False) -> None:
    """Raise StoreError if LMDB can't be trusted with the file at `path`: mapping, reading or changing it could end the process.

    No file is fine. Both meta pages must be LMDB's. Of the newer one every page of its trees must be there, be what its place
    says and name only pages there are; no page may be named twice or be free as well. Pages that nothing names may be missing:
    a transaction may leave some at the end that it took and gave back unwritten. With `values` the first page of each large
    value is looked at, too. Costs a read of all pages but those of the values.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        with _broken(path):
            walk = _Walk(descriptor, _newest(descriptor))
            walk.run()
            if values and walk.misplaced():
                raise StoreError(f"page {walk.misplaced()[0][0]} does not begin a value")
    finally:
        os.close(descriptor)


def mend_values(path: Path) -> int:
    """Write the 16 bytes again that LMDB keeps before each large value, where they are wrong; return for how many values.

    LMDB needs them to free or to replace a value, and refuses the whole transaction where they are not there. They are known:
    the page's own number, and how many pages the value takes. The value after them is whatever is left of it, which a checksum
    tells. Nobody may be writing. Raises StoreError as `check_file` does.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with _broken(path):
            walk = _Walk(descriptor, _newest(descriptor))
            walk.run()
            wrong = walk.misplaced()
        for begin, length in wrong:
            os.pwrite(descriptor, _OVERFLOW_HEAD.pack(begin, 0, _OVERFLOW, length), begin * walk.page_bytes)
        os.fsync(descriptor)
        return len(wrong)
    finally:
        os.close(descriptor)


@contextmanager
def _broken(path: Path) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{path} is no whole LMDB file: {error}", path=str(path), broken=True) from error


def _newest(descriptor: int) -> _Meta:
    first = _meta(descriptor, 0)
    second = _meta(descriptor, first.page)
    if first.page != second.page:
        raise StoreError("the two meta pages name different page sizes")
    return max(first, second, key=lambda meta: meta.txnid)  # of two equal ones the first, as LMDB does


def _meta(descriptor: int, offset: int) -> _Meta:
    page = os.pread(descriptor, _HEAD + _META.size, offset)
    if len(page) < _HEAD + _META.size:
        raise StoreError(f"no meta page at {offset}")
    flags = struct.unpack_from("<H", page, 10)[0]
    fields = _META.unpack_from(page, _HEAD)
    if not flags & _IS_META or fields[0] != _MAGIC or fields[1] != _VERSION:
        raise StoreError(f"no meta page at {offset}")
    if fields[4] not in _SIZES:
        raise StoreError(f"a page size of {fields[4]}")
    return _Meta(fields[4], _Tree.of(fields[4:12]), _Tree.of(fields[12:20]), fields[20], fields[21])


class _Walk:
    """One look at the pages of all trees of a file, as one of its meta pages names them."""

    def __init__(self, descriptor: int, meta: _Meta) -> None:
        self._descriptor = descriptor
        self._meta = meta
        self._size = self.page_bytes = meta.page
        self._pages = min(os.fstat(descriptor).st_size // meta.page, meta.last_page + 1)
        self._values: list[tuple[_Numbers, _Numbers]] = []
        self._begins: list[_Numbers] = []
        self._lengths: list[_Numbers] = []

    def run(self) -> None:
        """Read all. Raises StoreError."""
        trees = [self._meta.main]
        while trees:
            for nodes in self._tree(trees.pop()):
                trees += self._data(nodes)
        for nodes in self._tree(self._meta.free):
            self._free(nodes)
        if self._begins:
            begins, lengths = np.concatenate(self._begins), np.concatenate(self._lengths)
            order = np.argsort(begins, kind="stable")
            begins, lengths = begins[order], lengths[order]
            twice = np.flatnonzero(begins[1:] < (begins + lengths)[:-1])
            if len(twice):
                raise StoreError(f"page {begins[twice[0] + 1]} is in use twice, or free and in use")

    def misplaced(self) -> list[tuple[int, int]]:
        """Return first page and number of pages of each large value that does not begin as LMDB has it begin. Reads each."""
        return [pair for begins, lengths in self._values for pair in self._wrong(begins, lengths)]

    def _tree(self, tree: _Tree) -> Iterator[_Nodes]:
        """Yield the nodes of the leaves of `tree`, and note its pages. Free pages are judged after all that are in use."""
        if tree.root == _NONE:
            if tree.entries or tree.depth:
                raise StoreError("a tree without a root has entries")
            return
        if not 1 <= tree.depth <= _DEPTH:
            raise StoreError(f"a tree of {tree.depth} levels")
        level = np.array([tree.root], np.uint64).astype(np.int64)
        branches = leaves = entries = 0
        for depth in range(1, tree.depth + 1):
            level = np.sort(level)
            if (np.diff(level) == 0).any():  # at once: pages that lead to each other would never end
                raise StoreError("a page is reached twice")
            self._note(level, 1, self._pages)
            below: list[_Numbers] = []
            for first in range(0, len(level), _CHUNK):
                numbers = level[first : first + _CHUNK]
                nodes = self._nodes(numbers, self._read(numbers), leaf=depth == tree.depth)
                if depth < tree.depth:
                    below.append(nodes.children)
                    branches += len(numbers)
                else:
                    leaves += len(numbers)
                    entries += nodes.total
                    yield nodes
            level = np.concatenate(below) if below else level
        if (branches, leaves, entries) != (tree.branches, tree.leaves, tree.entries):
            raise StoreError(f"a tree of {entries} entries in {leaves} leaves, where {tree.entries} in {tree.leaves} should be")

    def _note(self, begins: _Numbers, lengths: _Numbers | int, end: int) -> None:
        lengths = np.broadcast_to(np.asarray(lengths, np.int64), begins.shape)
        if (begins < _FIRST_PAGE).any():
            raise StoreError(f"page {begins.min()} is no page of a tree")
        beyond = begins + lengths > end
        if beyond.any():
            raise StoreError(f"page {begins[beyond][0]}, or what it begins, lies beyond the end, {end} pages")
        self._begins.append(begins)
        self._lengths.append(lengths)

    def _read(self, numbers: _Numbers) -> NDArray[np.uint8]:
        """Return the pages `numbers`, ascending, as rows. Runs are read at once, and all are asked for before the first is."""
        starts = np.flatnonzero(np.diff(numbers, prepend=-9) != 1)
        lengths = np.diff(starts, append=len(numbers))
        runs = list(zip(starts.tolist(), numbers[starts].tolist(), lengths.tolist(), strict=True))
        if len(runs) > 1:
            for _, number, length in runs:
                os.posix_fadvise(self._descriptor, number * self._size, length * self._size, os.POSIX_FADV_WILLNEED)
        pages = np.empty((len(numbers), self._size), np.uint8)
        for row, number, length in runs:
            if os.preadv(self._descriptor, [pages[row : row + length].data], number * self._size) != length * self._size:
                raise StoreError(f"page {number} can't be read whole")
        return pages

    def _nodes(self, numbers: _Numbers, pages: NDArray[np.uint8], *, leaf: bool) -> _Nodes:
        words = pages.view("<u2")
        flags, lower, upper = words[:, 5], words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
        own = pages[:, :8].copy().view("<u8")[:, 0]
        sound = (own == numbers) & (flags == (_LEAF if leaf else _BRANCH))
        sound &= (lower > _HEAD) & (lower % 2 == 0) & (lower <= upper) & (upper <= self._size)
        if not sound.all():
            raise StoreError(f"page {numbers[~sound][0]} is no {'leaf' if leaf else 'branch'} of a tree")
        counts = (lower - _HEAD) // 2
        of, place = np.nonzero(np.arange(counts.max()) < counts[:, None])
        offsets = words[of, _HEAD // 2 + place].astype(np.int64)
        if ((offsets % 2 != 0) | (offsets < upper[of]) | (offsets + _NODE > self._size)).any():
            raise StoreError("a node lies outside its page")
        flat = words.reshape(-1)
        at = (of * self._size + offsets) // 2
        low, high, extra, key = (flat[at + part].astype(np.int64) for part in range(4))
        sizes = low | high << 16
        room = self._size - offsets - _NODE - key
        if leaf:
            if (extra & ~(_BIG | _SUBTREE)).any() or ((extra & _SUBTREE != 0) & (sizes != _TREE.size)).any():
                raise StoreError("a node of a kind that is not ours")
            room -= np.where(extra & _BIG, 8, sizes)
        if (room < 0).any():
            raise StoreError("a node ends outside its page")
        children = np.empty(0, np.int64) if leaf else sizes | extra << 32
        return _Nodes(children, len(of), extra, of * self._size + offsets + _NODE + key, sizes, pages.reshape(-1))

    def _data(self, nodes: _Nodes) -> list[_Tree]:
        """Note the pages of the large values of some leaves, and return the trees that lie in them."""
        self._values.append(self._pages_of(nodes, np.flatnonzero(nodes.flags & _BIG)))
        return [
            _Tree.of(_TREE.unpack_from(nodes.bytes.data, begin)) for begin in nodes.begins[nodes.flags & _SUBTREE != 0].tolist()
        ]

    def _pages_of(self, nodes: _Nodes, big: NDArray[np.intp]) -> tuple[_Numbers, _Numbers]:
        places = nodes.begins[big][:, None] + np.arange(8)
        begins = nodes.bytes[places].view("<u8")[:, 0].astype(np.int64)
        lengths = -(-(nodes.sizes[big] + _HEAD) // self._size)
        self._note(begins, lengths, self._pages)
        return begins, lengths

    def _wrong(self, begins: _Numbers, lengths: _Numbers) -> list[tuple[int, int]]:
        pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
        return [(begin, length) for begin, length in pairs if not self._begins_value(begin, length)]

    def _begins_value(self, begin: int, length: int) -> bool:
        own, _, flags, pages = _OVERFLOW_HEAD.unpack(os.pread(self._descriptor, _HEAD, begin * self._size))
        return bool((own, flags, pages) == (begin, _OVERFLOW, length))

    def _free(self, nodes: _Nodes) -> None:
        """Note the free pages that some leaves of the free list name: each a count and as many numbers, descending."""
        big = np.flatnonzero(nodes.flags & _BIG)
        begins, lengths = self._pages_of(nodes, big)
        if self._wrong(begins, lengths):
            raise StoreError("a list of free pages that begins nowhere")
        far = dict(zip(big.tolist(), begins.tolist(), strict=True))
        for node, (begin, size) in enumerate(zip(nodes.begins.tolist(), nodes.sizes.tolist(), strict=True)):
            raw = (
                os.pread(self._descriptor, size, far[node] * self._size + _HEAD)
                if node in far
                else nodes.bytes[begin : begin + size]
            )
            listed = np.frombuffer(bytes(raw[: size // 8 * 8]), "<u8").astype(np.int64)
            if not len(listed) or not 0 <= listed[0] < len(listed):
                raise StoreError("a list of free pages that can't be")
            numbers = listed[1 : 1 + listed[0]][::-1]
            if (np.diff(numbers) < 1).any():
                raise StoreError("a list of free pages out of order")
            starts = np.flatnonzero(np.diff(numbers, prepend=-9) != 1)
            self._note(numbers[starts], np.diff(starts, append=len(numbers)), self._meta.last_page + 1)
