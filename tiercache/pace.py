"""How much one move to a durable tier takes, told by how long the last ones took."""

from __future__ import annotations


class Pace:
    """`blocks` is the most that one transfer to a durable tier takes: `most`, or so few that it ends in about `seconds`.

    Large moves suit a disk, but what one frees is free at its end only: its blocks are a chain, written from the root, and the leaf
    is the first to leave the tier above. Whoever waits for that room waits for all of the move. There is no gain below `least`, and
    moves of fewer say nothing about the disk.
    """

    def __init__(self, most: int, *, least: int | None = None, seconds: float = 1.0) -> None:
        self._most = max(1, most)
        self._least = min(self._most, max(1, self._most if least is None else least))
        self._seconds = seconds
        self.blocks = self._most

    def took(self, count: int, seconds: float) -> None:
        """Note that a transfer of `count` blocks took `seconds`, what it waited for others at the disk included."""
        if count < self._least:
            return
        if seconds > self._seconds:
            self.blocks = max(self._least, min(self.blocks, int(count * self._seconds / seconds)))
        elif count >= self.blocks and seconds <= self._seconds / 2:
            self.blocks = min(self._most, 2 * self.blocks)
