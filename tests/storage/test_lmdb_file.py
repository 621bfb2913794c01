"""LMDB files before they are mapped: what is whole passes, whatever was done to it, and what is not is told by name."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from tiercache.errors import StoreError
from tiercache.storage.lmdb_env import PAGE
from tiercache.storage.lmdb_file import check_file, mend_values
from tiercache.storage.ssd_values import LmdbValues, Write

BIG = 3 * PAGE - 16


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two named trees of two levels, large values in one, and a list of free pages that has pages of its own."""
    with lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=2) as environment:
        rows, values = environment.open_db(b"rows"), environment.open_db(b"values")
        for first in range(0, 2000, 500):
            with environment.begin(write=True) as transaction:
                for number in range(first, first + 500):
                    transaction.put(number.to_bytes(8, "big"), os.urandom(150), db=rows)
                    if number % 4 == 0:
                        transaction.put(number.to_bytes(8, "big"), b"v" * BIG, db=values)
        with environment.begin(write=True) as transaction:
            for number in range(0, 1400, 2):
                transaction.delete(number.to_bytes(8, "big"), db=values)
    return tmp_path / "data.mdb"


class Page:
    """One page of a file, to be found by what it is and to be changed."""

    def __init__(self, file: Path, number: int) -> None:
        self.file, self.number = file, number
        content = file.read_bytes()[number * PAGE : (number + 1) * PAGE]
        self.own, _, self.flags, self.lower, self.upper = struct.unpack_from("<QHHHH", content)
        self.content = bytearray(content)

    def nodes(self) -> list[int]:
        """Where its nodes begin."""
        return list(struct.unpack_from(f"<{(self.lower - 16) // 2}H", self.content, 16))

    def write(self, at: int, part: bytes) -> None:
        with self.file.open("r+b") as changed:
            changed.seek(self.number * PAGE + at)
            changed.write(part)


def meta(file: Path) -> tuple[int, ...]:
    """Return the fields of the newer meta page."""
    content = file.read_bytes()
    both = [struct.unpack_from("<IIQQ IHHQQQQQ IHHQQQQQ QQ", content, at * PAGE + 16) for at in (0, 1)]
    return max(both, key=lambda fields: fields[21])


def trees(file: Path) -> dict[str, list[Page]]:
    """Return the root and one leaf of each tree that is in use: of the free list, and of both named ones."""
    fields = meta(file)
    main = Page(file, fields[19])
    found = {"free": [Page(file, fields[11])], "main": [main]}
    for at in main.nodes():
        size, flags, key = (*struct.unpack_from("<H", main.content, at), *struct.unpack_from("<HH", main.content, at + 4))
        assert (size, flags) == (48, 2)
        name = main.content[at + 8 : at + 8 + key].decode()
        root = Page(file, struct.unpack_from("<Q", main.content, at + 8 + key + 40)[0])
        found[name] = [root]
        if root.flags == 1:
            low, high = struct.unpack_from("<HH", root.content, root.nodes()[-1])
            found[name].append(Page(file, low | high << 16))
    return found


def test_a_whole_file_passes(file: Path) -> None:
    """What LMDB wrote is whole, with values looked at and without."""
    check_file(file)
    check_file(file, values=True)
    assert mend_values(file) == 0
    check_file(file.with_name("absent"))


def test_whatever_was_done_a_file_is_whole(tmp_path: Path, seed: int) -> None:
    """After each of many transactions, with puts, deletes, growth and free lists of every size: no false alarm."""
    choose = random.Random(seed)
    values = LmdbValues(tmp_path, value_bytes=BIG, map_bytes=1 << 27, sync=False)
    live: set[int] = set()
    for _ in range(120):
        puts = choose.sample(range(1500), choose.choice((1, 3, 40, 400)))
        deletes = choose.sample(sorted(live), min(len(live), choose.choice((0, 1, 30, 900))))
        values.commit([Write(key, 0, b"v" * BIG) for key in puts], deletes)
        live = live - set(deletes) | set(puts)
        values.sync()
        check_file(tmp_path / "data.mdb", values=True)
    values.close()


def _zeros(tree: str, level: int) -> Callable[[Path], None]:
    return lambda file: trees(file)[tree][level].write(0, bytes(PAGE))


def _meta(number: int) -> Callable[[Path], None]:
    return lambda file: Page(file, number).write(0, bytes(PAGE))


def _another(tree: str, level: int, at: int, part: bytes) -> Callable[[Path], None]:
    return lambda file: trees(file)[tree][level].write(at, part)


def _child(number: Callable[[Path], int]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        root = trees(file)["rows"][0]
        root.write(root.nodes()[1], struct.pack("<HHH", number(file) & 0xFFFF, number(file) >> 16 & 0xFFFF, 0))

    return change


def _first_child(file: Path) -> int:
    root = trees(file)["rows"][0]
    low, high = struct.unpack_from("<HH", root.content, root.nodes()[0])
    return int(low | high << 16)


def _free(word: Callable[[list[int]], list[int]]) -> Callable[[Path], None]:
    """Change the largest list of free pages, which has pages of its own or lies in its leaf."""

    def change(file: Path) -> None:
        leaf = trees(file)["free"][-1]
        at = max(leaf.nodes(), key=lambda at: struct.unpack_from("<HH", leaf.content, at)[0])
        size, _, flags, key = struct.unpack_from("<HHHH", leaf.content, at)
        where = leaf.number * PAGE + at + 8 + key
        if flags & 1:
            where = struct.unpack_from("<Q", leaf.content, at + 8 + key)[0] * PAGE + 16
        with file.open("r+b") as changed:
            changed.seek(where)
            listed = list(struct.unpack(f"<{size // 8}Q", changed.read(size // 8 * 8)))
            changed.seek(where)
            changed.write(struct.pack(f"<{size // 8}Q", *word(listed)))

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "the first meta page": (_meta(0), "no meta page"),
    "the second meta page": (_meta(1), "no meta page"),
    "the main tree": (_zeros("main", 0), "no leaf"),
    "a branch": (_zeros("rows", 0), "no branch"),
    "a leaf": (_zeros("rows", 1), "no leaf"),
    "the free list": (_zeros("free", 0), "no leaf|no branch"),
    "a leaf that is another page": (_another("rows", 1, 0, b"\x07"), "no leaf"),
    "a leaf that is half empty": (_another("rows", 1, 12, b"\x20\x00"), "should be"),
    "a node outside its page": (_another("rows", 1, 16, b"\xfe\x0f"), "outside its page"),
    "a page beyond the end": (_child(lambda file: 1 << 20), "beyond the end"),
    "a page reached twice": (_child(_first_child), "twice"),
    "a meta page in a tree": (_child(lambda file: 1), "no page of a tree"),
    "a free page that is in use": (_free(lambda ids: [ids[0], ids[1], *ids[2:-1], 2]), "twice|in use"),
    "free pages out of order": (_free(lambda ids: [ids[0], ids[2], ids[1], *ids[3:]]), "out of order"),
    "a list of free pages that is too long": (_free(lambda ids: [1 << 40, *ids[1:]]), "can't be"),
    "a list of free pages with zeros": (_free(lambda ids: [ids[0], *ids[1:-1], 0]), "no page of a tree"),
    "a free page beyond the last": (_free(lambda ids: [ids[0], 1 << 30, *ids[2:]]), "beyond the end"),
    "cut": (lambda file: os.truncate(file, file.stat().st_size // 2), "beyond the end"),
    "cut to half a page": (lambda file: os.truncate(file, 100), "no meta page"),
}


@pytest.mark.parametrize("name", BROKEN, ids=str)
def test_a_broken_file_is_told(file: Path, name: str) -> None:
    """Each kind of damage is a StoreError that says that the file is broken, and what is wrong."""
    change, words = BROKEN[name]
    change(file)

    with pytest.raises(StoreError, match=words) as caught:
        check_file(file)

    assert caught.value.fields["broken"]


def test_the_beginning_of_a_value_is_mended(tmp_path: Path) -> None:
    """Where the disk lost the 16 bytes before a value LMDB would never free it; they are written again, and it goes."""
    values = LmdbValues(tmp_path, value_bytes=BIG, map_bytes=1 << 24, sync=True)
    values.commit([Write(key, 0, bytes([key + 1]) * BIG) for key in range(8)])
    values.close()
    content = (tmp_path / "data.mdb").read_bytes()
    lost = [content.index(bytes([key + 1]) * BIG) - 16 for key in (2, 5)]
    with (tmp_path / "data.mdb").open("r+b") as changed:
        for at in lost:
            changed.seek(at)
            changed.write(bytes(PAGE))
    check_file(tmp_path / "data.mdb")
    with pytest.raises(StoreError, match="does not begin a value"):
        check_file(tmp_path / "data.mdb", values=True)

    values = LmdbValues(tmp_path, value_bytes=BIG, map_bytes=1 << 24, sync=True)
    values.commit([Write(5, 0, b"n" * BIG)], [2, 3])

    seen: list[bytes] = []
    assert values.keys(0, None, 100) == [0, 1, 4, 5, 6, 7]
    for key in values.keys(0, None, 100):
        assert values.read(key, lambda view: seen.append(bytes(view)))
    values.close()
    assert seen == [b"\x01" * BIG, b"\x02" * BIG, b"\x05" * BIG, b"n" * BIG, b"\x07" * BIG, b"\x08" * BIG]
    check_file(tmp_path / "data.mdb", values=True)


def test_a_short_file_may_be_whole(tmp_path: Path) -> None:
    """Pages at the end that no tree reaches may be missing, and the check tells them from those that are needed."""
    values = LmdbValues(tmp_path, value_bytes=3 * PAGE - 16, map_bytes=1 << 22, sync=True)
    values.commit([Write(key, 0, bytes([key]) * values.value_bytes) for key in range(40)])
    values.commit((), range(20, 40))
    for _ in range(6):  # the tree moves down into what was freed
        values.settle()
    last = values._open().info()["last_pgno"]
    values.close()
    file = tmp_path / "data.mdb"

    os.truncate(file, (last - 30) * PAGE)
    check_file(file)
    values = LmdbValues(tmp_path, value_bytes=3 * PAGE - 16, map_bytes=1 << 22, sync=True)
    for key in range(20):
        seen: list[bytes] = []
        assert values.read(key, lambda view, seen=seen: seen.append(bytes(view)))  # type: ignore[misc]
        assert seen == [bytes([key]) * values.value_bytes]
    values.commit([Write(key, 0, bytes([key]) * values.value_bytes) for key in range(20, 40)])
    values.close()

    os.truncate(file, 40 * PAGE)
    with pytest.raises(StoreError, match="beyond the end"):
        check_file(file)
