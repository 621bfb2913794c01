"""An engine beside LMCache, run by the interpreter of LMCache's own environment: its server's client, or its manager in process.

It is told by lines of JSON what to do, and answers each with one: the seconds that it took, measured here. It needs nothing of
ours but the name of its argument: where the server is, and what a prompt's KV looks like. What is not the cache's work (keys made
of token ids, sessions closed, chunks thrown away) is not timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.lmcache_native import Bitmap  # noqa: F401  its types must be known before answers are read
from lmcache.v1.distributed import api, config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

_PATIENCE = 60.0
_PAGE = 16
"""Tokens of one block of the engine's own memory."""
_POLL = 0.0005
"""Seconds between two looks at the folder where files appear."""


class Prompt:
    """The KV that is stored, `[2, layers, tokens, width]`, and where it comes back to; all prompts have the same bytes."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.layers, self.heads, self.head_dim = shape["layers"], shape["heads"], shape["head_dim"]
        self.chunk, self.chunks = shape["chunk"], shape["chunks"]
        self.tokens = self.chunk * self.chunks
        self.width = self.heads * self.head_dim
        words = np.random.default_rng(shape["seed"]).integers(0, 30_000, self._whole(), dtype=np.uint16)
        self.kv = torch.from_numpy(words.view(np.float16))
        self.back = torch.zeros_like(self.kv)
        self.chunk_bytes = self.kv.numel() * 2 // self.chunks

    def part(self, whole: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the part of `kv` or `back` that is one chunk."""
        return whole[:, :, chunk * self.chunk : (chunk + 1) * self.chunk]

    def digest(self) -> str:
        """Return the digest of what came back, and forget it."""
        found = hashlib.sha256(self.back.view(torch.int16).numpy().tobytes()).hexdigest()
        self.back.zero_()
        return found

    def paged(self) -> dict[str, torch.Tensor]:
        """Return the same KV as a CPU engine holds it: a tensor a layer, `[2, blocks, heads, block, head_dim]`."""
        blocks = self.tokens // _PAGE
        return {
            f"layer {layer}": self.kv[:, layer].reshape(2, blocks, _PAGE, self.heads, self.head_dim).transpose(2, 3).contiguous()
            for layer in range(self.layers)
        }

    def unpage(self, paged: dict[str, torch.Tensor]) -> None:
        """Copy an engine's memory to `back`."""
        for layer, tensor in enumerate(paged.values()):
            self.back[:, layer].copy_(tensor.transpose(2, 3).reshape(2, self.tokens, self.width))

    def _whole(self) -> tuple[int, int, int, int]:
        return 2, self.layers, self.tokens, self.width


class Engine:
    """A worker beside the server. `slots`: one copy to and from the server's shared memory. `paged`: by LMCache's own transfer."""

    def __init__(self, prompt: Prompt, url: str, folder: str | None) -> None:
        self._prompt = prompt
        self._folder = Path(folder) if folder else None
        self._client = RequestClientFactory.create(url)
        self._client.noop().result(timeout=_PATIENCE)
        self._paged = prompt.paged()
        self._transfer = EngineDrivenTransferContext(os.getpid(), self._client)
        self._pages = prompt.chunk // _PAGE
        self._transfer.register(self._paged, "bench", 1, self._pages, _PATIENCE)
        self._slots = self._transfer.engine_driven_context
        self._blocks = [list(range(prompt.tokens // _PAGE))]

    def store(self, number: int, way: str) -> float:
        """Store prompt `number`; with a folder, until its files are whole."""
        key = self._key(number, "store")
        files = self._files()
        began = time.perf_counter()
        if way == "paged":
            done = self._transfer.submit_store(key.request_id, key, self._paged, self._blocks, None, self._pages)
            stored = done.result(timeout=_PATIENCE)
        else:
            prepared = self._slots.prepare_store(key, os.getpid())
            assert prepared is not None, "the server gave no shared memory"
            slots, chunks = prepared
            assert len(chunks) == self._prompt.chunks, "the server had no room"
            for slot, chunk in zip(slots, chunks, strict=True):
                slot.copy_(self._prompt.part(self._prompt.kv, chunk))
            stored = self._slots.commit_store(key, os.getpid(), slots)
        assert stored
        while self._files() < files + self._prompt.chunks and self._folder is not None:
            time.sleep(_POLL)
        took = time.perf_counter() - began
        self._end(key)
        return took

    def retrieve(self, number: int, way: str) -> float:
        """Bring prompt `number` back, from the lookup to the release of its slots."""
        key = self._key(number, "retrieve")
        began = time.perf_counter()
        self._look_up(key)
        if way == "paged":
            done = self._transfer.submit_retrieve(key.request_id, key, self._paged, self._blocks, None, self._pages)
            assert done.result(timeout=_PATIENCE)
        else:
            slots = self._slots.prepare_retrieve(key, os.getpid())
            assert slots is not None, "the server lost what it found"
            for chunk, slot in enumerate(slots):
                self._prompt.part(self._prompt.back, chunk).copy_(slot)
            assert self._slots.commit_retrieve(key, os.getpid())
        took = time.perf_counter() - began
        self._end(key)
        return took

    def readable(self, number: int, way: str) -> float:
        """Find prompt `number` and be told where its bytes lie, to be read there."""
        key = self._key(number, "in place")
        began = time.perf_counter()
        self._look_up(key)
        assert self._slots.prepare_retrieve(key, os.getpid()) is not None
        took = time.perf_counter() - began
        self._slots.commit_retrieve(key, os.getpid())
        self._end(key)
        return took

    def lookup(self, number: int, way: str) -> float:
        """Ask how much of prompt `number` is there."""
        key = self._key(number, "lookup")
        began = time.perf_counter()
        self._look_up(key)
        took = time.perf_counter() - began
        self._client.free_lookup_locks(key, 1).result(timeout=_PATIENCE)
        self._end(key)
        return took

    def digest(self, number: int, way: str) -> str:
        """Return the digest of prompt `number`, retrieved."""
        if way == "paged":
            for tensor in self._paged.values():
                tensor.zero_()
        self.retrieve(number, way)
        if way == "paged":
            self._prompt.unpage(self._paged)
        return self._prompt.digest()

    def clear(self, number: int, way: str) -> None:
        """Empty the memory tier."""
        self._client.clear(True).result(timeout=_PATIENCE)

    def _look_up(self, key: IPCCacheServerKey) -> None:
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=_PATIENCE)
        found = self._client.wait_prefetch_status(key.request_id, _PATIENCE).result(timeout=_PATIENCE)
        assert found == self._prompt.chunks, f"{found} chunks of {self._prompt.chunks} were found"

    def _key(self, number: int, what: str) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name="bench",
            world_size=1,
            worker_id=0,
            token_ids=tuple(range(number << 16, (number << 16) + self._prompt.tokens)),
            start=0,
            end=self._prompt.tokens,
            request_id=f"{what} {number} {time.monotonic_ns()}",
            num_kv_readers=1,
        )

    def _end(self, key: IPCCacheServerKey) -> None:
        self._client.end_session(key.request_id).result(timeout=_PATIENCE)

    def _files(self) -> int:
        if self._folder is None:
            return 0
        return sum(entry.name.endswith(".data") for entry in os.scandir(self._folder))


class InProcess:
    """LMCache's storage manager in this process."""

    def __init__(self, prompt: Prompt, memory: int) -> None:
        self._prompt = prompt
        room = config.L1MemoryManagerConfig(size_in_bytes=memory, use_lazy=False, shm_name="")
        self._manager = StorageManager(
            config.StorageManagerConfig(
                l1_manager_config=config.L1ManagerConfig(memory_config=room),
                eviction_config=config.EvictionConfig(eviction_policy="LRU"),
            )
        )
        shape = torch.Size([2, prompt.layers, prompt.chunk, prompt.width])
        self._layout = api.MemoryLayoutDesc(shapes=[shape], dtypes=[torch.float16])

    def store(self, number: int, way: str) -> float:
        """Store prompt `number`."""
        keys = self._keys(number)
        began = time.perf_counter()
        reserved = self._manager.reserve_write(keys, self._layout)
        assert len(reserved) == len(keys), "the manager had no room"
        for chunk, key in enumerate(keys):
            reserved[key].tensor.copy_(self._prompt.part(self._prompt.kv, chunk))
        self._manager.finish_write(keys)
        return time.perf_counter() - began

    def retrieve(self, number: int, way: str) -> float:
        """Bring prompt `number` back, from the lookup to the release."""
        keys = self._keys(number)
        began = time.perf_counter()
        self._look_up(keys)
        with self._manager.read_prefetched_results(keys) as found:
            assert found is not None
            for chunk, memory in enumerate(found):
                self._prompt.part(self._prompt.back, chunk).copy_(memory.tensor)
        self._manager.finish_read_prefetched(keys)
        return time.perf_counter() - began

    def lookup(self, number: int, way: str) -> float:
        """Ask how much of prompt `number` is there."""
        keys = self._keys(number)
        began = time.perf_counter()
        self._look_up(keys)
        took = time.perf_counter() - began
        self._manager.finish_read_prefetched(keys)
        return took

    def digest(self, number: int, way: str) -> str:
        """Return the digest of prompt `number`, retrieved."""
        self.retrieve(number, way)
        return self._prompt.digest()

    def clear(self, number: int, way: str) -> None:
        """Empty it."""
        self._manager.clear(force=True)

    def _look_up(self, keys: list[api.ObjectKey]) -> None:
        rows = [api.GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=self._layout)]
        handle = self._manager.submit_prefetch_task(api.PrefetchTaskSpec(key_groups=rows))
        assert self._manager.wait_prefetch_status(handle, _PATIENCE)
        result = self._manager.query_prefetch_status(handle)
        assert result.hit_cells[0].popcount() == len(keys), "not all chunks were found"

    def _keys(self, number: int) -> list[api.ObjectKey]:
        names = (hashlib.blake2b(f"{number} {chunk}".encode(), digest_size=32).digest() for chunk in range(self._prompt.chunks))
        return [api.ObjectKey(chunk_hash=name, model_name="bench", kv_rank=0) for name in names]


def main() -> None:
    """Do what standard input says, until it ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    said = json.loads(sys.argv[1])
    prompt = Prompt(said["shape"])
    cache = InProcess(prompt, said["memory"]) if said["url"] is None else Engine(prompt, said["url"], said["folder"])
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        call, number, way = json.loads(line)
        method: Callable[[int, str], Any] = getattr(cache, call)
        print(json.dumps(method(number, way)), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # the library's threads outlive their main thread


if __name__ == "__main__":
    main()
