"""Whole namespaces, wherever their blocks are: how much they hold, and how they are forgotten.

A namespace may have blocks in the tiers of an open stack, and on a disk whose stack nobody has opened since the start: there
metadata alone knows of it, and forgetting is done in metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tiercache.errors import InvalidSpec
from tiercache.residency import Space
from tiercache.service.face import Extent
from tiercache.service.stack import Stack
from tiercache.spec import Geometry, KVSpec, Namespace, Selection
from tiercache.storage.ssd import SsdTier

Known = Mapping[bytes, tuple[Namespace, KVSpec]]
"""Namespaces by digest, with what the digest stands for."""
Choice = Callable[[bytes, Namespace | None], bool]
"""Whether a namespace is meant, by its digest and, where that is known, what it stands for."""

_TOKEN_BYTES = 4


def selection_of(fields: Mapping[str, Any]) -> Selection:
    """Return the selection that names `fields`. Raises InvalidSpec for a field that there is not, too."""
    unknown = sorted(set(fields) - {"model", "weights", "adapter", "salt"})
    if unknown:
        raise InvalidSpec(f"nothing is selected by {unknown[0]!r:.40}: the fields are model, weights, adapter and salt")
    return Selection(**fields)


def chosen_by(selection: Selection) -> Choice:
    """Return the choice of the namespaces that `selection` covers; one that nobody can name is not among them."""

    def choose(digest: bytes, namespace: Namespace | None) -> bool:
        return namespace is not None and selection.covers(namespace)

    return choose


def held_open(stacks: Iterable[Stack], known: Known, choose: Choice) -> list[Extent]:
    """Return what the chosen namespaces hold in open stacks; those that hold nothing are left out."""
    counted = ((stack, space, stack.cache.blocks_of(space)) for stack, space in _chosen(stacks, known, choose))
    return [_extent(space, known, blocks) for _, space, blocks in counted if blocks]


def held_closed(disk: SsdTier, opened: Collection[Geometry], known: Known, choose: Choice) -> list[Extent]:
    """Return what the chosen namespaces hold on disk where no stack is open. Raises StoreError. For a worker thread."""
    found: list[Extent] = []
    for geometry, digests in _closed(opened, known, choose).items():
        counts = disk.census(geometry)
        found.extend(_known_extent(digest, known, counts[digest]) for digest in digests if counts.get(digest))
    return found


class Invalidation:
    """One removal of all that the chosen namespaces hold; each is cleared once, so that what is stored meanwhile stays."""

    def __init__(self, choose: Choice) -> None:
        self._choose = choose
        self._cleared: set[bytes] = set()
        self._stacks: list[Stack] = []
        self.extents: list[Extent] = []
        """What went so far; namespaces that held nothing are left out."""

    def clear(self, stacks: Iterable[Stack], known: Known) -> None:
        """Take the chosen namespaces out of the trees of open stacks, at once, and begin to forget their records."""
        for stack, space in _chosen(stacks, known, self._choose):
            if space.digest in self._cleared:
                continue
            self._cleared.add(space.digest)
            blocks = stack.cache.clear(space)
            stack.sweep_waste()
            if stack not in self._stacks:
                self._stacks.append(stack)
            if blocks:
                self.extents.append(_extent(space, known, blocks))

    def forget_closed(self, disk: SsdTier, opened: Collection[Geometry], known: Known) -> None:
        """Forget the chosen namespaces on disk where no stack is open, for good. Raises StoreError. For a worker thread.

        No stack may be opened meanwhile: it would have read what goes.
        """
        held = held_closed(disk, opened, known, self._choose)
        for geometry, digests in _closed(opened, known, self._choose).items():
            disk.forget(geometry, digests)
        self.extents.extend(held)

    async def forgotten(self) -> None:
        """Wait until the records in open stacks are gone, too, also where a copy was in flight. Raises StoreError."""
        ends = await asyncio.gather(*(stack.forgotten() for stack in self._stacks), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def _chosen(stacks: Iterable[Stack], known: Known, choose: Choice) -> list[tuple[Stack, Space]]:
    return [
        (stack, space)
        for stack in stacks
        for space in stack.cache.residency.spaces.values()
        if choose(space.digest, known[space.digest][0] if space.digest in known else None)
    ]


def _closed(opened: Collection[Geometry], known: Known, choose: Choice) -> dict[Geometry, list[bytes]]:
    """Return the chosen namespaces of geometries that are not open."""
    found: dict[Geometry, list[bytes]] = {}
    for digest, (namespace, spec) in known.items():
        if spec.geometry not in opened and choose(digest, namespace):
            found.setdefault(spec.geometry, []).append(digest)
    return found


def _extent(space: Space, known: Known, blocks: int) -> Extent:
    if space.digest in known:
        return _known_extent(space.digest, known, blocks)
    return Extent(space.digest, None, None, blocks, blocks * space.tree.stride // _TOKEN_BYTES)


def _known_extent(digest: bytes, known: Known, blocks: int) -> Extent:
    namespace, spec = known[digest]
    return Extent(digest, namespace, spec, blocks, blocks * spec.block_size)
