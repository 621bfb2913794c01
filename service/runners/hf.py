"""The runner on Hugging Face transformers: it loads the longest cached prefix and computes only the rest."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch

from tiercache.errors import Closed, InvalidInput, InvalidTokens, LeaseLost
from tiercache.keys import pack_tokens, unpack_tokens
from tiercache.leases import Refusal
from tiercache.prefetch import PrefetchPolicy
from tiercache.service.face import Stored
from tiercache.service.runners.generation import Generation, Stream
from tiercache.service.runners.layers import Arriving
from tiercache.service.runners.prefix import KV, Prefix
from tiercache.service.runners.room import Room, cache_argument
from tiercache.service.runners.sampling import Pick, picker
from tiercache.spec import KVSpec

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_LONGEST = 1 << 26  # as in Config.max_tokens
_COPY_SECONDS = 1.0
"""How long the end of a pass waits for copies into its room; a room that is still being written is dropped."""


class _Request(NamedTuple):
    prompt: list[int]
    limit: int
    stop: Collection[int]


class _Prefilled(NamedTuple):
    """A prompt whose KV lies in `room`; `logits` are those after it, `[1, vocabulary]`."""

    request: _Request
    prefix: Prefix
    room: Room
    logits: torch.Tensor
    started: float
    first_seconds: float


class Runner:
    """Generates text with `model`, and keeps its KV in the cache `kv`; with `kv` None it computes everything.

    `kv` was opened with `spec_of(model, block_size)`. An error of the cache never ends a generation: it is a miss, counted
    in `faults`. Forward passes run one after the other in a thread of the runner's own, requests may run concurrently, and the
    event loop stays free. `prefetch` is how long a request waits for what lies on SSD: `wait`, `best-effort` or seconds; None: as
    the cache was opened. With `by_layers` a pass begins with the first layer of a hit, while the layers after it are being copied;
    without, when the hit has been copied. Each layer costs a wake-up of two threads, more than it gives where all of them are
    copied in tens of milliseconds. A runner is an async context manager; leaving it ends the thread.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        kv: KV | None,
        *,
        block_size: int = 16,
        prefetch: object = None,
        by_layers: bool = False,
    ) -> None:
        self.spec = spec_of(model, block_size)
        self.faults: Counter[str] = Counter()
        """How often the cache failed, by call and error, such as `layer: LeaseLost`."""
        self.refused: Counter[Refusal] = Counter()
        """Tokens whose KV the cache did not take, by reason."""
        self._model = model
        self._tokenizer = tokenizer
        self._kv = kv
        self._policy = None if prefetch is None else PrefetchPolicy.of(prefetch)
        self._by_layers = by_layers
        self._cache_argument = cache_argument(model)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._spare: Room | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tiercache-runner")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """End the runner's thread, after the forward pass that it may be in."""
        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._pool.submit(int))
            self._pool.shutdown()

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop_tokens: Collection[int] | None = None,
    ) -> Generation:
        """Return the continuation of `prompt_tokens`: at most `max_new_tokens`, up to and with the first stop token.

        `temperature` 0 takes the most likely token; else tokens are drawn, repeatably with a `seed`. `stop_tokens` None means
        the model's own. The KV of the prompt and of all new tokens but the last (it never was an input) is inserted.

        Raises InvalidInput for a prompt or limit that cannot be; no error of the cache.
        """
        stream = self.stream(
            prompt_tokens, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop_tokens=stop_tokens
        )
        async for _ in stream:
            pass
        return stream.generation

    def stream(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop_tokens: Collection[int] | None = None,
    ) -> Stream:
        """Return the same continuation token by token; arguments and errors are those of `generate`."""
        request = self._request(prompt_tokens, max_new_tokens, stop_tokens)
        pick = picker(temperature, seed)
        return Stream(lambda stream: self._tokens(request, pick, stream))

    async def samples(
        self,
        prompt_tokens: Sequence[int],
        *,
        seeds: Sequence[int | None],
        max_new_tokens: int,
        temperature: float = 0.8,
        stop_tokens: Collection[int] | None = None,
    ) -> list[Generation]:
        """Return one continuation for each of `seeds`, as self-consistency wants them: prefilled once, decoded as a batch.

        A sample's choices depend on its own seed; it is what `generate` gives with that seed, up to what the order of float
        additions in a batch changes. `hit`, `computed` and the seconds are those of the whole batch. Each sample's own tokens
        are inserted. Raises what `generate` raises.
        """
        if not seeds:
            return []
        request = self._request(prompt_tokens, max_new_tokens, stop_tokens)
        picks = [picker(temperature, seed) for seed in seeds]
        rows: list[list[int]] = [[] for _ in seeds]
        async with self._prefix(request) as prefix:
            run = await self._prefill(request, prefix, picks, rows)
            room = await self._work(run.room.repeat, len(rows), len(request.prompt) + request.limit)
            self._spare = run.room
            while live := [i for i, row in enumerate(rows) if _goes_on(request, row)]:
                # Rows that ended stay in the batch and are not listened to: all rows of a room have one length.
                await self._work(self._next, [row[-1:] for row in rows], room, picks, rows, live)
            inserted = [await self._insert(run, room, row, i) for i, row in enumerate(rows)]
        return [self._generation(run, row, stored) for row, stored in zip(rows, inserted, strict=True)]

    async def _tokens(self, request: _Request, pick: Pick, stream: Stream) -> AsyncGenerator[int, None]:
        new: list[int] = []
        picks, rows = [pick], [new]
        async with self._prefix(request) as prefix:
            run = await self._prefill(request, prefix, picks, rows)
            try:
                yield new[-1]
                while _goes_on(request, new):
                    await self._work(self._next, [new[-1:]], run.room, picks, rows, (0,))
                    yield new[-1]
            except GeneratorExit:
                # Closed early, not cancelled: what was computed is worth keeping all the same.
                await self._finish(run, new, stream)
                raise
            await self._finish(run, new, stream)

    async def _prefill(self, request: _Request, prefix: Prefix, picks: Sequence[Pick], rows: Sequence[list[int]]) -> _Prefilled:
        """Load the prompt's KV or compute it, and append the first new token to each row."""
        started = time.perf_counter()
        await prefix.match()
        room = self._take_room(len(request.prompt) + request.limit)

        def compute(room: Room) -> torch.Tensor:
            logits = self._forward([request.prompt[prefix.loaded :]], room)
            _choose(picks, logits.expand(len(rows), -1), rows, range(len(rows)))
            return logits

        logits = None
        place = room.kv(0, prefix.promised)
        if await (prefix.begin(place) if self._by_layers else prefix.load(place)):
            room.resize(prefix.loaded)
            follows = self._by_layers and prefix.loaded
            logits = await (self._as_layers_come(prefix, room, compute) if follows else self._work(compute, room))
        if logits is None:  # into the old room something may still be copied
            prefix.forget()
            room = Room(self.spec, room.capacity, device=self._model.device)
            logits = await self._work(compute, room)
        return _Prefilled(request, prefix, room, logits, started, time.perf_counter() - started)

    async def _as_layers_come(self, prefix: Prefix, room: Room, compute: Callable[[Room], torch.Tensor]) -> torch.Tensor | None:
        """Compute behind a prefix whose first layer is in the room, while the others come; None when one of them did not."""
        arriving = Arriving(self.spec.layers)
        arriving.arrived(0)
        room.expect(arriving)
        following = asyncio.get_running_loop().create_task(
            prefix.follow(room.kv(0, prefix.promised), arriving), name="tiercache-layers"
        )
        logits = None
        try:
            logits = await self._work(compute, room)
        except LeaseLost:
            if not arriving.is_over:
                raise
        finally:
            # Cancelled, too: the model's thread waits no more, and this room is not used again.
            arriving.give_up()
            following.cancel()
            await asyncio.wait([following], timeout=_COPY_SECONDS)
        if arriving.late:
            self.faults["layer: TimeoutError"] += 1
        if following.done() and not following.cancelled():
            following.result()  # a wrong use of the cache is not hidden
        room.expect(None)
        return logits

    def _prefix(self, request: _Request) -> Prefix:
        return Prefix(self._kv, request.prompt[:-1], self.faults, policy=self._policy)

    async def _insert(self, run: _Prefilled, room: Room, new: list[int], row: int = 0) -> Stored | None:
        known = run.request.prompt + new[:-1]  # the last token was never an input: it has no KV yet
        inserted = await run.prefix.insert(known, room.kv(0, len(known), row=row))
        if inserted is not None and inserted.refused_because is not None:
            self.refused[inserted.refused_because] += inserted.refused
        return inserted

    async def _finish(self, run: _Prefilled, new: list[int], stream: Stream) -> None:
        inserted = await self._insert(run, run.room, new)
        if self._kv is None or inserted is not None:  # after a failed insert, somebody may still be reading the room
            self._spare = run.room
        stream.finish(self._generation(run, new, inserted))

    def _take_room(self, tokens: int) -> Room:
        # The last room is used again: touching fresh memory costs several times as much as copying what it holds.
        room, self._spare = self._spare, None
        if room is None or room.capacity < tokens:
            room = Room(self.spec, max(256, 1 << (tokens - 1).bit_length()), device=self._model.device)
        room.resize(0)
        return room

    def _forward(self, tokens: list[list[int]], room: Room) -> torch.Tensor:
        """Compute `tokens`, one list a row of `room`, and return the logits after the last: `[rows, vocabulary]`."""
        with torch.inference_mode():
            inputs = torch.tensor(tokens, device=self._model.device)
            output = self._model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{self._cache_argument: room.cache})
            logits: torch.Tensor = output.logits[:, -1]
            return logits

    def _next(
        self, last: list[list[int]], room: Room, picks: Sequence[Pick], rows: Sequence[list[int]], live: Sequence[int]
    ) -> None:
        _choose(picks, self._forward(last, room), rows, live)

    async def _work(self, call: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if self._closed:
            raise Closed("the runner is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def _request(self, prompt: Sequence[int], limit: int, stop: Collection[int] | None) -> _Request:
        tokens = unpack_tokens(pack_tokens(prompt, limit=_LONGEST))
        if not tokens:
            raise InvalidTokens("the prompt is empty; a model needs at least one token")
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise InvalidTokens(f"token ids of this model lie between 0 and {self._vocabulary - 1}", limit=self._vocabulary)
        if limit < 1:
            raise InvalidInput(f"max_new_tokens must be at least 1, not {limit}", field="max_new_tokens", value=limit)
        return _Request(tokens, limit, frozenset(self._own_stops() if stop is None else stop))

    def _own_stops(self) -> list[int]:
        own = self._model.generation_config.eos_token_id
        return [] if own is None else [own] if isinstance(own, int) else list(own)

    def _generation(self, run: _Prefilled, new: list[int], inserted: Stored | None) -> Generation:
        return Generation(
            tokens=new,
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            first_logits=run.logits[0],
            hit=run.prefix.tiers,
            computed=len(run.request.prompt) - run.prefix.loaded,
            first_token_seconds=run.first_seconds,
            seconds=time.perf_counter() - run.started,
            inserted=inserted,
        )


def _choose(picks: Sequence[Pick], logits: torch.Tensor, rows: Sequence[list[int]], live: Sequence[int]) -> None:
    """Append to each live row the token that its own pick takes from its own logits."""
    for i in live:
        rows[i].append(picks[i](logits[i]))


def _goes_on(request: _Request, row: list[int]) -> bool:
    return len(row) < request.limit and row[-1] not in request.stop


def spec_of(model: Any, block_size: int = 16) -> KVSpec:
    """Return the layout of the KV that `model` computes in blocks of `block_size` tokens."""
    return KVSpec.from_config(model.config, dtype=str(model.dtype).removeprefix("torch."), block_size=block_size)
