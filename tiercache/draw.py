"""The tree, drawn as text with its tiers."""

from __future__ import annotations

from collections.abc import Callable

from tiercache.residency import Space
from tiercache.tree import Node
from tiercache.types import Tier

Label = Callable[[Node], str]


def draw(space: Space, tiers: tuple[Tier, ...], *, label: Label | None = None, limit: int = 200) -> str:
    """Return the tree of a namespace, one line a node: tier tag, blocks, further copies in parentheses, leases.

    `label` adds a text to a node. Lines after the first `limit` are counted, not drawn.
    """
    lines = ["root"]
    total = 0
    stack: list[tuple[Node, str, bool]] = _children(space.tree.root, "")
    while stack:
        node, indent, last = stack.pop()
        total += 1
        if total <= limit:
            lines.append(f"{indent}{'└─' if last else '├─'} {_describe(node, tiers)}{'  ' + label(node) if label else ''}")
        stack.extend(_children(node, indent + ("   " if last else "│  ")))
    if total > limit:
        lines.append(f"… and {total - limit} more nodes")
    return "\n".join(lines)


def _children(node: Node, indent: str) -> list[tuple[Node, str, bool]]:
    children = list((node.children or {}).values())
    children.reverse()
    return [(child, indent, place == 0) for place, child in enumerate(children)]


def _describe(node: Node, tiers: tuple[Tier, ...]) -> str:
    held = [tiers[position].name for position in range(len(tiers)) if node.copies >> position & 1]
    first = held[0] if held else "nowhere"
    more = f" (+{', '.join(held[1:])})" if len(held) > 1 else ""
    blocks = len(node.blocks)
    lease = "  leased" if node.holds else ""
    return f"[{first}]{more} {blocks} block{'s' if blocks != 1 else ''}{lease}"
