"""The tree as text."""

from __future__ import annotations

from textwrap import dedent

from tests.core.house import DRAM, TIERS, House
from tiercache.draw import draw


def test_an_empty_tree_is_its_root() -> None:
    """Nothing hangs below."""
    assert draw(House().space(), TIERS) == "root"


def test_a_line_says_tier_blocks_copies_and_whether_it_is_leased() -> None:
    """Branches are drawn in the order in which they came."""
    house = House()
    house.put([1, 2], position=DRAM)
    house.put([1, 2, 3], position=DRAM)
    house.persist([1, 2])
    house.promote([1, 2])
    house.put([4])
    with house.leased([1, 2, 3]), house.leased([1, 2]):
        drawn = draw(house.space(), TIERS, label=lambda node: f"#{node.key[0]}")

    assert drawn == dedent(
        """\
        root
        ├─ [HBM] (+DRAM, SSD) 2 blocks  leased  #1
        │  └─ [DRAM] 1 block  leased  #3
        └─ [HBM] 1 block  #4"""
    )


def test_long_drawings_are_cut_and_counted() -> None:
    """A hundred thousand nodes are no drawing."""
    house = House(hbm=10)
    for token in range(10):
        house.put([token])

    assert draw(house.space(), TIERS, limit=3).splitlines()[-1] == "… and 7 more nodes"
    assert len(draw(house.space(), TIERS, limit=3).splitlines()) == 5
