"""The configuration: one frozen value, from TOML or from arguments; unknown keys are refused."""

from __future__ import annotations

import functools
import os
import typing
from pathlib import Path
from typing import Any

import msgspec

from tiercache.devices import CPU, require_name
from tiercache.errors import InvalidConfig, InvalidInput
from tiercache.prefetch import PrefetchPolicy
from tiercache.sizes import parse_size
from tiercache.types import Tier


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier: its name and its capacity, such as `TierConfig(tier="DRAM", capacity="2 GiB")`."""

    tier: str
    capacity: str | int

    def __post_init__(self) -> None:
        _check_types(self, "tiers: ")

    @property
    def place(self) -> Tier:
        """The tier."""
        return Tier[self.tier]

    @property
    def bytes(self) -> int:
        """Capacity in bytes."""
        return parse_size(self.capacity)


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fraction of every tier that blocks of `block_bytes` bytes get."""

    block_bytes: int
    fraction: float

    def __post_init__(self) -> None:
        _check_types(self, "shares: ")


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a daemon allows at once: sessions, and in each of them the rest."""

    sessions: int = 256
    connections: int | None = None
    """Connections on all sockets together, sessions and others. None: two for each session, and 256."""
    idle_seconds: float = 30.0
    """How long a connection that is no session may say nothing."""
    requests: int = 256
    """Requests that wait for something."""
    leases: int = 4096
    """Leases and pins."""
    reservations: int = 256
    prompts: int = 64
    """Prompts that are remembered, so that a growing one is not sent again …"""
    prompt_bytes: str | int = "16 MiB"
    """… and how much of them; at least one of `max_tokens` fits."""
    queued_bytes: str | int = "4 MiB"
    """Replies that a client has not read. With more its session ends."""
    write_seconds: float = 30.0
    """How long one reply may wait for the client to read. Then its session ends."""
    lease_seconds: float = 60.0
    """How long a lease that is copied from, or a reservation, stands without a renewal. Clients renew by themselves."""

    def __post_init__(self) -> None:
        _check_types(self, within="limits.")

    @property
    def most_connections(self) -> int:
        """`connections`, or what stands for None."""
        return self.connections if self.connections is not None else 2 * self.sessions + 256


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cache is made of. Sizes are bytes or text such as `64 MiB`; times carry their unit in the name."""

    tiers: tuple[TierConfig, ...]
    """Fastest first; any of HBM, DRAM, SSD, each at most once."""
    device: str = CPU
    """Where the HBM tier lies: a card, such as `cuda:0`. `cpu`: host memory in its place."""
    directory: str | None = None
    """The SSD tier's directory. None: `tiercache` under XDG_DATA_HOME."""
    shares: tuple[Share, ...] = ()
    """Who gets which part of the tiers, by block size in bytes. Empty: the first model that opens has all of it."""
    codec: str = "raw"
    """How blocks lie on SSD: `raw`, or `zstd` (lossless, worth it for 16-bit types)."""
    admit_ms: int = 500
    """How long a writer waits for what its blocks follow and for room, together; then nothing waits for a disk."""
    promote_ms: int = 2000
    """How long a promotion waits for room."""
    prefetch: str | float = "wait"
    """How long a hit in this process waits for what lies on SSD: `wait`, `best-effort`, or seconds. Clients say it themselves."""
    watermark_low: float = 0.02
    """Below this fraction of free slots a tier is drained in the background …"""
    watermark_high: float = 0.05
    """… up to this one."""
    lease_share: float = 0.9
    """The fraction of a tier that one session may lease."""
    drain_seconds: float = 30.0
    """How long closing may write down what is not on SSD yet."""
    batch_bytes: str | int = "16 MiB"
    """How much one write transaction of the SSD tier takes."""
    copy_threads: int = 2
    """Threads that copy between memories."""
    read_threads: int = 2
    """Threads that read from SSD."""
    max_tokens: int = 1 << 20
    """The longest prompt, in tokens."""
    write_policy: str = "back"
    """When blocks go to SSD: `back`, when room is needed or at the end; `through`, when committed; `selective`, when used often."""
    write_through_hits: int = 2
    """With `selective`: at which match of a block."""
    socket: str | None = None
    """The daemon's socket. None: `tiercache.sock` under XDG_RUNTIME_DIR."""
    admin: str | None = None
    """Address of the admin part on TCP, such as `127.0.0.1:9410`; it needs a token. None: on the socket alone."""
    admin_token_file: str | None = None
    """The file that holds the bearer token for `admin`; nobody else may read it."""
    limits: Limits = msgspec.field(default_factory=Limits)
    """What the daemon allows at once."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check(self)

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> Config:
        """Return the configuration in the TOML file `source`.

        Raises InvalidConfig, naming the key, for a key that does not exist or a value that cannot be.
        """
        path = Path(source)
        try:
            return msgspec.toml.decode(path.read_bytes(), type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidConfig(f"{path}: {error}", path=str(path)) from error
        except OSError as error:
            raise InvalidConfig(f"{path}: {error.strerror}", path=str(path)) from error

    @classmethod
    def of(
        cls, *, hbm: str | int | None = None, dram: str | int | None = None, ssd: str | int | None = None, **fields: object
    ) -> Config:
        """Return a configuration with the named tiers; a tier that is None is left out.

        Raises InvalidConfig, naming the key, for a key that does not exist or a value that cannot be.
        """
        for name in fields:
            if name not in cls.__struct_fields__ or name == "tiers":
                known = ", ".join(field for field in cls.__struct_fields__ if field != "tiers")
                raise InvalidConfig(f"{name}: there is no such key; there are hbm, dram, ssd, {known}", field=name)
        sizes = {"HBM": hbm, "DRAM": dram, "SSD": ssd}
        tiers = tuple(TierConfig(tier=name, capacity=size) for name, size in sizes.items() if size is not None)
        return cls(tiers=tiers, **fields)  # type: ignore[arg-type]

    @property
    def path(self) -> Path:
        """The SSD tier's directory."""
        if self.directory is not None:
            return Path(self.directory).expanduser()
        home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(home).expanduser() / "tiercache"


def _check_types(struct: msgspec.Struct, where: str = "", *, within: str = "") -> None:
    """Raise InvalidConfig, naming key and value, for a field of another type than it is declared with.

    The message begins with `where`; `within` is a part of the key's name. msgspec checks what it decodes, but not what is handed
    to a struct's constructor.
    """
    for field, kind in _types(type(struct)).items():
        name, value = f"{within}{field}", getattr(struct, field)
        try:
            # What is only like the declared type (a list, a table in place of a TierConfig) comes back as something else.
            same = msgspec.convert(value, kind) == value
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"{where}{name}: {value!r} cannot be: {error}", field=name, value=value) from error
        if not same:
            raise InvalidConfig(f"{where}{name}: {value!r} is no {getattr(kind, '__name__', kind)}", field=name, value=value)


@functools.cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check(config: Config) -> None:
    names = [tier.tier for tier in config.tiers]
    known = [tier.name for tier in sorted(Tier, reverse=True)]
    for name in names:
        if name not in known:
            raise InvalidConfig(f"tiers: {name!r} is not a tier; the tiers are {', '.join(known)}", field="tiers", value=name)
    if not names:
        raise InvalidConfig("tiers: at least one tier is needed", field="tiers", value=names)
    if names != [name for name in known if name in names]:
        raise InvalidConfig(
            f"tiers: must be listed fastest first and once each, not {', '.join(names)}", field="tiers", value=names
        )
    for tier in config.tiers:
        _check_size(f"tiers: capacity of {tier.tier}", "capacity", tier.capacity)
    _check_size("batch_bytes", "batch_bytes", config.batch_bytes)
    if config.directory is not None and ("\0" in config.directory or not config.directory):
        raise InvalidConfig(f"directory: {config.directory!r} is no path", field="directory", value=config.directory)
    if require_name(config.device) != CPU and Tier.HBM.name not in names:
        raise InvalidConfig(
            f"device: the HBM tier lies on {config.device!r}, and tiers has none", field="device", value=config.device
        )
    if config.codec not in ("raw", "zstd"):
        raise InvalidConfig(f"codec: must be 'raw' or 'zstd', not {config.codec!r}", field="codec", value=config.codec)
    for name, low, high in (
        ("admit_ms", 0, 600_000),
        ("promote_ms", 0, 600_000),
        ("drain_seconds", 0, 86_400),
        ("copy_threads", 1, 64),
        ("read_threads", 1, 64),
        ("max_tokens", 1, 1 << 26),
        ("write_through_hits", 1, 1 << 20),
        ("watermark_low", 0, 0.5),
        ("watermark_high", 0, 0.5),
        ("lease_share", 0, 1),
    ):
        value = getattr(config, name)
        if not low <= value <= high:
            raise InvalidConfig(f"{name}: must lie between {low} and {high}, not {value}", field=name, value=value)
    if config.watermark_low > config.watermark_high:
        raise InvalidConfig(
            f"watermark_low ({config.watermark_low}) lies above watermark_high ({config.watermark_high})", field="watermark_low"
        )
    if config.write_policy not in ("back", "through", "selective"):
        raise InvalidConfig(
            f"write_policy: must be 'back', 'through' or 'selective', not {config.write_policy!r}",
            field="write_policy",
            value=config.write_policy,
        )
    _check_prefetch(config)
    _check_daemon(config)
    total = 0.0
    for share in config.shares:
        if not 0 < share.fraction <= 1 or share.block_bytes < 1:
            raise InvalidConfig(f"shares: fraction must lie in (0, 1] and block_bytes above 0, not {share}", field="shares")
        total += share.fraction
    if total > 1.000001:
        raise InvalidConfig(f"shares: the fractions add up to {total:g}; the limit is 1", field="shares", value=total)
    if len({share.block_bytes for share in config.shares}) != len(config.shares):
        raise InvalidConfig("shares: block_bytes is listed twice", field="shares")


def _check_prefetch(config: Config) -> None:
    try:
        PrefetchPolicy.of(config.prefetch)
    except InvalidInput as error:
        raise InvalidConfig(str(error), field="prefetch", value=config.prefetch) from error


def _check_daemon(config: Config) -> None:
    if (config.admin is None) != (config.admin_token_file is None):
        raise InvalidConfig("admin and admin_token_file belong together: on TCP nothing is answered without a token", field="admin")
    if config.admin is not None:
        host, colon, port = config.admin.rpartition(":")
        if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
            raise InvalidConfig(f"admin: must be an address and a port, not {config.admin!r}", field="admin", value=config.admin)
    for name in ("sessions", "requests", "leases", "reservations", "prompts"):
        count = getattr(config.limits, name)
        if not 1 <= count <= 1 << 20:
            raise InvalidConfig(
                f"limits.{name}: must lie between 1 and {1 << 20}, not {count}", field=f"limits.{name}", value=count
            )
    for name in ("write_seconds", "lease_seconds"):
        seconds = getattr(config.limits, name)
        if not 0.1 <= seconds <= 86_400:
            raise InvalidConfig(
                f"limits.{name}: must lie between 0.1 and 86400, not {seconds}", field=f"limits.{name}", value=seconds
            )
    least = config.limits.sessions + 1  # each session may have one for descriptors, and it has to come in
    if not least <= config.limits.most_connections <= 1 << 22:
        raise InvalidConfig(
            f"limits.connections: must lie between {least} (sessions and one) and {1 << 22}, not {config.limits.connections}",
            field="limits.connections",
            value=config.limits.connections,
        )
    if not 0 < config.limits.idle_seconds <= 3600:
        raise InvalidConfig(
            f"limits.idle_seconds: must lie above 0 and be at most 3600, not {config.limits.idle_seconds}",
            field="limits.idle_seconds",
            value=config.limits.idle_seconds,
        )
    for name in ("prompt_bytes", "queued_bytes"):
        _check_size(f"limits.{name}", f"limits.{name}", getattr(config.limits, name))


def _check_size(where: str, name: str, value: str | int) -> None:
    try:
        parse_size(value)
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error}", field=name, value=value) from error
