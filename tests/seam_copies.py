"""The seam of copies: a copier whose every call can be held, failed and let through in any order, before its copy or after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiercache.kernels.device import Event
from tiercache.storage.copier import Copier, LayerCopier
from tiercache.transfer import Discard, Report, Transfer, Work

PATIENCE = 20.0
"""Seconds after which a test that waits for a step that never comes gives up. No test waits that long on purpose."""


class Step(NamedTuple):
    """One call of the copier: `blocks`, `put` or `discard`, or into a device `verify` or `layer`, before or after its copy.

    `to` is the position of the tier that it writes (or discards from), `number` the layer, the first of the blocks, or how many
    checks of the transfer there were before.
    """

    kind: str
    to: int
    number: int
    after: bool
    work: Work


class Hold:
    """Where the steps that match stand until they are let through."""

    def __init__(self, matches: Callable[[Step], bool]) -> None:
        self.matches = matches
        self._standing: list[tuple[Step, asyncio.Event]] = []
        self._came = asyncio.Condition()
        self._count = 0
        self.open = False

    async def stand(self, step: Step) -> None:
        """Wait, on behalf of `step`, until it is let through."""
        go = asyncio.Event()
        self._standing.append((step, go))
        self._count += 1
        async with self._came:
            self._came.notify_all()
        if not self.open:
            await go.wait()

    async def reached(self, count: int = 1) -> Step:
        """Wait until `count` steps have come, and return the last of them."""
        async with asyncio.timeout(PATIENCE), self._came:
            await self._came.wait_for(lambda: self._count >= count)
        return self._standing[-1][0]

    @property
    def standing(self) -> list[Step]:
        """The steps that wait here, in the order in which they came."""
        return [step for step, go in self._standing if not go.is_set()]

    def let(self, number: int) -> None:
        """Let the waiting step through that stands at `number` of `standing`."""
        [go for _, go in self._standing if not go.is_set()][number].set()

    def release(self) -> None:
        """Let all through, now and from now on."""
        self.open = True
        for _, go in self._standing:
            go.set()


@dataclass(slots=True)
class _Failure:
    matches: Callable[[Step], bool]
    error: Exception
    times: int


class Copies:
    """The holds and failures of all copiers of a rig. `chunk` is how many blocks a copier takes at once; None: as it likes."""

    def __init__(self) -> None:
        self.chunk: int | None = None
        self.seen: list[Step] = []
        self._holds: list[Hold] = []
        self._failures: list[_Failure] = []

    def around(self, copier: Copier) -> HeldCopier:
        """Return a copier that obeys."""
        return HeldCopier(copier, self)

    def hold(
        self,
        kind: str,
        *,
        to: int | None = None,
        number: int | None = None,
        after: bool = False,
        where: Callable[[Step], bool] | None = None,
    ) -> Hold:
        """Hold the steps of a kind, of one tier position and number if they are given, before their copy or after it."""
        hold = Hold(_matcher(kind, to, number, after, where))
        self._holds.append(hold)
        return hold

    def fail(
        self,
        kind: str,
        error: Exception,
        *,
        to: int | None = None,
        number: int | None = None,
        after: bool = False,
        times: int = 1,
        where: Callable[[Step], bool] | None = None,
    ) -> None:
        """Let the next `times` matching steps raise `error`."""
        self._failures.append(_Failure(_matcher(kind, to, number, after, where), error, times))

    def release(self) -> None:
        """End all holds and failures."""
        for hold in self._holds:
            hold.release()
        self._holds.clear()
        self._failures.clear()

    async def pass_by(self, step: Step) -> None:
        """Wait where a hold matches, then fail where a failure does."""
        self.seen.append(step)
        for hold in list(self._holds):
            if hold.matches(step):
                await hold.stand(step)
        for failure in self._failures:
            if failure.times and failure.matches(step):
                failure.times -= 1
                raise failure.error


def _matcher(
    kind: str, to: int | None, number: int | None, after: bool, where: Callable[[Step], bool] | None
) -> Callable[[Step], bool]:
    def matches(step: Step) -> bool:
        return (
            step.kind == kind
            and step.after == after
            and to in (None, step.to)
            and number in (None, step.number)
            and (where is None or where(step))
        )

    return matches


class HeldCopier:
    """A copier whose every call passes by `copies` before and after the call that it wraps."""

    def __init__(self, inner: Copier, copies: Copies) -> None:
        self._inner = inner
        self._copies = copies

    def by_layer(self, transfer: Transfer) -> LayerCopier | None:
        layers = self._inner.by_layer(transfer)
        return None if layers is None else HeldLayers(layers, self._copies)

    def chunks(self, transfer: Transfer) -> Sequence[tuple[int, int]]:
        chunk = self._copies.chunk
        if chunk is None:
            return self._inner.chunks(transfer)
        return [(low, min(low + chunk, transfer.count)) for low in range(0, transfer.count, chunk)]

    async def blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        before = Step("blocks", transfer.to, low, False, transfer)
        await self._copies.pass_by(before)
        report = await self._inner.blocks(transfer, low, high)
        await self._copies.pass_by(before._replace(after=True))
        return report

    async def put(self, transfer: Transfer) -> Report:
        before = Step("put", transfer.to, 0, False, transfer)
        await self._copies.pass_by(before)
        report = await self._inner.put(transfer)
        await self._copies.pass_by(before._replace(after=True))
        return report

    async def discard(self, discard: Discard) -> None:
        before = Step("discard", discard.position, 0, False, discard)
        await self._copies.pass_by(before)
        await self._inner.discard(discard)
        await self._copies.pass_by(before._replace(after=True))


class HeldLayers:
    """The same for who copies layer by layer."""

    def __init__(self, inner: LayerCopier, copies: Copies) -> None:
        self._inner = inner
        self._copies = copies
        self._checks = 0

    @property
    def layers(self) -> int:
        return self._inner.layers

    async def verify(self, transfer: Transfer) -> Report:
        before = Step("verify", transfer.to, self._checks, False, transfer)
        self._checks += 1
        await self._copies.pass_by(before)
        report = await self._inner.verify(transfer)
        await self._copies.pass_by(before._replace(after=True))
        return report

    async def layer(self, transfer: Transfer, layer: int, count: int) -> Event:
        before = Step("layer", transfer.to, layer, False, transfer)
        await self._copies.pass_by(before)
        event = await self._inner.layer(transfer, layer, count)
        await self._copies.pass_by(before._replace(after=True))
        return event

    async def over(self, event: Event | None) -> None:
        await self._inner.over(event)
