"""The frames on the socket of descriptors, one a packet: how a process gets the daemon's memory. They belong to neither end."""

from __future__ import annotations

import msgspec

from tiercache.service.wire import Failed

GENERATIONS = "generations"
"""The name of the descriptor of the generations."""
MOST_DESCRIPTORS = 64
"""How many descriptors a `Handed` brings at most."""


class Fetch(msgspec.Struct, array_like=True, frozen=True, tag="fetch"):
    """On the socket of descriptors (`SOCK_SEQPACKET`, one frame a packet): asks for those of the session that has this token.

    A process keeps the connection for as long as anything of the memory is mapped, also beyond the end of its session: the end
    of the connection says that nothing is read or written in place any more. It may ask again on the same connection, when a
    reply names memory that it has not got.
    """

    token: bytes


class Unmapped(msgspec.Struct, array_like=True, frozen=True, tag="unmapped"):
    """On the socket of descriptors, last and unanswered: no device works for this process, as it may for one that was killed."""


class Handed(msgspec.Struct, array_like=True, frozen=True, tag="handed"):
    """The answer to `Fetch`: the names of the descriptors that come with this packet by SCM_RIGHTS, in their order.

    `GENERATIONS`, and for every memory its `memory_name`, read-only and writable. A refusal is a `Failed`, with no descriptors.
    """

    names: list[str]


def memory_name(memory: int, *, writable: bool) -> str:
    """Return what the descriptor of memory number `memory` is called."""
    return f"memory {memory} writable" if writable else f"memory {memory}"


fetches: msgspec.msgpack.Decoder[Fetch | Unmapped] = msgspec.msgpack.Decoder(Fetch | Unmapped)
handed: msgspec.msgpack.Decoder[Handed | Failed] = msgspec.msgpack.Decoder(Handed | Failed)
