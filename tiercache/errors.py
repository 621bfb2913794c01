"""Every exception that tiercache raises.

    TierCacheError
    ├── InvalidInput            the caller's value is wrong; nothing changed           (also a ValueError)
    │   ├── InvalidTokens       token ids that are not non-negative 32-bit integers
    │   ├── InvalidTensor       a tensor of the wrong shape, dtype or device
    │   ├── InvalidSpec         a KVSpec or Namespace field that cannot be
    │   │   ├── UnsupportedSpec     a kind of attention or a world size that this version does not store
    │   │   └── SpecMismatch        the namespace is open with another spec
    │   ├── InvalidStart        a start that is no block boundary of the prompt, a hit that is none of it
    │   ├── InvalidConfig       a configuration that cannot be: unknown key, impossible value
    │   └── InvalidFrame        a frame that is none of the session's protocol, or comes out of order
    ├── Refused                 the request is well formed, the house can't serve it
    │   ├── NoShare             no share of the tiers for blocks of this size
    │   ├── TierTooSmall        a tier can't hold one block
    │   ├── MemoryRefused       host memory that can't be had (cgroup limit, memfd, lock limit)
    │   ├── DeviceRefused       the HBM tier lies on a device that the client does not have
    │   ├── DirectoryRefused    a data directory that can't be used
    │   │   └── DirectoryLocked     a live process owns it
    │   ├── SocketRefused       a socket that can't be used: a live daemon's, or no socket at all
    │   ├── LimitReached        more sessions, requests, leases or reservations than the daemon allows
    │   ├── VersionMismatch     a peer that speaks another version of the protocol
    │   └── JoinRefused         a token that is no living session's
    ├── LeaseError              a claim that no longer holds
    │   ├── LeaseReleased       used after its end
    │   ├── LeaseLost           not renewed in time, or the slot was reused while a copying read ran
    │   ├── UnknownHandle       a number that is no lease, reservation or namespace of this session
    │   └── StaleHandle         the house that gave it is gone
    ├── StoreError              a durable store failed
    │   ├── Untrusted           a record or slot whose bytes can't be trusted; carries the reason
    │   ├── StoreFull           no room on the device or in the map
    │   └── WorkerDied          the thread that ran the call died; the call may or may not have done its work
    ├── Closed                  the cache is closed
    └── AuditFailed             check() found the books wrong

Errors carry fields, not only text. Foreign errors (OSError, lmdb.Error) are translated where they arise, with `raise … from`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

Distrust = Literal[
    "absent",  # metadata names it, and nothing is stored there
    "length",  # the value, the header or the payload has another length than it must have
    "magic",  # what is stored is no record
    "version",  # a record of another format
    "header",  # the header's own checksum
    "namespace",  # another namespace's, group's or shard's
    "key",  # another block
    "parent",  # the block in another place of a chain
    "symbol",  # other tokens under the same digest
    "checksum",  # the bytes of the block
    "codec",  # a codec that there is none of, or a frame that can't be decompressed
    "order",  # a block before it in the chain was not stored
    "archive",  # a downloaded package that is not the one expected
]
"""Why bytes can't be trusted: all words that `Untrusted` carries, and so all that counters know."""


DISTRUST: frozenset[str] = frozenset(get_args(Distrust))
FAILURES: frozenset[str] = DISTRUST - {"archive"} | {"StoreError", "StoreFull", "WorkerDied", "write-through"}
"""All reasons that the failures of a cache are counted by."""


class TierCacheError(Exception):
    """The root of the tree. `fields` holds what the message was made of."""

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class InvalidInput(TierCacheError, ValueError):
    """The caller's value is wrong; nothing changed."""


class InvalidTokens(InvalidInput):
    """Token ids that are not non-negative 32-bit integers."""


class InvalidTensor(InvalidInput):
    """A tensor of the wrong shape, dtype or device."""


class InvalidSpec(InvalidInput):
    """A field of a KVSpec or Namespace that cannot be."""


class UnsupportedSpec(InvalidSpec):
    """A kind of attention or a world size that this version does not store."""


class SpecMismatch(InvalidSpec):
    """The namespace is open with another spec."""


class InvalidStart(InvalidInput):
    """A start that is no block boundary of the prompt, or a hit that is not how it begins."""


class InvalidConfig(InvalidInput):
    """A configuration that cannot be."""


class InvalidFrame(InvalidInput):
    """A frame that is none of the session's protocol, or comes out of order."""


class Refused(TierCacheError):
    """The request is well formed, but the house can't serve it."""


class NoShare(Refused):
    """No share of the tiers for blocks of this size."""


class TierTooSmall(Refused):
    """A tier can't hold one block."""


class MemoryRefused(Refused):
    """Host memory that can't be had."""


class DeviceRefused(Refused):
    """The HBM tier lies on a device that the client does not have, or can't open the memory of."""


class DirectoryRefused(Refused):
    """A data directory that can't be used."""


class DirectoryLocked(DirectoryRefused):
    """A live process owns the data directory; `fields["pid"]` names it when known."""


class SocketRefused(Refused):
    """A socket that can't be used: a live daemon's, or what lies there is no socket."""


class LimitReached(Refused):
    """More sessions, requests, leases or reservations than the daemon allows."""


class VersionMismatch(Refused):
    """A peer that speaks another version of the protocol."""


class JoinRefused(Refused):
    """A token that is no living session's: it is wrong, or the session has ended."""


class LeaseError(TierCacheError):
    """A claim that no longer holds."""


class LeaseReleased(LeaseError):
    """A lease or a reservation was used after its end."""


class LeaseLost(LeaseError):
    """A lease or reservation was not renewed in time, or a slot was reused while a copying read ran; nothing was handed out."""


class UnknownHandle(LeaseError):
    """A number that is no lease, reservation or namespace of this session: never given out, at its end, or another session's."""


class StaleHandle(LeaseError):
    """The house that gave this handle is gone."""


class StoreError(TierCacheError):
    """A durable store failed."""


class Untrusted(StoreError):
    """Bytes that can't be trusted. `reason` is one word for the counters, one of `DISTRUST`."""

    def __init__(self, reason: Distrust, message: str, /, **fields: Any) -> None:
        super().__init__(message, reason=reason, **fields)
        self.reason = reason


class StoreFull(StoreError):
    """No room on the device or in the map."""


class WorkerDied(StoreError):
    """The thread that ran a call died; another took its place. What the call was to do may be done or not."""


class Closed(TierCacheError):
    """The cache is closed, or closing."""


class AuditFailed(TierCacheError):
    """`check()` found the books wrong; `fields["faults"]` lists every fault."""
