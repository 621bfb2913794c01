"""A disk that is really full: a file system of 4 MiB, in a process with mounts of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import asyncio, subprocess, sys
from pathlib import Path
from tests.seams import FakeClock, Rig
from tests.service.ailing import ailments
from tests.service.caches import LARGE, SIZE, opened_kv, prompt, read, small, store
from tiercache.spec import Namespace

OTHER = Namespace(model='other', weights='sha256:2')

async def codes(cache, clock):
    clock.advance(3.0)
    return {str(code) for code in await ailments(cache)}

async def main():
    clock = FakeClock()
    config = small(hbm=4, dram=300, ssd=2000, spec=LARGE, directory=Path(sys.argv[1]) / 'ssd', admit_ms=60_000)
    async with opened_kv(config, Rig(clock=clock), spec=LARGE) as (cache, kv):
        assert await codes(cache, clock) == {'disk_low'}
        durable = []
        for number in range(60):
            await store(kv, prompt(number, 4))
            if await kv.flush(prompt(number, 4)) == 4 * SIZE:
                durable.append(number)
        assert 3 < len(durable) < 40, durable
        assert await codes(cache, clock) == {'disk_low', 'disk_full'}, await cache.health()

        other = await cache.open(OTHER, LARGE)
        await store(other, prompt(1, 4), space=OTHER)
        assert await read(other, prompt(1, 4), space=OTHER) == 4 * SIZE
        assert await read(kv, prompt(1, 4)) == 4 * SIZE

        subprocess.run(['mount', '-o', 'remount,size=512m', sys.argv[1]], check=True)
        assert await codes(cache, clock) == {'disk_full'}, 'room alone does not make it well: a write does'
        while cache.stacks[0].cache.moves.refusing:
            await cache.stacks[0].mover.change()
        assert await kv.flush(prompt(59, 4)) == await other.flush(prompt(1, 4)) == 4 * SIZE
        assert await codes(cache, clock) == set(), await cache.health()
        await cache.check()
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        for number in (*durable, 59):
            assert await read(kv, prompt(number, 4)) == 4 * SIZE, number
        other = await cache.open(OTHER, LARGE)
        assert await read(other, prompt(1, 4), space=OTHER) == 4 * SIZE
    print('well')

asyncio.run(main())
"""


def test_a_full_file_system_is_told_and_heals_with_room_and_a_write(tmp_path: Path) -> None:
    """Little room is told from the start, the refusal with the first write that fails; models open, and all ends with room."""
    script = f'mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}

    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", CODE], env=environment, capture_output=True, text=True, check=False
    )

    if done.stderr.startswith(("unshare", "mount")):
        pytest.skip(f"no mounts of one's own here: {done.stderr.strip()}")
    assert done.returncode == 0 and done.stdout.strip() == "well", done.stderr
