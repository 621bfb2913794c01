"""What Prometheus scrapes: counted where things happen, collected when asked. Labels are tiers, reasons and types of frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercache.service.ailments import Code, quarantined
from tiercache.service.daemon.heartbeat import EDGES
from tiercache.service.daemon.report import judged

if TYPE_CHECKING:
    from tiercache.service.daemon.daemon import Daemon

_STATES = ("starting", "ok", "degraded", "draining", "stopped", "failed")


def registry_of(daemon: Daemon) -> CollectorRegistry:
    """Return a registry of this daemon's own; a scrape reads the counts as they are then."""
    registry = CollectorRegistry()
    registry.register(_Daemon(daemon))
    return registry


class _Daemon(Collector):
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def describe(self) -> Iterable[Metric]:
        """Describe nothing ahead: registering must not need a cache that is open."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._health()
        yield from self._workers()
        yield from self._disk()
        yield from self._house()
        yield from self._loop()
        yield from self._tiers()
        yield from self._device()
        yield from self._traffic()

    def _health(self) -> Iterator[Metric]:
        found = judged(self._daemon)
        state = GaugeMetricFamily("tiercache_state", "1 for the state that the daemon is in.", labels=["state"])
        for name in _STATES:
            state.add_metric([name], float(name == found["status"]))
        yield state
        told = {reason["code"] for reason in found["reasons"]}
        ailment = GaugeMetricFamily("tiercache_ailment", "1 for what ails the cache now.", labels=["code"])
        for code in Code:
            ailment.add_metric([code], float(code in told))
        yield ailment

    def _workers(self) -> Iterator[Metric]:
        lanes = self._daemon.cache.lanes()
        threads = GaugeMetricFamily("tiercache_workers", "Worker threads: there are to be, alive, busy.", labels=["lane", "state"])
        queued = GaugeMetricFamily("tiercache_worker_queue", "Calls that no thread has begun.", labels=["lane"])
        longest = GaugeMetricFamily(
            "tiercache_worker_call_seconds", "How long the oldest call under way has been running.", labels=["lane"]
        )
        deaths = CounterMetricFamily("tiercache_worker_deaths", "Worker threads that died and were replaced.", labels=["lane"])
        for lane in lanes:
            name = lane.lane.value
            for state, count in (("wanted", lane.threads), ("alive", lane.alive), ("busy", lane.busy)):
                threads.add_metric([name, state], count)
            queued.add_metric([name], lane.queued)
            longest.add_metric([name], lane.longest or 0.0)
            deaths.add_metric([name], lane.deaths)
        yield from (threads, queued, longest, deaths)

    def _disk(self) -> Iterator[Metric]:
        watch = self._daemon.cache.disk_watch
        if watch is None or watch.room is None:
            return
        for name, says, value in (
            ("free_bytes", "What the file system under the SSD tier has free.", watch.room.free),
            ("size_bytes", "The size of that file system.", watch.room.size),
            ("data_bytes", "The length of the SSD tier's files of blocks.", watch.room.data),
            ("limit_bytes", "What those files may take, for the models that are open.", self._daemon.cache.ssd_limit),
            ("metadata_bytes", "The length of the SSD tier's file of metadata.", watch.room.metadata),
            ("age_seconds", "How old these figures are.", watch.age or 0.0),
        ):
            yield GaugeMetricFamily(f"tiercache_disk_{name}", says, value=value)

    def _house(self) -> Iterator[Metric]:
        house, counts = self._daemon.house, self._daemon.house.counts
        yield GaugeMetricFamily("tiercache_sessions", "Sessions now.", value=len(house.sessions))
        yield GaugeMetricFamily(
            "tiercache_kept_back", "Ended sessions whose processes may still touch slots.", value=house.kept_back
        )
        yield CounterMetricFamily("tiercache_sessions_begun", "Sessions in all.", value=counts.sessions)
        yield CounterMetricFamily(
            "tiercache_sessions_overrun", "Sessions ended because too much was not read.", value=counts.overrun
        )
        yield CounterMetricFamily(
            "tiercache_sessions_stalled", "Sessions ended because a reply was not read in time.", value=counts.stalled
        )
        lost = CounterMetricFamily("tiercache_lost", "Claims that ended because they were not renewed.", labels=["what"])
        for what in ("lease", "reservation"):
            lost.add_metric([what], counts.lost[what])
        yield lost
        yield GaugeMetricFamily("tiercache_connections", "Connections now, on all sockets.", value=house.connections.standing)
        yield CounterMetricFamily(
            "tiercache_connections_refused", "Connections that were too many.", value=house.connections.refused
        )
        requests = CounterMetricFamily("tiercache_requests", "Request frames.", labels=["type"])
        for name, count in counts.requests.items():
            requests.add_metric([name], count)
        yield requests
        failures = CounterMetricFamily("tiercache_request_failures", "Error replies.", labels=["kind"])
        for name, count in counts.failures.items():
            failures.add_metric([name], count)
        yield failures
        distrusted = CounterMetricFamily(
            "tiercache_blocks_distrusted", "Blocks that a client distrusted, and what the daemon found.", labels=["found"]
        )
        distrusted.add_metric(["sound"], counts.distrusted[True])
        distrusted.add_metric(["unsound"], counts.distrusted[False])
        yield distrusted

    def _loop(self) -> Iterator[Metric]:
        heart = self._daemon.heartbeat
        ends = [*map(str, EDGES), "+Inf"]
        yield HistogramMetricFamily(
            "tiercache_loop_lag_seconds",
            "How late ticks of the event loop came.",
            buckets=list(zip(ends, map(float, accumulate(heart.counts)), strict=True)),
            sum_value=heart.total,
        )
        yield GaugeMetricFamily("tiercache_loop_lag_longest_seconds", "The latest tick since the start.", value=heart.longest)

    def _tiers(self) -> Iterator[Metric]:
        labels = ["block_bytes", "tier"]
        slots = GaugeMetricFamily("tiercache_slots", "Slots by what they are for now.", labels=[*labels, "state"])
        queries = CounterMetricFamily("tiercache_tier_queries_blocks", "Blocks that no faster tier had.", labels=labels)
        hits = CounterMetricFamily("tiercache_tier_hits_blocks", "Blocks that were found in the tier.", labels=labels)
        for stack in self._daemon.cache.stacks:
            size, figures, apart = str(stack.geometry.block_bytes), stack.cache.stats, quarantined(stack)
            for position, tier in enumerate(stack.cache.tiers):
                pool = stack.cache.residency.slots[position]
                name = str(tier)
                slots.add_metric([size, name, "free"], pool.free)
                slots.add_metric([size, name, "quarantined"], apart[position])
                slots.add_metric([size, name, "used"], pool.capacity - pool.free - apart[position])
                queries.add_metric([size, name], figures.queries[position])
                hits.add_metric([size, name], figures.hits[position])
        yield from (slots, queries, hits)

    def _device(self) -> Iterator[Metric]:
        labels = ["block_bytes", "device", "what"]
        taken = GaugeMetricFamily("tiercache_device_bytes", "Memory of the device that the HBM tier takes.", labels=labels)
        below = GaugeMetricFamily("tiercache_device_host_bytes", "Host memory that the device copies to and from.", labels=labels)
        for stack in self._daemon.cache.stacks:
            bus = stack.bus
            if bus is None:
                continue
            who = [str(stack.geometry.block_bytes), bus.device.name]
            taken.add_metric([*who, "slots"], bus.slot_bytes)
            taken.add_metric([*who, "stages"], bus.stage_bytes)
            below.add_metric([*who, "stages"], bus.stage_host_bytes)
            below.add_metric([*who, "pinned"], bus.pinned_bytes)
            below.add_metric([*who, "pageable"], bus.below_bytes - bus.pinned_bytes)
        yield from (taken, below)

    def _traffic(self) -> Iterator[Metric]:
        size = ["block_bytes"]
        matches = CounterMetricFamily("tiercache_matches", "Matches.", labels=size)
        asked = CounterMetricFamily("tiercache_asked_blocks", "Blocks asked for.", labels=size)
        missed = CounterMetricFamily("tiercache_missed_blocks", "Blocks that no tier had.", labels=size)
        clipped = CounterMetricFamily("tiercache_clipped_blocks", "Blocks found and not leased.", labels=size)
        moved = CounterMetricFamily(
            "tiercache_moved_blocks", "Blocks by the change of their fastest tier.", labels=[*size, "from", "to", "reason"]
        )
        copied = CounterMetricFamily("tiercache_copied_blocks", "Blocks that transfers copied.", labels=[*size, "from", "to"])
        failures = CounterMetricFamily("tiercache_failures", "Failed transfers, reads and writes.", labels=[*size, "reason"])
        blocks = GaugeMetricFamily("tiercache_blocks", "Blocks that exist.", labels=size)
        flying = GaugeMetricFamily("tiercache_transfers", "Transfers under way.", labels=size)
        for stack in self._daemon.cache.stacks:
            label, figures = str(stack.geometry.block_bytes), stack.cache.stats
            matches.add_metric([label], figures.matches)
            asked.add_metric([label], figures.asked)
            missed.add_metric([label], figures.missed)
            clipped.add_metric([label], figures.clips)
            blocks.add_metric([label], stack.cache.residency.table.live)
            flying.add_metric([label], len(stack.cache.inflight.flying))
            for (before, after, reason), count in figures.moved.items():
                moved.add_metric([label, str(before or "none"), str(after or "none"), reason.value], count)
            for (source, target), count in figures.copied.items():
                copied.add_metric([label, str(source), str(target)], count)
            for why, count in figures.failures.items():
                failures.add_metric([label, why], count)
        yield from (matches, asked, missed, clipped, moved, copied, failures, blocks, flying)
