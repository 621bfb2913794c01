"""S1 of CASES: the disk is full. On a file system of 4 MiB, in a process with mounts of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import asyncio, sys
from pathlib import Path
from tests.service.caches import LARGE, SIZE, disk_of, opened_kv, prompt, read, small, sink, store

async def main():
    config = small(hbm=4, dram=300, ssd=2000, spec=LARGE, directory=Path(sys.argv[1]) / 'ssd', admit_ms=60_000)
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        durable = []
        for number in range(60):
            await store(kv, prompt(number, 4))
            if await kv.flush(prompt(number, 4)) == 4 * SIZE:
                durable.append(number)
        assert 3 < len(durable) < 40, durable
        for number in range(60):
            assert await read(kv, prompt(number, 4)) == 4 * SIZE, number
        await cache.check()
        for number in durable[:10]:
            await kv.delete(prompt(number, 4))
        while cache.stacks[0].cache.moves.refusing:
            await cache.stacks[0].mover.change()
        resumed = [await kv.flush(prompt(number, 4)) for number in (57, 58, 59)]
        assert resumed == [4 * SIZE] * 3, resumed
        kept = [*durable[10:], 57, 58, 59]
        await cache.check()
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        for number in kept:
            assert await read(kv, prompt(number, 4)) == 4 * SIZE, number
        await cache.check()
    print('well')

asyncio.run(main())
"""


def test_a_full_disk_is_refused_and_resumes(tmp_path: Path) -> None:
    """No signal kills the process, memory goes on, what was durable is exact, and with space again flushes succeed."""
    script = f'mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}

    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", CODE], env=environment, capture_output=True, text=True, check=False
    )

    if done.stderr.startswith(("unshare", "mount")):
        pytest.skip(f"no mounts of one's own here: {done.stderr.strip()}")
    assert done.returncode == 0 and done.stdout.strip() == "well", done.stderr
