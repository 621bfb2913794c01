"""A tiered KV cache: attention KV in HBM, DRAM and SSD, given back by longest token prefix.

This module is the face. What lives in the service is handed on lazily, so that `import tiercache` loads neither torch nor a
store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiercache.config import Config, Share, TierConfig
from tiercache.errors import (
    AuditFailed,
    Closed,
    DirectoryLocked,
    DirectoryRefused,
    InvalidConfig,
    InvalidInput,
    InvalidSpec,
    InvalidStart,
    InvalidTensor,
    InvalidTokens,
    LeaseError,
    LeaseLost,
    LeaseReleased,
    MemoryRefused,
    NoShare,
    Refused,
    SpecMismatch,
    StaleHandle,
    StoreError,
    StoreFull,
    TierCacheError,
    TierTooSmall,
    UnsupportedSpec,
    Untrusted,
)
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

if TYPE_CHECKING:
    from tiercache.service.face import Stored
    from tiercache.service.inprocess import TierCache

__version__ = "0.1.0"

_LAZY = {"TierCache": "tiercache.service.inprocess", "Stored": "tiercache.service.face"}

__all__ = [
    "AuditFailed",
    "Closed",
    "Config",
    "DirectoryLocked",
    "DirectoryRefused",
    "InvalidConfig",
    "InvalidInput",
    "InvalidSpec",
    "InvalidStart",
    "InvalidTensor",
    "InvalidTokens",
    "KVSpec",
    "LeaseError",
    "LeaseLost",
    "LeaseReleased",
    "MemoryRefused",
    "Namespace",
    "NoShare",
    "Refused",
    "Share",
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
    "UnsupportedSpec",
    "Untrusted",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
