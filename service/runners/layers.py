"""The layers of a hit on their way into a room, while the model computes with those that are there."""

from __future__ import annotations

import threading

from tiercache.errors import LeaseLost

PATIENCE = 30.0
"""Seconds that a model waits for one layer. A copy between memories takes milliseconds: what takes longer never comes."""


class Arriving:
    """Which layers have arrived. The event loop says so, the model's thread waits; that thread never waits for ever."""

    def __init__(self, layers: int) -> None:
        self._there = [threading.Event() for _ in range(layers)]
        self._over = False
        self.late = False
        """Whether it was given up because a layer took too long."""

    @property
    def is_over(self) -> bool:
        """Whether no more layers are to come: one has failed, or nobody wants them."""
        return self._over

    def arrived(self, layer: int) -> None:
        """Let the model go on that waits for a layer."""
        self._there[layer].set()

    def give_up(self) -> None:
        """Let the model wait no more; what has not arrived never will."""
        self._over = True
        for event in self._there:
            event.set()

    def wait(self, layer: int) -> None:
        """Wait until a layer has arrived; for the model's thread. Raises LeaseLost when it will not."""
        # After `give_up` all events are set: a pass whose result nobody can use ends at its next layer.
        if not self._there[layer].wait(PATIENCE):
            self.late = True
            self.give_up()
        if self._over:
            raise LeaseLost(f"layer {layer} of the cached prefix did not arrive", layer=layer)
