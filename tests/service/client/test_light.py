"""A client costs little to import: no tensor library before a tensor is asked for, no CuPy before memory of a device is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = "[name for name in ('torch', 'transformers', 'lmdb', 'aiohttp', 'cupy') if name in sys.modules]"
USE = """
import asyncio, sys, tiercache
spec = tiercache.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="int8")
space = tiercache.Namespace(model="m", weights="w")
async def main():
    async with tiercache.connect("unix:///nobody/here", device="cuda:0") as client:
        kv = await client.open(space, spec)
        async with kv.match(list(range(64))) as hit:
            assert await hit.ready() == 0
        await kv.flush([1])
asyncio.run(main())
with tiercache.BlockingClient("unix:///nobody/here", device="cuda:0") as client:
    assert client.open(space, spec).flush([1]) == 0
"""


@pytest.mark.parametrize("code", ["import sys, tiercache; tiercache.connect, tiercache.BlockingClient", USE], ids=["import", "use"])
def test_no_tensor_library_is_loaded(code: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint({HEAVY})"], env=environment, capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == "[]", done.stderr
