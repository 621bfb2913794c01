"""The copies of a transfer, as the mover asks for them: the seam where tests hold, fail and reorder them.

Between memories of the host whole blocks are copied: nobody reads a layer where it goes before all of the block is there, and each
layer would be a hand-over between the loop and a thread. A copier for which single layers are of use says so (`by_layer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiercache.errors import StoreError, Untrusted
from tiercache.kernels.device import Event
from tiercache.keys import Digest, block_keys, sha256
from tiercache.storage.contract import Planes, Put, Store
from tiercache.storage.workers import Lane, Workers
from tiercache.transfer import Discard, Report, Transfer
from tiercache.types import Identity


class Copier(Protocol):
    """What the mover has done for it. Each call is one piece of work away from the event loop."""

    def by_layer(self, transfer: Transfer) -> LayerCopier | None:
        """Return who copies the transfer layer by layer; None where it goes in whole blocks."""
        ...

    def chunks(self, transfer: Transfer) -> Sequence[tuple[int, int]]:
        """Return the pieces, as ranges of blocks, in which the transfer is best copied."""
        ...

    async def blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        """Copy blocks `low` to `high`, each whole and verified; report how many leading ones of them arrived."""
        ...

    async def put(self, transfer: Transfer) -> Report:
        """Write all blocks to a durable store; report how many leading ones are safe there."""
        ...

    async def discard(self, discard: Discard) -> None:
        """Remove records from a durable store. Raises StoreError."""
        ...


class LayerCopier(Protocol):
    """What the mover has done of a transfer whose layers arrive one after the other, for all its blocks."""

    @property
    def layers(self) -> int:
        """How many layers the blocks have."""
        ...

    async def verify(self, transfer: Transfer) -> Report:
        """Check the blocks where they lie; report how many leading ones are sound."""
        ...

    async def layer(self, transfer: Transfer, layer: int, count: int) -> Event:
        """Have one layer of the first `count` blocks copied, behind the layers before it; return the event of its arrival."""
        ...

    async def over(self, event: Event | None) -> None:
        """Wait until an event of `layer` has happened; None: all that was enqueued by now, whatever failed.

        Raises StoreError when a copy before it failed.
        """
        ...


class StoreCopier:
    """Copies between stores (one a tier position) in the lanes of `workers`. `digest` makes the durable keys."""

    def __init__(self, stores: Sequence[Store], workers: Workers, *, digest: Digest = sha256, chunk_bytes: int = 4 << 20) -> None:
        self._stores = stores
        self._workers = workers
        self._digest = digest
        self._chunk = max(1, chunk_bytes // stores[0].geometry.block_bytes)

    def by_layer(self, transfer: Transfer) -> LayerCopier | None:
        """Return None: whole blocks are copied."""
        return None

    def chunks(self, transfer: Transfer) -> Sequence[tuple[int, int]]:
        """Return ranges of a few MiB, so that several threads share one transfer."""
        return [(low, min(low + self._chunk, transfer.count)) for low in range(0, transfer.count, self._chunk)]

    async def blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        """Copy blocks into slots that are memory."""
        durable = self._stores[transfer.sources[low]].durable
        return await self._workers.run(Lane.READ if durable else Lane.COPY, self._blocks, transfer, low, high)

    async def put(self, transfer: Transfer) -> Report:
        """Write all blocks in one call, so that the store makes few transactions of them."""
        return await self._workers.run(Lane.WRITE, self._put, transfer)

    async def put_views(self, transfer: Transfer, low: int, high: int, parent: bytes, views: Sequence[Planes]) -> Report:
        """Write blocks `low` to `high`, whose bytes are in `views`; `parent` is the durable key of the block before them."""
        return await self._workers.run(Lane.WRITE, self._put_views, transfer, low, high, parent, views)

    async def discard(self, discard: Discard) -> None:
        """Remove records."""
        await self._workers.run(Lane.WRITE, self._stores[discard.position].discard, discard.slots)

    # --- on worker threads ------------------------------------------------------------------------------------------------

    def _blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        target = self._stores[transfer.to]
        targets: list[Planes] = []
        for slot in transfer.slots_to[low:high]:
            into = target.view(slot)
            assert into is not None
            targets.append(into)
        return self.fetch(transfer, low, targets)

    def fetch(self, transfer: Transfer, low: int, targets: Sequence[Planes]) -> Report:
        """Copy the blocks from `low` on into `targets`, each verified, and report how many arrived; in the calling thread.

        A block that can't be read is given up where its store reads others: who was promised it computes it anew, and can store
        it anew. Where the store reads nothing, all of it would be given up for what may pass.
        """
        known = _known(transfer, low, low + len(targets))
        for arrived, into in enumerate(targets):
            try:
                self._fetch(transfer, low + arrived, known[arrived], into)
            except Untrusted as error:
                return Report(arrived=arrived, error=error, rotten=True)
            except StoreError as error:
                alone = arrived > 0 or self._reads_another(transfer, low, into)
                return Report(arrived=arrived, error=error, rotten=alone, unread=not alone)
        return Report(arrived=len(targets))

    def _fetch(self, transfer: Transfer, block: int, known: Identity, into: Planes) -> None:
        """Read a block; once more if the read fails without saying anything about the bytes."""
        store, slot = self._stores[transfer.sources[block]], transfer.slots_from[block]
        try:
            store.fetch(slot, known, into)
        except Untrusted:
            raise
        except StoreError:
            store.fetch(slot, known, into)

    def _reads_another(self, transfer: Transfer, block: int, into: Planes) -> bool:
        """Return whether the store reads the block beside `block`, whose own destination is lost anyway; True if there is none."""
        other = block + 1 if block + 1 < transfer.count else block - 1
        if other < 0:
            return True
        try:
            [known] = _known(transfer, other, other + 1)
            self._stores[transfer.sources[other]].fetch(transfer.slots_from[other], known, into)
        except Untrusted:
            return True
        except StoreError:
            return False
        return True

    def _put(self, transfer: Transfer) -> Report:
        views: list[Planes] = []
        for block in range(transfer.count):
            view = self._stores[transfer.sources[block]].view(transfer.slots_from[block])
            assert view is not None
            views.append(view)
        return self._put_views(transfer, 0, transfer.count, transfer.parent_key, views)

    def _put_views(self, transfer: Transfer, low: int, high: int, parent: bytes, views: Sequence[Planes]) -> Report:
        symbols = transfer.symbols[low * transfer.stride : high * transfer.stride]
        keys = block_keys(transfer.namespace, parent, symbols, transfer.stride, self._digest)
        known = _identities(transfer, low, keys, parent)
        items = [Put(slot, identity, view) for slot, identity, view in zip(transfer.slots_to[low:high], known, views, strict=True)]
        outcomes = self._stores[transfer.to].put(items)
        good = next((place for place, outcome in enumerate(outcomes) if outcome.error is not None), len(outcomes))
        error = outcomes[good].error if good < len(outcomes) else None
        rotten = isinstance(error, Untrusted) and error.reason == "checksum"
        return Report(
            arrived=good, error=error, rotten=rotten, keys=keys[:good], charges=[outcome.charge for outcome in outcomes[:good]]
        )


def _known(transfer: Transfer, low: int, high: int) -> list[Identity]:
    """Return who blocks `low` to `high` are. Where they have no keys only their checksums count: memory keeps no others."""
    if transfer.keys is None:
        return _identities(transfer, low, [b""] * (high - low), b"")
    return _identities(transfer, low, transfer.keys[low:high], transfer.keys[low - 1] if low else transfer.parent_key)


def _identities(transfer: Transfer, low: int, keys: Sequence[bytes], parent: bytes) -> list[Identity]:
    """Return who the blocks from `low` on are, one for each of their durable keys; `parent` is that of the block before them."""
    stride = transfer.stride
    return [
        Identity(transfer.namespace, 0, 0, key, above, transfer.symbols[block * stride : (block + 1) * stride], checksum)
        for block, (key, above, checksum) in enumerate(
            zip(keys, [parent, *keys[:-1]], transfer.checksums[low : low + len(keys)], strict=True), low
        )
    ]
