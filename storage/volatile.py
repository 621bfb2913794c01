"""What the stores of memory share, on the host and on a device: slots that end with the process, and puts that are chains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from tiercache.errors import AuditFailed, Closed, InvalidTensor, Untrusted
from tiercache.spec import Geometry
from tiercache.storage.contract import FULL_CHARGE, Outcome, Put
from tiercache.types import Tier


class VolatileStore(ABC):
    """`capacity` slots for blocks of `geometry`. A store keeps no identities: the checksum is the guard."""

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self._geometry = geometry
        self._capacity = capacity
        self._closed = False

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """The tier whose slots these are."""

    @abstractmethod
    def _take(self, item: Put) -> None:
        """Copy one block in and verify it. Raises Untrusted."""

    @property
    def geometry(self) -> Geometry:
        """The shape of the blocks that fit a slot."""
        return self._geometry

    @property
    def capacity(self) -> int:
        """How many slots there are; slots are numbered from 0."""
        return self._capacity

    @property
    def durable(self) -> bool:
        """False: what is stored ends with the processes that map it."""
        return False

    def put(self, items: Sequence[Put]) -> list[Outcome]:
        """Copy `items` in, in order, verify each, and return one outcome for each.

        What fails its checksum fails with Untrusted, reason `checksum`, and leaves its slot's bytes undefined; the items after
        it fail with reason `order`, their slots untouched. Raises AuditFailed for a slot that does not exist, InvalidTensor for a
        source of another shape, and Closed after `close`, before any copy.
        """
        shape = (self._geometry.planes, self._geometry.unit_bytes)
        for item in items:
            self._require(item.slot)
            if item.source.shape != shape or item.source.dtype != np.uint8:
                what = f"{item.source.dtype} {item.source.shape}"
                raise InvalidTensor(f"the source for slot {item.slot} is {what}, not a block of bytes {shape}", slot=item.slot)
        outcomes: list[Outcome] = []
        for item in items:
            try:
                self._take(item)
            except Untrusted as error:
                outcomes.append(Outcome(0, error))
                break
            outcomes.append(Outcome(FULL_CHARGE))
        for item in items[len(outcomes) :]:
            what = f"{self.tier} slot {item.slot}: a block before it in the chain was not stored"
            outcomes.append(Outcome(0, Untrusted("order", what, slot=item.slot)))
        return outcomes

    def discard(self, slots: Sequence[int]) -> None:
        """Do nothing but see that `slots` exist (AuditFailed): the slot's next generation says that its block is gone."""
        for slot in slots:
            self._require(slot)

    def sync(self) -> None:  # noqa: B027 - empty on purpose, for all of them
        """Do nothing: memory does not outlive a loss of power."""

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self._closed = True

    def _require(self, slot: int) -> None:
        if self._closed:
            raise self._is_closed()
        if not 0 <= slot < self._capacity:
            raise AuditFailed(
                f"slot {slot} does not exist in {self.tier}; the slots are 0 to {self._capacity - 1}",
                slot=slot,
                capacity=self._capacity,
            )

    def _is_closed(self) -> Closed:
        return Closed(f"the {self.tier} arena is closed")
