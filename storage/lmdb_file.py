"""What an LMDB data file must be before it is mapped: a page that the tree needs beyond the end of the file is a bus error."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tiercache.errors import StoreError

# mdb.c of LMDB 0.9, 64-bit: MDB_page, MDB_meta with two MDB_db, MDB_node.
_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ IHHQQQQQ IHHQQQQQ QQ")
_NODE = struct.Struct("<HHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _IS_META = 0x01, 0x02, 0x04, 0x08
_BIG, _SUBTREE = 0x01, 0x02
_NONE = (1 << 64) - 1
_SIZES = frozenset(1 << power for power in range(8, 17))


class _Head(NamedTuple):
    page: int
    roots: tuple[int, int]
    last_page: int
    txnid: int


def check_file(path: Path) -> None:
    """Raise StoreError if the LMDB file at `path` can't be mapped without the risk of a bus error. No file is fine.

    Both meta pages must be LMDB's. A file shorter than they claim is read page by page: a transaction may leave pages at the
    end that it took and gave back unwritten, so a short file is whole if all that its trees reach lies within it.
    """
    try:
        size = os.stat(path).st_size
        with path.open("rb") as file:
            first = _head(file, 0)
            second = _head(file, first.page)
            head = max(first, second, key=lambda head: head.txnid)
            if first.page != second.page:
                raise StoreError("the two meta pages name different page sizes")
            if size < (head.last_page + 1) * head.page:
                _walk(file, head, size // head.page)
    except FileNotFoundError:
        return
    except (StoreError, struct.error) as error:
        raise StoreError(f"{path} is no whole LMDB file: {error}", path=str(path), broken=True) from error


def _head(file: BinaryIO, offset: int) -> _Head:
    file.seek(offset)
    page = file.read(_PAGE.size + _META.size)
    flags = _PAGE.unpack_from(page)[2]
    fields = _META.unpack_from(page, _PAGE.size)
    if not flags & _IS_META or fields[0] != _MAGIC or fields[1] != _VERSION:
        raise StoreError(f"no meta page at {offset}")
    if fields[4] not in _SIZES:
        raise StoreError(f"a page size of {fields[4]}")
    return _Head(fields[4], (fields[11], fields[19]), fields[20], fields[21])


def _walk(file: BinaryIO, head: _Head, pages: int) -> None:
    pending = [root for root in head.roots if root != _NONE]
    seen: set[int] = set()
    while pending:
        number = pending.pop()
        if number >= pages:
            raise StoreError(f"page {number} lies beyond the end, {pages} pages")
        if number in seen:
            raise StoreError(f"page {number} is reached twice")
        seen.add(number)
        file.seek(number * head.page)
        page = file.read(head.page)
        own, _, flags, lower, _ = _PAGE.unpack_from(page)
        if own != number or not flags & (_BRANCH | _LEAF):
            raise StoreError(f"page {number} is no page of a tree")
        for (place,) in struct.iter_unpack("<H", page[_PAGE.size : lower]):
            low, high, extra, key = _NODE.unpack_from(page, place)
            if flags & _BRANCH:
                pending.append(low | high << 16 | extra << 32)
            elif extra & _SUBTREE:
                root = _TREE.unpack_from(page, place + _NODE.size + key)[7]
                pending += [root] if root != _NONE else []
            elif extra & _BIG:
                (start,) = struct.unpack_from("<Q", page, place + _NODE.size + key)
                end = start + -(-((low | high << 16) + _PAGE.size) // head.page)
                if end > pages:
                    raise StoreError(f"a value ends at page {end}, beyond the end, {pages} pages")
