"""The namespaces that metadata knows: a number for each, which rows hold in place of its digest, and what the digest stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tiercache.errors import StoreError
from tiercache.spec import DIGEST_BYTES, Geometry, KVSpec, Namespace

T = TypeVar("T")


class _Space(msgspec.Struct, frozen=True, kw_only=True):
    namespace: dict[str, Any]
    spec: dict[str, Any]


class Spaces:
    """What the database `spaces` holds, to be kept in step with it. Not thread-safe.

    `entries` are its numbers and values. Raises StoreError for a value that can't be read.
    """

    def __init__(self, entries: Iterable[tuple[int, bytes]]) -> None:
        self._digests: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._known: dict[bytes, tuple[Namespace, KVSpec]] = {}
        self._new: set[bytes] = set()
        for number, value in entries:
            self.add(number, value)
        self._new.clear()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._numbers

    @property
    def known(self) -> dict[bytes, tuple[Namespace, KVSpec]]:
        """The namespaces whose names are known, by digest."""
        return self._known

    def number(self, digest: bytes) -> int:
        """Return the number of a namespace that has one."""
        return self._numbers[digest]

    def digest(self, number: int) -> bytes | None:
        """Return the digest of a namespace, or None for a number that is nobody's."""
        return self._digests.get(number)

    def allot(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """Return numbers for those of `digests` that have none; they count from the next `add` on."""
        first = max(self._digests, default=-1) + 1
        return {digest: first + place for place, digest in enumerate(dict.fromkeys(digests)) if digest not in self._numbers}

    def add(self, number: int, value: bytes) -> None:
        """Note that `value` is what the disk holds under `number`."""
        digest = value[:DIGEST_BYTES]
        self._digests[number] = digest
        self._numbers[digest] = number
        self._new.add(digest)
        if len(value) > DIGEST_BYTES:
            self._known[digest] = decode(value)

    def drop(self, numbers: Iterable[int]) -> None:
        """Note that the disk holds nothing under `numbers`."""
        for number in numbers:
            digest = self._digests.pop(number)
            del self._numbers[digest]
            self._known.pop(digest, None)

    def unused(self, geometry: Geometry, used: Collection[int]) -> list[int]:
        """Return the numbers of `geometry`'s namespaces that are not `used` and not new in this run.

        One whose name is not known has an unknown geometry, and stays.
        """
        return [
            self._numbers[digest]
            for digest, (_, spec) in self._known.items()
            if spec.geometry == geometry and self._numbers[digest] not in used and digest not in self._new
        ]

    def geometries(self) -> set[Geometry]:
        """Return the geometries of the namespaces whose names are known."""
        return {spec.geometry for _, spec in self._known.values()}


def encode(digest: bytes, namespace: Namespace, spec: KVSpec) -> bytes:
    """Return the value that says what `digest` stands for."""
    space = _Space(namespace=msgspec.to_builtins(namespace), spec=msgspec.to_builtins(spec))
    return digest + msgspec.json.encode(space, order="deterministic")


def decode(value: bytes) -> tuple[Namespace, KVSpec]:
    """Return what `encode` was given. Raises StoreError."""
    space = read_json(value[DIGEST_BYTES:], _Space)
    try:
        return Namespace(**space.namespace), KVSpec(**space.spec)
    except (TypeError, ValueError) as error:
        raise StoreError(f"a namespace that can't be: {error}", broken=True) from error


def read_json(value: bytes, kind: type[T]) -> T:
    """Return the `kind` that some JSON of the metadata stands for. Raises StoreError."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"metadata that can't be read: {error}", broken=True) from error
