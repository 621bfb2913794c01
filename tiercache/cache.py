"""The core of one share of the tiers: requests come in, leases and reservations go out.

Sans-I/O: nothing here waits, copies bytes, starts a thread or reads a clock. `tiercache.moves` plans what should move,
`tiercache.inflight` commits what has moved; the layers above do the copying in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from tiercache.changes import Reason
from tiercache.inflight import InFlight
from tiercache.leases import Lease, Quarantine, Refusal, Reservation, Session
from tiercache.moves import Moves
from tiercache.pace import Pace
from tiercache.policy import LRU, PolicyFactory
from tiercache.residency import Residency, Space
from tiercache.slots import Slots
from tiercache.stats import Stats
from tiercache.tree import BLOCK_IDS, Node, path
from tiercache.types import Tier


class Cache:
    """Tree, tiers and claims for blocks of one geometry.

    `tiers` is fastest first, `slots` their pools; `durable` are the tiers that outlive the process, all others can be written
    and read in place. A session may lease `lease_share` of a tier. `pace` bounds one transfer to a durable tier.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        slots: Mapping[Tier, Slots],
        *,
        durable: Sequence[Tier] = (),
        policy: PolicyFactory = LRU,
        pace: Pace | None = None,
        lease_share: float = 1.0,
    ) -> None:
        self.tiers = tuple(tiers)
        pools = [slots[tier] for tier in tiers]
        self.residency = Residency(tiers, pools, [tier in durable for tier in tiers], policy)
        self.stats = Stats(self.tiers)
        self.inflight = InFlight(self.residency, self.stats)
        self.moves = Moves(self.residency, self.inflight, pace=pace or Pace(64))
        self.residency.listeners.append(self.stats.changed)
        self.sessions: dict[Session, None] = {}
        """In the order in which they began."""
        self.pending: dict[tuple[Node, bytes], Reservation] = {}
        """Reservations with blocks still to come, by the node they follow and their first symbol."""
        self.quarantines: set[Quarantine] = set()
        self._writable = [
            [place for place in range(first, len(tiers)) if not self.residency.durable[place]] for first in range(len(tiers))
        ]
        """For each position, those from there on that can be written in place."""
        self._limits = [max(1, int(pool.capacity * lease_share)) for pool in pools]
        self._session_number = 0

    # --- sessions ---------------------------------------------------------------------------------------------------------

    def begin_session(self) -> Session:
        """Return a new session."""
        self._session_number += 1
        session = Session(self._session_number, len(self.tiers))
        self.sessions[session] = None
        return session

    def end_session(self, session: Session) -> None:
        """End a session: its reservations and leases end with it."""
        for reservation in list(session.reservations):
            self.close(reservation)
        for lease in list(session.leases):
            self.release(lease)
        self.sessions.pop(session, None)

    # --- readers ----------------------------------------------------------------------------------------------------------

    def match(self, session: Session, space: Space, key: bytes, *, count: bool = True, charged: bool = True) -> Lease:
        """Find the longest cached prefix of `key` and take a lease on it, in one step.

        Only as much is leased as the session's share of each tier allows, and to readers nothing that only a tier holds which can't
        be read now. `count=False` keeps it out of the hit rates, for
        requests that are not a reader's; `charged=False` out of the session's share, for the steps of one call. A lease of
        zero blocks is as good as another.
        """
        node, part, total = space.tree.walk(key)
        if part < len(node.blocks):
            node = self.residency.split(node, part)
        if count and self.moves.blind:
            node, total = self._readable(node)
        if charged:
            node, total = self._clip(session, node, total)
        lease = self._lease(session, space, node, key, total, charged=charged)
        if charged or count:
            found = self.tiers_of(lease)
            if charged:
                self._charge(lease, found)
            if count:
                self.stats.matched(len(key) // space.tree.stride, found)
        return lease

    def covered(self, space: Space, key: bytes) -> int:
        """Return how many leading blocks of `key` are cached. Takes no lease and changes nothing."""
        return space.tree.walk(key)[2]

    def shorten(self, lease: Lease, blocks: int) -> None:
        """Keep the first `blocks` blocks of a lease and release the rest."""
        if blocks >= lease.blocks:
            return
        end, rest = lease.node, lease.blocks - blocks
        node = end
        while rest >= len(node.blocks) and node.parent is not None and node.parent.parent is not None and rest > 0:
            rest -= len(node.blocks)
            node = node.parent
        if blocks == 0:
            node = lease.space.tree.root
        elif rest:
            node = self.residency.split(node, len(node.blocks) - rest)
        self.residency.hold(node)
        self.residency.release(end)
        lease.node, lease.blocks = node, blocks
        if lease.charged:
            self._charge(lease, self.tiers_of(lease))

    def release(self, lease: Lease) -> None:
        """End a lease. Ending it again does nothing."""
        if lease.released:
            return
        lease.released = True
        self.residency.release(lease.node)
        lease.session.leases.pop(lease, None)
        if lease.charged:
            for position, blocks in enumerate(lease.charge):
                lease.session.leased[position] -= blocks

    def share(self, lease: Lease, session: Session) -> Lease:
        """Take a lease of `session` on what another session's `lease` covers; it is not charged for what that one pays."""
        assert not lease.released
        shared = self._lease(session, lease.space, lease.node, lease.key, lease.blocks, charged=False)
        shared.edition = lease.edition
        return shared

    def hand_over(self, lease: Lease, session: Session) -> None:
        """Make `session` the owner of a lease, and charge it in the former one's place."""
        assert not lease.released
        for owner, sign in ((lease.session, -1), (session, 1)):
            for position, blocks in enumerate(lease.charge):
                owner.leased[position] += sign * blocks
        lease.session.leases.pop(lease, None)
        session.leases[lease] = None
        lease.session = session

    def tiers_of(self, lease: Lease) -> dict[int, int]:
        """Return how many of the lease's blocks have their fastest copy at each tier position."""
        found: dict[int, int] = {}
        copies = tag = blocks = 0  # of the run of nodes that are in the same tiers: mostly the whole path
        node, parent = lease.node, lease.node.parent
        while parent is not None:
            if node.copies != copies:
                if copies:
                    found[tag] = found.get(tag, 0) + blocks
                copies, blocks = node.copies, 0
                tag = (copies & -copies).bit_length() - 1
            blocks += len(node.blocks)
            node, parent = parent, parent.parent
        if copies:
            found[tag] = found.get(tag, 0) + blocks
        return found

    def allowance(self, session: Session, position: int) -> int:
        """Return how many more blocks of the tier the session may lease.

        Its leases count a block once each, but where it is the only one that leases from the tier, a block counts once: many
        requests with one long prefix do not use the share up.
        """
        counted = self.residency.held[position] if self._is_alone(session, position) else session.leased[position]
        return max(0, self._limits[position] - counted)

    def charge(self, lease: Lease) -> None:
        """Charge the lease for the tiers that its blocks are in now, after a promotion."""
        if lease.charged and not lease.released:
            self._charge(lease, self.tiers_of(lease))

    # --- writers ----------------------------------------------------------------------------------------------------------

    def reserve(self, session: Session, space: Space, key: bytes, *, after: Lease | None, position: int) -> Reservation:
        """Take slots for the blocks of `key` that are not cached, after what is.

        `after` is a lease on a prefix of the key (None: on nothing). The first slots are in the tier at `position`, or the
        fastest tier that holds the block before them, when that is slower; where a tier has too few free slots the rest goes
        further down. The answer comes at once with what there was: `reservation.blocks` may be fewer than asked for, and
        none while another session writes the same blocks (`pending`); `reservation.refusal` says why.
        """
        stride = space.tree.stride
        at = after.blocks * stride if after is not None else 0
        if after is None or (after.node.alive and not after.stale):
            node, part, more = space.tree.walk(key, after=after.node if after is not None else None, at=at)
            if part < len(node.blocks):
                node = self.residency.split(node, part)
            at += more * stride
        else:  # it left the tree, and what followed it is gone: the lease keeps its own path and no more
            node, at = after.node, min(at, len(key) - len(key) % stride)
        lease = self._lease(session, space, node, key, at // stride, charged=False)
        if after is not None:
            lease.edition = after.edition
        rest = key[at : len(key) - len(key) % stride]
        reservation = Reservation(lease, rest, _NO_BLOCKS, [], at // stride)
        session.reservations[reservation] = None
        if not rest:
            return reservation
        if not node.alive or lease.stale:
            reservation.refusal = Refusal.DROPPED
            return reservation
        other = self.pending.get((node, rest[:stride]))
        if other is not None:
            reservation.other, reservation.refusal = other, Refusal.PENDING
            reservation.pending = _common_blocks(other.key[other.committed * stride :], rest, stride)
            reservation.key = b""
            return reservation
        self._take_places(reservation, len(rest) // stride, max(position, node.tag or 0))
        if reservation.runs:
            self.pending[node, rest[:stride]] = reservation
        return reservation

    def commit(self, reservation: Reservation, upto: int, checksums: Sequence[int]) -> int:
        """Hang the reserved blocks before block `upto` into the tree; `checksums` are those of the blocks not yet committed.

        From then on the bytes belong to the cache. Returns how many blocks of the reservation are committed in all: fewer
        than `upto` when what they follow has left the tree (a delete or clear came between).
        """
        assert not reservation.closed and reservation.committed <= upto <= len(reservation.blocks)
        assert len(checksums) == upto - reservation.committed
        if reservation.lease.stale:
            return reservation.committed  # also where it follows the root, which no clear takes away
        stride = reservation.lease.space.tree.stride
        first = reservation.committed
        self._withdraw(reservation)
        start = 0  # the reservation's blocks of a run are those from here to `end`
        for position, taken in reservation.runs:
            low, start = max(first, start), start + len(taken)
            high = min(upto, start)
            parent = reservation.lease.node
            if low >= high or not parent.alive:
                continue
            blocks = reservation.blocks[low:high]
            key = reservation.key[low * stride : high * stride]
            slots = taken[len(taken) - start + low : len(taken) - start + high]
            sums = checksums[low - first : high - first]
            reservation.lease.node = self.residency.plant(parent, key, blocks, position, slots, sums, Reason.INSERT)
            reservation.lease.blocks += len(blocks)
            reservation.committed = high
        if reservation.committed < len(reservation.blocks) and reservation.lease.node.alive:
            self._announce(reservation)
        self.charge(reservation.lease)
        return reservation.committed

    def close(self, reservation: Reservation) -> None:
        """Give back what was reserved and not committed, and end the reservation's lease. Closing it again does nothing."""
        if not reservation.closed:
            for position, slots in _by_tier(self._end(reservation)):
                self.residency.slots[position].give(slots)

    def quarantine(self, reservation: Reservation) -> Quarantine:
        """End a reservation as `close` does, but keep its slots from use until `restore`: a process may still write them.

        Waiting writers of the same blocks go on at once, in other slots.
        """
        assert not reservation.closed
        kept = Quarantine(tuple(self._end(reservation)))
        for position, slots in _by_tier(kept.places):
            self.residency.slots[position].quarantine(slots)
        self.quarantines.add(kept)
        return kept

    def restore(self, quarantine: Quarantine) -> None:
        """Free the slots of a quarantine: who might have written them is gone. Doing it again does nothing."""
        if quarantine in self.quarantines:
            self.quarantines.remove(quarantine)
            for position, slots in _by_tier(quarantine.places):
                self.residency.slots[position].restore(slots)

    def _end(self, reservation: Reservation) -> list[tuple[int, int]]:
        """End a reservation and its lease, and return the slots that it leaves."""
        reservation.closed = True
        if reservation.committed < len(reservation.blocks):  # nobody else waits for blocks, or holds any
            self._withdraw(reservation)
            self.residency.table.free(reservation.blocks[reservation.committed :])
        reservation.lease.session.reservations.pop(reservation, None)
        self.release(reservation.lease)
        for call in reservation.on_close:
            call()
        return reservation.places[reservation.committed :] if reservation.committed < len(reservation.blocks) else []

    # --- taking away --------------------------------------------------------------------------------------------------------

    def delete(self, space: Space, key: bytes) -> int:
        """Remove the prompt `key`, what continues it, and those of its blocks that no other prompt shares.

        A later match finds at most the shared part, at once. A prompt that is a beginning of this one counts as part of it.
        Returns how many blocks of the prompt were removed.
        """
        node, part, total = space.tree.walk(key)
        whole = total == len(key) // space.tree.stride
        if total == 0 or (not whole and (part < len(node.blocks) or node.children)):
            return 0  # where the prompt leaves the tree, others go on: all that is here is theirs, too
        if part < len(node.blocks):
            node = self.residency.split(node, part)
        removed = len(node.blocks)
        while node.parent is not None and node.parent.parent is not None and len(node.parent.children or ()) == 1:
            node = node.parent
            removed += len(node.blocks)
        self.residency.remove(node, Reason.DELETE)
        return removed

    def blocks_of(self, space: Space) -> int:
        """Return how many blocks of a namespace are cached. Costs a walk over all of its nodes."""
        return sum(self._count(child) for child in (space.tree.root.children or {}).values())

    def clear(self, space: Space) -> int:
        """Remove all blocks of a namespace and return how many there were.

        Readers keep what they lease. Nothing that was begun before is stored any more: its bytes may be what is to be forgotten.
        """
        space.edition += 1
        self.pending = {place: other for place, other in self.pending.items() if other.lease.space is not space}
        removed = self.blocks_of(space)
        self.residency.remove_all(list((space.tree.root.children or {}).values()), Reason.DELETE)
        return removed

    def distrust(self, lease: Lease, block: int) -> None:
        """Remove block number `block` of a lease, and what follows it, because its bytes failed a check.

        Does nothing once the lease has ended: then the slots may have been another block's when they were looked at.
        """
        if lease.released:
            return
        nodes = path(lease.node)
        for node in nodes:
            if block < len(node.blocks):
                if block:
                    self.residency.split(node, block)  # the old object is the tail
                self.residency.distrust(node)
                return
            block -= len(node.blocks)

    def lose_block(self, node: Node, block: int) -> None:
        """Remove block id `block`, which `node` names, and what follows it: the store does not have it."""
        at = node.blocks.index(block)
        if at:
            self.residency.split(node, at)  # the old object is the tail
        self.residency.remove(node, Reason.UNTRUSTED)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _lease(self, session: Session, space: Space, node: Node, key: bytes, blocks: int, *, charged: bool) -> Lease:
        """Return a new lease on the path to `node`, for which nothing is charged yet."""
        self.residency.hold(node)
        lease = Lease(session, space, node, key, blocks, [0] * len(self.tiers), charged, edition=space.edition)
        session.leases[lease] = None
        return lease

    def _charge(self, lease: Lease, found: Mapping[int, int]) -> None:
        """Charge the lease for `found[position]` blocks of each tier, in place of what it was charged for."""
        leased, charge = lease.session.leased, lease.charge
        for position, before in enumerate(charge):
            blocks = found.get(position, 0)
            leased[position] += blocks - before
            charge[position] = blocks

    def _clip(self, session: Session, node: Node, total: int) -> tuple[Node, int]:
        """Return the part of the path to `node` that the session may still lease, and its length in blocks."""
        for limit, held, leased in zip(self._limits, self.residency.held, session.leased, strict=True):
            if total + (held if held > leased else leased) > limit:
                break
        else:  # whichever of the two counts
            return node, total
        room = [self.allowance(session, position) for position in range(len(self.tiers))]
        if total <= min(room):
            return node, total
        kept = 0
        last = node.space.tree.root
        for step in path(node):
            tag = step.tag
            assert tag is not None
            if step.holds and self._is_alone(session, tag):  # its own: nothing more is taken
                kept += len(step.blocks)
                last = step
                continue
            fits = min(len(step.blocks), room[tag])
            if fits < len(step.blocks):
                self.stats.clipped(total - kept - fits)
                return (self.residency.split(step, fits), kept + fits) if fits else (last, kept)
            room[tag] -= fits
            kept += fits
            last = step
        return node, total

    def _readable(self, node: Node) -> tuple[Node, int]:
        """Return the part of the path to `node` that tiers hold which can be read, and its length in blocks."""
        last, kept = node.space.tree.root, 0
        for step in path(node):
            if step.tag in self.moves.blind:
                break
            last, kept = step, kept + len(step.blocks)
        return last, kept

    def _is_alone(self, session: Session, position: int) -> bool:
        return not any(other.leased[position] for other in self.sessions if other is not session)

    def _take_places(self, reservation: Reservation, count: int, position: int) -> None:
        residency = self.residency
        policy = reservation.lease.space.policy
        asked = self._writable[position]
        wanted, lack = True, count
        for place in asked:
            if not lack:
                break
            if not policy.admit(place, lack):
                wanted = False
            elif slots := residency.slots[place].take(lack):
                reservation.runs.append((place, slots))
                lack -= len(slots)
        if lack:
            reservation.refusal = self._shortage(reservation.lease, count, asked) if wanted else Refusal.NOT_ADMITTED
            reservation.key = reservation.key[: (count - lack) * reservation.lease.space.tree.stride]
        reservation.blocks = residency.table.allocate(count - lack)

    def _shortage(self, lease: Lease, count: int, asked: Sequence[int]) -> Refusal:
        """Return why the tiers at the positions `asked` have no slots for `count` blocks after those of `lease`."""
        pools = self.residency.slots
        memory = [place for place in range(len(self.tiers)) if not self.residency.durable[place]]
        # What they follow can't go down for them: a child is never in a faster tier than its parent.
        if count > sum(pools[place].capacity for place in asked) or lease.blocks + count > sum(
            pools[place].capacity for place in memory
        ):
            return Refusal.TOO_LARGE
        own = self.tiers_of(lease)
        if any(self.residency.held[place] > own.get(place, 0) for place in memory):
            return Refusal.LEASED
        return Refusal.NO_ROOM

    def _announce(self, reservation: Reservation) -> None:
        stride = reservation.lease.space.tree.stride
        at = reservation.committed * stride
        self.pending[reservation.lease.node, reservation.key[at : at + stride]] = reservation

    def _withdraw(self, reservation: Reservation) -> None:
        stride = reservation.lease.space.tree.stride
        at = reservation.committed * stride
        place = (reservation.lease.node, reservation.key[at : at + stride])
        if self.pending.get(place) is reservation:
            del self.pending[place]

    @staticmethod
    def _count(top: Node) -> int:
        count = 0
        stack = [top]
        while stack:
            node = stack.pop()
            count += len(node.blocks)
            stack.extend((node.children or {}).values())
        return count


_NO_BLOCKS = array(BLOCK_IDS)
"""Of a reservation without any; nobody adds to it."""


def _by_tier(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield each run of places in one tier, as its position and its slots."""
    for position, run in groupby(places, key=itemgetter(0)):
        yield position, [slot for _, slot in run]


def _common_blocks(left: bytes, right: bytes, stride: int) -> int:
    count = 0
    while left[count * stride : (count + 1) * stride] == right[count * stride : (count + 1) * stride] != b"":
        count += 1
    return count
