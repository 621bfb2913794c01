"""The goals that the figures of a CPU are held against, a row each, in the order of the page."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One goal in words."""

    key: str
    what: str
    reference: str
    goal: str


GOALS = (
    Row("tree-python", "match and insert, chats of many turns, 2k to 100k tokens", "SGLang's Python radix tree", "5 times as fast"),
    Row("tree-native", "the same", "SGLang's native tree core", "no slower"),
    Row("evict-growth", "evict one block at 100,000 leaves", "the same at 1,000 leaves", "≤ 2 times"),
    Row("evict", "the same", "", "≤ 1 ms"),
    Row("match-2k", "match of 2k tokens over the daemon, median", "bare asyncio echo of the same bytes", "≤ 2.5 times"),
    Row("match-128k", "match of 128k tokens, of which the session knows all but a turn", "", "≤ 2 ms"),
    Row("copy-out", "DRAM hit copied out", "memcpy", "≥ 0.8 of its rate"),
    Row("in-place", "DRAM hit in place, from call to readable", "the bare round trip", "≤ 2 times, at any length"),
    Row("ssd-demote", "DRAM to SSD, blocks of 512 KiB and more", "O_DIRECT, best of 1, 4, 8 in flight", "≥ 0.8 of its rate"),
    Row(
        "ssd-promote",
        "SSD to DRAM, cold, blocks of 512 KiB and more",
        "O_DIRECT, best of 1, 4, 8 in flight",
        "≥ 0.8 of its rate",
    ),
    Row("peer-dram", "store and retrieve in DRAM, over the daemon", "LMCache's own server", "≥ 2 times its rate"),
    Row("peer-disk", "store and retrieve on disk, nothing synced", "LMCache's own server", "≥ 1.2 times its rate"),
    Row("hit-dram", "what a 2k-token hit in DRAM adds to a pass of 32 tokens", "1.5 · bytes / memcpy + 2 ms", "≤ 1 time"),
    Row("hit-ssd", "what a 2k-token hit on SSD adds to a pass of 32 tokens", "1.3 · bytes / disk rate + 10 ms", "≤ 1 time"),
    Row("miss-first", "time to first token when nothing hits", "the runner without the cache", "≤ 1.01 times"),
    Row("miss-rate", "tokens per second when nothing hits", "the runner without the cache", "≥ 0.99 times"),
    Row("restart", "restart with 1M tokens: from exec to the first correct hit", "interpreter start + 1 s", "≤ 1 time"),
    Row("index-long", "bytes of index a token, edges of 8 blocks of 16", "", "≤ 16"),
    Row("index-short", "bytes of index a token, edges of one block of 16", "", "≤ 40"),
)
GPU_GOALS = (
    Row("gpu-down", "HBM to DRAM, blocks of 256 KiB and more", "pinned copy to the host", "≥ 0.9 of its rate"),
    Row("gpu-up", "DRAM to HBM, blocks of 256 KiB and more", "pinned copy to the device", "≥ 0.9 of its rate"),
    Row("gpu-gather", "gather within HBM", "the driver's copy within the device", "≥ 0.8 of its rate"),
    Row("gpu-scatter", "scatter within HBM", "the driver's copy within the device", "≥ 0.8 of its rate"),
)
"""Those of `bench gpu`, which needs a card and is no part of the page."""
KEYS = frozenset(row.key for row in (*GOALS, *GPU_GOALS))
