"""What the cache makes of a real model: what a hit adds to a pass, what a miss costs, beside the same model without the cache.

The model is SmolLM2-135M in one thread of torch, the cache a daemon of its own, as users run it, and once more in this process.
"""

from __future__ import annotations

import importlib
import importlib.util

from tiercache.bench.figures import Figure
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run


def _beside(figure: Figure) -> bool:
    return figure.at["cache"] != "in process"


PLOTS = (
    Plot(
        "runner-first-token",
        "Time to the first token: a prefix, and 32 tokens after it",
        ("first token",),
        x="tokens",
        series=("KV from",),
        chosen=_beside,
    ),
    Plot(
        "runner-added",
        "What a hit adds to the pass with its KV in RAM",
        ("added",),
        x="tokens",
        series=("KV from",),
        chosen=_beside,
    ),
    Plot(
        "runner-added-ratio",
        "What a hit adds, beside what it may add",
        ("added",),
        x="tokens",
        series=("KV from",),
        of="ratio",
        chosen=_beside,
        limit=1.0,
        label="added / (bytes at the machine's rate + allowance)",
    ),
    Plot(
        "runner-misses",
        "When nothing hits: with the cache, beside without it",
        ("first token, no hit", "tokens a second, no hit", "tokens a second after the first"),
        x="prompt tokens",
        series=("name", "cache"),
        of="ratio",
        limit=1.0,
    ),
)


def measure(run: Run) -> None:
    """Measure hits and misses of the packaged model; of a small one with random weights in a quick run."""
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            run.note(f"{needed} is not installed: pip install 'tiercache[runner]'; nothing was measured")
            return
    # By name: torch and transformers take seconds to load, and may not be there.
    importlib.import_module("tiercache.bench.runner_parts").measure(run)
