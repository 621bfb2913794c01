"""The frames of a session: msgpack, one a WebSocket message. These types belong to neither end.

A client sends requests, each with an `id` that it chooses; the daemon sends exactly one reply to each, with that id, an error
reply where it must. What the daemon sends unasked, a notice, has no id. The first request is `Hello`; its reply announces
the limits. A frame is an array whose first item is the type's name, so an unknown type is known as such. Nothing here carries
KV: only where it lies.

Packed fields are little-endian: token ids 32-bit, places `PLACE_BYTES` each (`pack_places`), checksums 64-bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

VERSION = 2
"""Raised with every field or frame that an earlier daemon refuses."""
Numbers = Sequence[int] | NDArray[np.integer]
SESSION_PATH = "/v1/session"
"""Where the WebSocket of a session is opened on the daemon's socket."""
DEVICE_LAYOUT = "device"
UNKNOWN_BASE = "UnknownBase"
"""The kind of a `Failed` whose request named a prompt that the daemon does not keep; the only one that is no class of errors."""


class _Request(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    # Not `kw_only`: such fields come last in the array, where a field that is added would move them.
    id: int


class Hello(_Request, frozen=True, tag="hello"):
    """Opens a session. `join` is the token of another process's session, whose leases and reservations this one may use."""

    version: int
    join: bytes | None = None


class Open(_Request, frozen=True, tag="open"):
    """Opens a namespace; the reply, `Opened`, names it by number in this session.

    The dictionaries hold the fields of `Namespace` and of `KVSpec`.
    """

    namespace: dict[str, Any]
    spec: dict[str, Any]
    shard: int = 0


class Prompt(msgspec.Struct, array_like=True, frozen=True):
    """Token ids, packed: the first `keep` bytes of what the prompt numbered `base` said, then `tail`.

    `number` is how this prompt may be a base later; the client chooses it, and a number may be used again. The daemon forgets
    old prompts: then the reply is `unknown base`, and the client sends all of it.
    """

    number: int
    base: int | None
    keep: int
    tail: bytes


class Match(_Request, frozen=True, tag="match"):
    """Takes a lease on the longest cached prefix and begins its promotion; the reply is `Leased`.

    The same `request` with the same prompt, while its lease is held, gives that lease again, counted once; each such reply wants
    a Release of its own. `in_place` says at once what InPlace says.
    """

    kv: int
    prompt: Prompt
    request: str | None = None
    in_place: bool = False


class Ready(_Request, frozen=True, tag="ready"):
    """Waits until what can be in memory is there, at most `within` seconds; the reply, `Places`, says where.

    0 asks for what is readable now, None waits without a limit of its own. What is not readable by then is brought up all the
    same. A client that does not want to wait for it says Take.
    """

    lease: int
    within: float | None = None


class InPlace(_Request, frozen=True, tag="in-place"):
    """Says that the lease's slots are read in place: should the session end before the lease, they are not used again before this
    process is gone, or its connection for descriptors.
    """

    lease: int


class Take(_Request, frozen=True, tag="take"):
    """Keeps the first `blocks` blocks of a lease; the reply counts what it covers then."""

    lease: int
    blocks: int


class Release(_Request, frozen=True, tag="release"):
    """Ends a lease, or one use of it where several matches share it under one `request`."""

    lease: int


class Renew(_Request, frozen=True, tag="renew"):
    """Says that this client lives: all its leases and reservations stand for another `lease_ms` from now on."""


class Distrust(_Request, frozen=True, tag="distrust"):
    """Says that block number `block` of a lease failed its check; the daemon looks for itself."""

    lease: int
    block: int


class Reserve(_Request, frozen=True, tag="reserve"):
    """Takes slots for the blocks that are not cached; the reply is `Reserved`. `after` is a lease on a prefix of the prompt.

    `wait` lets it wait, a bounded time, for another writer of the same blocks.
    """

    kv: int
    prompt: Prompt
    after: int | None = None
    tier: str | None = None
    wait: bool = False


class Commit(_Request, frozen=True, tag="commit"):
    """Hands the reserved blocks before block `upto` to the cache, counted from the first reserved one.

    `checksums` are packed, of those that were not committed before. The reply is the `Count` of the reservation's blocks that
    are committed in all.
    """

    reservation: int
    upto: int
    checksums: bytes


class Close(_Request, frozen=True, tag="close"):
    """Gives back what was reserved and not committed: this session touches its slots no more."""

    reservation: int


class Use(_Request, frozen=True, tag="use"):
    """Takes part in an open reservation of the session that this one joined; the reply is its `Reserved`.

    Until this session says Close, or its process is gone, no slot of it goes back that was not committed. (A lease of the joined
    session needs no such word: Ready and InPlace take a lease of this session's own under the same number.)
    """

    reservation: int


class Covered(_Request, frozen=True, tag="covered"):
    """Asks how many leading tokens are cached."""

    kv: int
    prompt: Prompt


class Flush(_Request, frozen=True, tag="flush"):
    """Makes the cached prefix durable."""

    kv: int
    prompt: Prompt


class Prefetch(_Request, frozen=True, tag="prefetch"):
    """Brings the cached prefix up."""

    kv: int
    prompt: Prompt


class Pin(_Request, frozen=True, tag="pin"):
    """Keeps the cached prefix for `ttl` seconds."""

    kv: int
    prompt: Prompt
    ttl: float


class Delete(_Request, frozen=True, tag="delete"):
    """Removes a prompt; the reply counts its blocks that went."""

    kv: int
    prompt: Prompt


class Clear(_Request, frozen=True, tag="clear"):
    """Removes everything of a namespace; the reply counts the blocks that went."""

    kv: int


class Invalidate(_Request, frozen=True, tag="invalidate"):
    """Removes everything of all namespaces, opened in this session or not, whose named fields have exactly these values.

    `fields` names at least one of model, weights, adapter and salt; nil is a value of the last two. The reply is `Invalidated`.
    """

    fields: dict[str, Any]


class Check(_Request, frozen=True, tag="check"):
    """Audits the daemon's books."""


class _Reply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    id: int


class Welcome(_Reply, frozen=True, tag="welcome"):
    """`boot` names this run of the daemon; `token` lets other processes join, and fetches descriptors at `descriptors`.

    The limits: `tokens`, the longest prompt; `frame`, bytes of the longest frame; `requests`, how many wait for their reply;
    `leases` (pins too) and `reservations`; `prompts` and `prompt_bytes`, how many prompts, and how much of them in all, are kept as
    bases; `lease_ms`, milliseconds for which leases that are copied from, and reservations, stand without a Renew.
    """

    version: int
    boot: bytes
    session: int
    token: bytes
    descriptors: str
    limits: dict[str, int]


class ArenaAt(msgspec.Struct, array_like=True, frozen=True):
    """Where a tier's slots lie: memory number `memory` of the descriptors, from `offset` on.

    The layout is `block-first` or `layer-first` (`tiercache.storage.layouts`), or `device`: layer-first in memory of the device
    that has the UUID `device`, which `handle` opens; no descriptor is of that (`memory` is -1). The generations of the slots,
    32-bit, begin at byte `generations` of the descriptor called so.
    """

    tier: str
    layout: str
    memory: int
    offset: int
    length: int
    slots: int
    generations: int
    handle: bytes | None = None
    device: bytes | None = None


class Opened(_Reply, frozen=True, tag="opened"):
    """The namespace's number, and the tiers that can be mapped, by position; `tiers` names all of them."""

    kv: int
    tiers: list[str]
    arenas: list[ArenaAt]


class Leased(_Reply, frozen=True, tag="leased"):
    """What was found: blocks by tier. With `places` all of it is readable already; `lifting` says that `Arrived` follows."""

    lease: int
    blocks: int
    tiers: dict[str, int]
    lifting: bool
    places: bytes | None


class Places(_Reply, frozen=True, tag="places"):
    """Where the leading readable blocks lie."""

    places: bytes


class Reserved(_Reply, frozen=True, tag="reserved"):
    """Slots for the new blocks, after `present` blocks that are cached; `pending` of them are another writer's now.

    There are fewer places than blocks where there is no room; `refusal` says why, in a word of `tiercache.leases.Refusal`. The
    checksums are 0.
    """

    reservation: int
    present: int
    pending: int
    places: bytes
    refusal: str | None = None


class Count(_Reply, frozen=True, tag="count"):
    """A number, of what the request asks for: blocks."""

    count: int


class Done(_Reply, frozen=True, tag="done"):
    """It is done."""


class ExtentOf(msgspec.Struct, array_like=True, frozen=True):
    """What went of one namespace: its fields as in `Open`, and how much it was."""

    namespace: dict[str, Any]
    spec: dict[str, Any]
    blocks: int


class Invalidated(_Reply, frozen=True, tag="invalidated"):
    """What an invalidation removed; namespaces that held nothing are left out."""

    extents: list[ExtentOf]


class Audited(_Reply, frozen=True, tag="audited"):
    """What an audit looked at, or the faults it found."""

    counts: dict[str, int]
    faults: list[str]


class Failed(_Reply, frozen=True, tag="failed"):
    """An error: `kind` is the name of the class in `tiercache.errors`. `id` is 0 where the request could not be read."""

    kind: str
    message: str


class Arrived(msgspec.Struct, array_like=True, frozen=True, tag="arrived"):
    """Notice: layer `layer` of all of a lease's blocks can be read at their places.

    It comes once for every layer of a lease whose `Leased` said `lifting`, also when the promotion has ended early. Places that
    were asked for `within` a time, and are fewer than the lease's blocks, need none: they can be read in every layer.
    """

    lease: int
    layer: int


class Lost(msgspec.Struct, array_like=True, frozen=True, tag="lost"):
    """Notice: a lease, or a reservation, has ended without its holder's doing; `lease` is its number.

    What is read in place is never lost. The slots of a reservation are kept from use until it is closed or the process is gone.
    """

    lease: int
    reason: str


class Draining(msgspec.Struct, array_like=True, frozen=True, tag="draining"):
    """Notice: the daemon is about to stop."""

    seconds: float


Request = (
    Hello
    | Open
    | Match
    | Ready
    | InPlace
    | Take
    | Release
    | Renew
    | Distrust
    | Reserve
    | Commit
    | Close
    | Use
    | Covered
    | Flush
    | Prefetch
    | Pin
    | Delete
    | Clear
    | Invalidate
    | Check
)
Reply = Welcome | Opened | Leased | Places | Reserved | Count | Done | Invalidated | Audited | Failed
Notice = Arrived | Lost | Draining


class Place(NamedTuple):
    """Where a block lies: tier position, slot, the slot's generation, and the checksum of what must be there."""

    position: int
    slot: int
    generation: int
    checksum: int


_PLACE_WORDS = 6
_PLACE = np.dtype([("position", "<u4"), ("slot", "<u4"), ("generation", "<u4"), ("spare", "<u4"), ("checksum", "<u8")])
_ONE_PLACE = struct.Struct("<IIIIQ")
PLACE_BYTES = _PLACE.itemsize


def pack_places(positions: Numbers | int, slots: Numbers, generations: Numbers, checksums: Numbers) -> bytes:
    """Return the places of blocks, `PLACE_BYTES` each; one position may stand for all."""
    table = np.zeros(len(slots), _PLACE)
    table["position"], table["slot"] = positions, slots
    table["generation"], table["checksum"] = generations, checksums
    return table.tobytes()


def place_table(data: bytes) -> NDArray[np.void]:
    """Return the places that `data` packs, in place, as an array with the fields of `Place`.

    Raises ValueError as `unpack_places` does.
    """
    if len(data) % PLACE_BYTES:
        raise ValueError(f"{len(data)} bytes are no number of places of {PLACE_BYTES} bytes")
    return np.frombuffer(data, _PLACE)


def place_columns(data: bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the tier positions and the slots that `data` packs, in place. Raises ValueError as `unpack_places` does."""
    if len(data) % PLACE_BYTES:
        raise ValueError(f"{len(data)} bytes are no number of places of {PLACE_BYTES} bytes")
    words = np.frombuffer(data, "<u4")
    return words[::_PLACE_WORDS], words[1::_PLACE_WORDS]


def unpack_place(data: bytes, number: int) -> Place:
    """Return place number `number` of those that `data` packs."""
    position, slot, generation, _, checksum = _ONE_PLACE.unpack_from(data, number * PLACE_BYTES)
    return Place(position, slot, generation, checksum)


def unpack_places(data: bytes) -> list[Place]:
    """Return the places that `data` packs. Raises ValueError for a length that is no number of places."""
    table = place_table(data)
    columns = (table[name].tolist() for name in ("position", "slot", "generation", "checksum"))
    return [Place(*row) for row in zip(*columns, strict=True)]


_MAPS = (Open, Invalidate)


class _Requests:
    """Decodes requests. Raises msgspec.MsgspecError, UnicodeDecodeError or RecursionError for what is none."""

    def __init__(self) -> None:
        self._decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        self._parts = msgspec.msgpack.Decoder(list[msgspec.Raw])

    def decode(self, data: bytes) -> Request:
        """Return the request that `data` says."""
        frame = self._decoder.decode(data)
        # msgspec takes the last of two values of one key: what is opened or removed would be one of two that the frame names.
        if not isinstance(frame, _MAPS):
            return frame
        maps: tuple[dict[str, Any], ...] = (frame.namespace, frame.spec) if isinstance(frame, Open) else (frame.fields,)
        said = self._parts.decode(data)[2:]
        if any(_pairs(one) > len(found) for one, found in zip(said, maps, strict=False)):
            raise msgspec.ValidationError("a key comes twice")
        return frame


def _pairs(packed: msgspec.Raw) -> int:
    """Return how many pairs a map says that it has."""
    head = bytes(packed)[:5]
    if head[0] & 0xF0 == 0x80:
        return head[0] & 0x0F
    return int.from_bytes(head[1:3] if head[0] == 0xDE else head[1:5], "big")


encoder = msgspec.msgpack.Encoder()
requests = _Requests()
answers: msgspec.msgpack.Decoder[Reply | Notice] = msgspec.msgpack.Decoder(Reply | Notice)
