"""Runners: model programs that compute with the cache. The names here load torch and transformers when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.service.runners.chat import Conversation as Conversation
    from tiercache.service.runners.chat import chat_tokens as chat_tokens
    from tiercache.service.runners.generation import Generation as Generation
    from tiercache.service.runners.generation import Stream as Stream
    from tiercache.service.runners.hf import Runner as Runner
    from tiercache.service.runners.model import Loaded as Loaded
    from tiercache.service.runners.model import load_model as load_model
    from tiercache.service.runners.packaged import packaged_model as packaged_model

_HOMES = {
    "Conversation": "chat",
    "Generation": "generation",
    "Loaded": "model",
    "Runner": "hf",
    "Stream": "generation",
    "chat_tokens": "chat",
    "load_model": "model",
    "packaged_model": "packaged",
}

__all__ = [*_HOMES]  # noqa: PLE0604 # the names are the table's keys


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
