"""A tiered KV cache: attention KV in HBM, DRAM and SSD, given back by longest token prefix.

This module is the face. What lives in the service is handed on lazily, so that `import tiercache` loads neither torch nor a
store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiercache.config import Config, Limits, Share, TierConfig
from tiercache.errors import (
    AuditFailed,
    Closed,
    DeviceRefused,
    DirectoryLocked,
    DirectoryRefused,
    InvalidConfig,
    InvalidFrame,
    InvalidInput,
    InvalidSpec,
    InvalidStart,
    InvalidTensor,
    InvalidTokens,
    JoinRefused,
    LeaseError,
    LeaseLost,
    LeaseReleased,
    LimitReached,
    MemoryRefused,
    NoShare,
    Refused,
    SocketRefused,
    SpecMismatch,
    StaleHandle,
    StoreError,
    StoreFull,
    TierCacheError,
    TierTooSmall,
    UnknownHandle,
    UnsupportedSpec,
    Untrusted,
    VersionMismatch,
    WorkerDied,
)
from tiercache.leases import Refusal
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

if TYPE_CHECKING:
    from tiercache.service.client.blocking import BlockingClient
    from tiercache.service.client.client import connect
    from tiercache.service.face import Extent, Stored
    from tiercache.service.inprocess import TierCache

__version__ = "0.1.0"

_LAZY = {
    "BlockingClient": "tiercache.service.client.blocking",
    "Extent": "tiercache.service.face",
    "Stored": "tiercache.service.face",
    "TierCache": "tiercache.service.inprocess",
    "connect": "tiercache.service.client.client",
}

__all__ = [
    "AuditFailed",
    "BlockingClient",
    "Closed",
    "Config",
    "DeviceRefused",
    "DirectoryLocked",
    "DirectoryRefused",
    "Extent",
    "InvalidConfig",
    "InvalidFrame",
    "InvalidInput",
    "InvalidSpec",
    "InvalidStart",
    "InvalidTensor",
    "InvalidTokens",
    "JoinRefused",
    "KVSpec",
    "LeaseError",
    "LeaseLost",
    "LeaseReleased",
    "LimitReached",
    "Limits",
    "MemoryRefused",
    "Namespace",
    "NoShare",
    "Refusal",
    "Refused",
    "Share",
    "SocketRefused",
    "SpecMismatch",
    "StaleHandle",
    "StoreError",
    "StoreFull",
    "Stored",
    "Tier",
    "TierCache",
    "TierCacheError",
    "TierConfig",
    "TierTooSmall",
    "UnknownHandle",
    "UnsupportedSpec",
    "Untrusted",
    "VersionMismatch",
    "WorkerDied",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
