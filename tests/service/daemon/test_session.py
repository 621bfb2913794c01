"""Sessions over a real socket: what is asked, what is answered, and what is where the answer says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.seams import Rig
from tests.service.caches import SPEC, lower, prompt, small
from tests.service.client.fake import until
from tests.service.daemon.raw import are_exact, daemon_of, fetched, fill, session_at, stored, whole
from tiercache.service import wire
from tiercache.types import Tier


async def test_what_one_session_stored_another_one_reads_in_place(folder: Path) -> None:
    tokens = prompt(1, 6)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as writer, session_at(daemon.path) as reader:
        opened, there = await writer.open(), await reader.open()
        mine, theirs = await fetched(writer), await fetched(reader)

        assert await stored(writer, opened, mine, tokens) == 6
        hit = await reader.call(wire.Leased, wire.Match, kv=there.kv, prompt=whole([*tokens, 1, 2, 3]))

        assert (hit.blocks, hit.tiers, hit.lifting) == (6, {"HBM": 6}, False)
        assert hit.places is not None and are_exact(there, theirs, hit.places, tokens) == 6
        await reader.call(wire.Done, wire.InPlace, lease=hit.lease)
        await reader.call(wire.Done, wire.Release, lease=hit.lease)


async def test_blocks_from_ssd_are_readable_when_ready_says_so(folder: Path) -> None:
    tokens = prompt(1, 6)
    async with daemon_of(folder, small(directory=folder / "kv")) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)
        assert (await raw.call(wire.Count, wire.Flush, kv=opened.kv, prompt=whole(tokens))).count == 6
        for tier in (Tier.HBM, Tier.DRAM):
            await lower(daemon.cache, tier)

        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
        ready = await raw.call(wire.Places, wire.Ready, lease=hit.lease)

        assert (hit.tiers, hit.places, hit.lifting) == ({"SSD": 6}, None, True)
        assert are_exact(opened, handed, ready.places, tokens) == 6
        assert [await raw.notice() for _ in range(SPEC.layers)] == [wire.Arrived(hit.lease, at) for at in range(SPEC.layers)]


async def test_what_can_be_read_in_memory_is_not_announced(folder: Path) -> None:
    """Blocks in DRAM are readable at once: no reader waits for their way to HBM, which is held, and there are no notices."""
    tokens, rig = prompt(1, 4), Rig()
    async with daemon_of(folder, small(), rig) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens, tier="DRAM")
        gate = rig.copies.hold("blocks", to=0)

        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
        await raw.call(wire.Places, wire.Ready, lease=hit.lease)
        await gate.reached()

        assert not hit.lifting and hit.places is not None and are_exact(opened, handed, hit.places, tokens) == 4
        gate.release()
        await daemon.cache.settle()
        await raw.call(wire.Audited, wire.Check)
        assert not raw.notices and are_exact(opened, handed, hit.places, tokens) == 4


async def test_a_growing_chat_sends_what_is_new(folder: Path) -> None:
    tokens = prompt(1, 6)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)
        keep = 4 * SPEC.block_size * 4

        first = wire.Prompt(7, None, 0, whole(tokens).tail[:keep])
        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=first)).count == 4
        grown = wire.Prompt(8, 7, keep, whole(tokens).tail[keep:])
        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=grown)).count == 6
        cut = wire.Prompt(8, 8, keep // 2, b"")
        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=cut)).count == 2
        assert await raw.refused(wire.Covered, kv=opened.kv, prompt=wire.Prompt(9, 99, 4, b"")) == wire.UNKNOWN_BASE


async def test_old_prompts_are_forgotten(folder: Path) -> None:
    """As many are kept as the limits say; a base that is gone has a name of its own."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        kept = raw.welcome.limits["prompts"]
        for number in range(kept + 1):
            await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(prompt(number, 1), number=number))

        assert await raw.refused(wire.Covered, kv=opened.kv, prompt=wire.Prompt(99, 0, 4, b"")) == wire.UNKNOWN_BASE
        await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=wire.Prompt(99, 1, 4, b""))


async def test_a_request_name_shares_its_lease_and_is_counted_once(folder: Path) -> None:
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)

        one = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens), request="r")
        two = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens), request="r")

        assert one.lease == two.lease
        assert daemon.cache.stacks[0].cache.stats.matches == 1
        await raw.call(wire.Done, wire.Release, lease=one.lease)
        await raw.call(wire.Places, wire.Ready, lease=one.lease)
        await raw.call(wire.Done, wire.Release, lease=one.lease)
        assert await raw.refused(wire.Ready, lease=one.lease) == "UnknownHandle"


async def test_a_shorter_lease_lets_the_rest_go(folder: Path) -> None:
    tokens = prompt(1, 6)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))

        assert (await raw.call(wire.Count, wire.Take, lease=hit.lease, blocks=2)).count == 2
        ready = await raw.call(wire.Places, wire.Ready, lease=hit.lease)

        assert are_exact(opened, handed, ready.places, tokens) == 2


async def test_reserving_continues_a_hit_and_commits_block_by_block(folder: Path) -> None:
    tokens = prompt(1, 6)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens[: 2 * SPEC.block_size])
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))

        room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens), after=hit.lease)
        sums = np.array(fill(opened, handed, room, tokens), "<u8")

        assert (room.present, room.pending, len(sums)) == (2, 0, 4)
        for upto in (1, 3, 4):
            done = await raw.call(
                wire.Count,
                wire.Commit,
                reservation=room.reservation,
                upto=upto,
                checksums=sums[{1: 0, 3: 1, 4: 3}[upto] : upto].tobytes(),
            )
            assert done.count == upto
            assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(tokens))).count == 2 + upto
        await raw.call(wire.Done, wire.Close, reservation=room.reservation)


async def test_a_second_writer_is_told_and_may_wait(folder: Path) -> None:
    """`pending` without waiting; with it the reply comes when the first has committed, and says that all is there."""
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as one, session_at(daemon.path) as two:
        opened, there = await one.open(), await two.open()
        handed = await fetched(one)
        room = await one.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens))

        told = await two.call(wire.Reserved, wire.Reserve, kv=there.kv, prompt=whole(tokens))
        waiting = await two.send(wire.Reserve, kv=there.kv, prompt=whole(tokens), wait=True)
        sums = np.array(fill(opened, handed, room, tokens), "<u8")
        await one.call(wire.Count, wire.Commit, reservation=room.reservation, upto=4, checksums=sums.tobytes())
        await one.call(wire.Done, wire.Close, reservation=room.reservation)
        answer = await two.reply(waiting)

        assert (told.present, told.pending, told.places) == (0, 4, b"")
        assert isinstance(answer, wire.Reserved) and (answer.present, answer.pending) == (4, 0)


async def test_a_distrusted_block_is_looked_at_first(folder: Path) -> None:
    """A sound block stays whatever a client says of it; a rotten one goes, with what follows it."""
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))

        await raw.call(wire.Done, wire.Distrust, lease=hit.lease, block=2)
        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(tokens))).count == 4
        assert hit.places is not None
        place = wire.unpack_places(hit.places)[2]
        slots_view = np.asarray(daemon.cache.stacks[0].stores[place.position].view(place.slot))
        slots_view[0, 0] ^= 1
        await raw.call(wire.Done, wire.Distrust, lease=hit.lease, block=2)

        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(tokens))).count == 2
        assert daemon.house.counts.distrusted == {True: 1, False: 1}


async def test_pins_deletes_clears_prefetches_and_audits(folder: Path) -> None:
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)
        named = {"kv": opened.kv, "prompt": whole(tokens)}

        assert (await raw.call(wire.Count, wire.Prefetch, **named)).count == 4
        assert (await raw.call(wire.Count, wire.Pin, **named, ttl=1000.0)).count == 4
        assert (await raw.call(wire.Count, wire.Pin, **named, ttl=0.0)).count == 0
        assert (await raw.call(wire.Audited, wire.Check)).counts["blocks"] == 4
        assert (await raw.call(wire.Count, wire.Delete, **named)).count == 4
        await stored(raw, opened, handed, tokens)
        assert (await raw.call(wire.Count, wire.Clear, kv=opened.kv)).count == 4


async def test_sixty_four_sessions_at_once(folder: Path) -> None:
    """Each stores and reads a prompt of its own, all at the same time; every byte is what it must be."""

    async def one(path: Path, number: int) -> int:
        tokens = prompt(number, 2)
        async with session_at(path) as raw:
            opened = await raw.open()
            handed = await fetched(raw)
            assert await stored(raw, opened, handed, tokens) == 2
            hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
            assert hit.places is not None
            return are_exact(opened, handed, hit.places, tokens)

    async with daemon_of(folder, small(hbm=160, dram=160)) as daemon:
        counts = await asyncio.gather(*(one(daemon.path, number) for number in range(64)))

    assert counts == [2] * 64


async def test_who_waits_for_a_writer_when_the_namespace_is_cleared_gets_no_slots(folder: Path) -> None:
    """The bytes that it has are of before the clear: what it asked for then is dropped, and what it asks for anew is not."""
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as first, session_at(daemon.path) as second:
        opened, there = await first.open(), await second.open()
        before = await first.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens))
        [pending] = daemon.cache.stacks[0].cache.pending.values()
        asked = asyncio.create_task(second.call(wire.Reserved, wire.Reserve, kv=there.kv, prompt=whole(tokens), wait=True))
        await until(lambda: bool(pending.on_close))
        await first.call(wire.Count, wire.Clear, kv=opened.kv)
        await first.call(wire.Done, wire.Close, reservation=before.reservation)
        waited = await asked
        anew = await second.call(wire.Reserved, wire.Reserve, kv=there.kv, prompt=whole(tokens), wait=True)

        assert (waited.places, waited.refusal) == (b"", "dropped")
        assert len(anew.places) == 4 * wire.PLACE_BYTES and anew.refusal is None


@pytest.mark.parametrize("leases", [1, 3])
async def test_a_dropped_session_ends_its_copying_leases_at_once(folder: Path, leases: int) -> None:
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as other:
        opened = await other.open()
        handed = await fetched(other)
        await stored(other, opened, handed, tokens)
        core = daemon.cache.stacks[0].cache
        async with session_at(daemon.path) as raw:
            there = await raw.open()
            for _ in range(leases):
                await raw.call(wire.Leased, wire.Match, kv=there.kv, prompt=whole(tokens))
            [session] = [one for one in daemon.house.sessions if one.token == raw.welcome.token]
        await session.done.wait()

        assert sum(len(one.leases) for one in core.sessions) == 0
