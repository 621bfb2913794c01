"""SGLang's radix trees in a process of their own: they are told what to match and insert, and say how long it took.

Run by the interpreter of an environment that holds SGLang's wheel, torch, numpy and msgspec (`make peer-sglang`), as a script:
nothing of tiercache is importable there. It says that it is ready, then reads one JSON object a line from standard input and
answers each with one; all of them name a tree:

    {"do": "open", "core": "radix" | "unified" | "native", "page": 16, "file": PATH}      tokens: the file's 32-bit integers
    {"do": "turns", "turns": [[start, prompt, whole], …]}          →  {"hits": […], "match": […], "insert": […]}
    {"do": "evict", "tokens": 16, "times": 20}                     →  {"evict": […]}
    {"do": "convert", "tokens": 2048, "times": 20}                 →  {"convert": […]}

A turn is what an engine does for a request: match the prompt (tokens `start` to `start + prompt` of the file), lock what was found,
insert the whole (prompt and answer), unlock. Hits are in tokens, times in seconds a turn; keys and values are made before the clock
runs. The trees are SGLang's own code, unmodified: packages are entered without running their `__init__`, and modules
that the trees name and don't use (GPU kernels, pools, metrics) are stand-ins.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
import time
import types
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

_ENTERED = (
    "sglang",
    "sglang.srt",
    "sglang.srt.disaggregation",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.rust_tree_core",
    "sglang.srt.mem_cache.unified_cache",
)
_UNUSED = (
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.kvcache",
    "sglang.kernels.ops.kvcache.mla_buffer",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.common",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.observability",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.runtime_context",
    "sglang.srt.utils",
    "sglang.srt.utils.common",
    "sglang.srt.utils.network",
)
_NATIVE = "sglang.srt.mem_cache.rust_tree_core"


class Tree(Protocol):
    """One of the trees."""

    def match(self, key: Any) -> tuple[int, Any]:
        """Return how many tokens of the key are cached, and the node where they end."""
        ...

    def lock(self, node: Any) -> Any:
        """Lock the path to the node; what comes back goes to `unlock`."""
        ...

    def insert(self, key: Any, value: Any) -> None:
        """Insert the key, with the slots of all its tokens."""
        ...

    def unlock(self, node: Any, lock: Any) -> None:
        """Unlock the path to the node."""
        ...

    def evict(self, tokens: int) -> int:
        """Evict at least that many tokens and return how many."""
        ...


class Radix:
    """`RadixCache`: one class in Python."""

    def __init__(self, page: int) -> None:
        self._types = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        cache = importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixCache
        self._tree = cache.create_simulated(page_size=page, mock_allocator=_NoSlots())

    def match(self, key: Any) -> tuple[int, Any]:
        """Match."""
        found = self._tree.match_prefix(self._types.MatchPrefixParams(key=key))
        return found.device_prefix_len, found.last_device_node

    def lock(self, node: Any) -> Any:
        """Lock."""
        self._tree.inc_lock_ref(node)

    def insert(self, key: Any, value: Any) -> None:
        """Insert."""
        self._tree.insert(self._types.InsertParams(key=key, value=value))

    def unlock(self, node: Any, lock: Any) -> None:
        """Unlock."""
        self._tree.dec_lock_ref(node)

    def evict(self, tokens: int) -> int:
        """Evict."""
        count: int = self._tree.evict(self._types.EvictParams(num_tokens=tokens)).num_tokens_evicted
        return count


class Unified:
    """A core of the unified cache, driven as its controller drives it: `python` or `rust`."""

    def __init__(self, page: int, backend: str) -> None:
        self._types = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        registry = importlib.import_module("sglang.srt.mem_cache.unified_cache.tree_core_registry")
        self._full = importlib.import_module("sglang.srt.mem_cache.unified_cache.component_type").ComponentType.FULL
        params = importlib.import_module("sglang.srt.mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=page,
            tree_components=(self._full,),
            tree_core_backend=backend,
        )
        component = importlib.import_module("sglang.srt.mem_cache.unified_cache.components.full").FullComponent
        owner = types.SimpleNamespace(enable_session_radix_cache=False, page_size=page)
        factory = registry.get_tree_core_factory(backend)
        self._core = factory(params, {self._full: component(owner, params)} if backend == "python" else {})

    def match(self, key: Any) -> tuple[int, Any]:
        """Match."""
        found = self._core.match_prefix(self._types.MatchPrefixParams(key=key))
        return found.device_prefix_len, found.last_device_node

    def lock(self, node: Any) -> Any:
        """Lock."""
        return self._core.inc_lock_ref(node).to_dec_params()

    def insert(self, key: Any, value: Any) -> None:
        """Insert in steps, to the last."""
        step = self._core.begin_insert(self._types.InsertParams(key=key, value=value))
        while step.result is None:
            step = self._core.resume_insert()
        self._core.end_insert()

    def unlock(self, node: Any, lock: Any) -> None:
        """Unlock."""
        self._core.dec_lock_ref(node, lock)

    def evict(self, tokens: int) -> int:
        """Evict leaf by leaf."""
        gone = {self._full: 0}
        self._core.evict_device_start(self._full, tokens)
        while gone[self._full] < tokens:
            step = self._core.evict_device_next_node(self._full, gone)
            node = _drained(step, gone)
            if node.node_id is not None:
                _drained(self._core.evict_device_leaf(node.node_id, False), gone)
            elif not node.made_progress:
                break
        self._core.evict_device_end(self._full)
        return gone[self._full]


def _drained(step: Any, gone: dict[Any, int]) -> Any:
    """Take what a step of an eviction freed, as the controller would."""
    for component, count in step.tracker.items():
        gone[component] += count
    step.device_frees.clear()
    step.host_frees.clear()
    step.cache_actions.clear()
    return step


class _NoSlots:
    """An allocator to which nothing needs to be given back: slots are numbers here."""

    device = "cpu"

    def free_segment(self, slots: Any, start_pos: int) -> None:
        """Forget them."""


class _Unused(types.ModuleType):
    """A module whose names are named and never used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def enter() -> None:
    """Make SGLang's trees importable without what the rest of it needs."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    site = Path(next(iter(spec.submodule_search_locations))).parent
    for name in _ENTERED:
        module = types.ModuleType(name)
        module.__path__ = [str(site.joinpath(*name.split(".")))]
        _place(module)
    for name in (*_UNUSED, *(name for name in ("orjson", "pydantic", "zmq") if importlib.util.find_spec(name) is None)):
        stand_in = _Unused(name)
        stand_in.__path__ = []
        _place(stand_in)
    # The two small functions of these modules that the trees do call.
    sys.modules["sglang.srt.utils"].assert_int64_array = _assert_int64_array  # type: ignore[attr-defined]
    sys.modules["sglang.srt.utils.common"].ceil_align = lambda value, unit: -(-value // unit) * unit  # type: ignore[attr-defined]
    importlib.import_module("torch")  # its libraries must be there before the extension is loaded
    library = next(site.joinpath(*_NATIVE.split(".")).glob("mem_cache.*.so"))
    found = importlib.util.spec_from_file_location(f"{_NATIVE}.mem_cache", library)
    assert found is not None and found.loader is not None
    bindings = importlib.util.module_from_spec(found)
    found.loader.exec_module(bindings)
    extension = types.ModuleType(f"{_NATIVE}.extension")
    extension.bindings = bindings  # type: ignore[attr-defined]
    _place(extension)


def _place(module: types.ModuleType) -> None:
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def _assert_int64_array(ids: array[int], what: str) -> None:
    assert ids.typecode == "q", what


_TREES: dict[str, Callable[[int], Tree]] = {
    "radix": Radix,
    "unified": lambda page: Unified(page, "python"),
    "native": lambda page: Unified(page, "rust"),
}


class Bench:
    """One open tree and the tokens that it is asked about."""

    def __init__(self, core: str, page: int, file: str) -> None:
        self._tree = _TREES[core](page)
        self._page = page
        packed = array("i")
        packed.frombytes(Path(file).read_bytes())
        self._tokens = array("q", packed)
        self._key = importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixKey
        self._slots = importlib.import_module("torch").arange(len(self._tokens))

    def turns(self, turns: list[list[int]]) -> dict[str, list[float]]:
        """Make the turns and return the hits in tokens and the seconds of each."""
        clock, tree = time.perf_counter, self._tree
        hits: list[float] = []
        matched: list[float] = []
        inserted: list[float] = []
        for start, prompt, whole in turns:
            asked = self._key(self._tokens[start : start + prompt])
            stored = self._key(self._tokens[start : start + whole // self._page * self._page])
            slots = self._slots[: len(stored)]
            began = clock()
            hit, node = tree.match(asked)
            lock = tree.lock(node)
            middle = clock()
            tree.insert(stored, slots)
            tree.unlock(node, lock)
            ended = clock()
            hits.append(hit)
            matched.append(middle - began)
            inserted.append(ended - middle)
        return {"hits": hits, "match": matched, "insert": inserted}

    def evict(self, tokens: int, times: int) -> dict[str, list[float]]:
        """Evict `tokens` tokens, several times, and return the seconds of each."""
        seconds: list[float] = []
        for _ in range(times):
            began = time.perf_counter()
            gone = self._tree.evict(tokens)
            seconds.append(time.perf_counter() - began)
            assert gone >= tokens
        return {"evict": seconds}

    def convert(self, tokens: int, times: int) -> dict[str, list[float]]:
        """Make a key of a list of token ids, several times, and return the seconds of each."""
        listed = self._tokens[:tokens].tolist()
        seconds: list[float] = []
        for _ in range(times):
            began = time.perf_counter()
            self._key(array("q", listed))
            seconds.append(time.perf_counter() - began)
        return {"convert": seconds}


def main() -> None:
    """Answer until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    enter()
    benches: dict[str, Bench] = {}
    gc.disable()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        do, tree = asked.pop("do"), asked.pop("tree")
        answer: dict[str, list[float]] = {}
        if do == "open":
            benches.pop(tree, None)
            gc.collect()
            benches[tree] = Bench(**asked)
        else:
            answer = getattr(benches[tree], do)(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
