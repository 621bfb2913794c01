"""The configuration: types, bounds and names are checked where the value is made, and the key is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiercache.config import Config, Limits, Share, TierConfig
from tiercache.errors import InvalidConfig

DRAM = TierConfig(tier="DRAM", capacity="1 MiB")


def test_what_is_right_is_taken() -> None:
    """Whole numbers are seconds and fractions, too; the same from a file."""
    shares = (Share(block_bytes=4096, fraction=1),)

    config = Config.of(hbm=4096, ssd="1 GiB", directory="~/kv", shares=shares, drain_seconds=1, admit_ms=0)

    assert [(tier.place.name, tier.bytes) for tier in config.tiers] == [("HBM", 4096), ("SSD", 1 << 30)]
    assert config.shares == shares
    assert config.path == Path("~/kv").expanduser()
    assert Config(tiers=(DRAM,)) == Config.of(dram="1 MiB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("admit_ms", None),
        ("admit_ms", -1),
        ("admit_ms", 600_001),
        ("batch_bytes", 0),
        ("batch_bytes", "5 apples"),
        ("batch_bytes", None),
        ("codec", "gzip"),
        ("codec", []),
        ("copy_threads", "2"),
        ("copy_threads", 1.5),
        ("copy_threads", 2.0),
        ("copy_threads", True),
        ("copy_threads", 0),
        ("device", "cuda"),
        ("device", "cuda:0"),
        ("device", 0),
        ("directory", 5),
        ("directory", "a\0b"),
        ("directory", ""),
        ("directory", Path("kv")),
        ("drain_seconds", "30"),
        ("drain_seconds", True),
        ("drain_seconds", float("nan")),
        ("lease_share", 1.5),
        ("max_tokens", 1e6),
        ("promote_ms", [2000]),
        ("read_threads", None),
        ("shares", None),
        ("shares", (0.5,)),
        ("shares", [Share(block_bytes=4096, fraction=1.0)]),
        ("shares", ({"block_bytes": 4096, "fraction": 1.0},)),
        ("watermark_high", "0.05"),
        ("watermark_low", None),
        ("watermark_low", 10**400),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "make", [lambda **fields: Config.of(dram="1 MiB", **fields), lambda **fields: Config(tiers=(DRAM,), **fields)]
)
def test_a_value_that_cannot_be_is_refused(make: Any, name: str, value: object) -> None:
    """By either way to make one, before anything is opened; the error names key and value."""
    with pytest.raises(InvalidConfig) as caught:
        make(**{name: value})

    assert caught.value.fields["field"] == name
    assert name in str(caught.value)
    assert str(value) in str(caught.value) or repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["nope", "tiers", "HBM", "_check"])
def test_a_key_that_does_not_exist_is_refused(name: str) -> None:
    """A misspelt key is not silently without effect, nor a TypeError."""
    with pytest.raises(InvalidConfig) as caught:
        Config.of(dram="1 MiB", **{name: 1})

    assert caught.value.fields["field"] == name


@pytest.mark.parametrize("tiers", [None, (), ("DRAM",), [DRAM], ({"tier": "DRAM", "capacity": 5},), (DRAM, DRAM)], ids=repr)
def test_tiers_are_a_tuple_of_tiers(tiers: Any) -> None:
    """At least one, each of them a TierConfig."""
    with pytest.raises(InvalidConfig) as caught:
        Config(tiers=tiers)

    assert caught.value.fields["field"] == "tiers"


@pytest.mark.parametrize("size", [1.5, True, [], "", "-1", 0, b"1 MiB"], ids=repr)
def test_a_capacity_that_cannot_be_is_refused(size: Any) -> None:
    """With the key and the value, whatever tier it is."""
    with pytest.raises(InvalidConfig) as caught:
        Config.of(dram=size)

    assert caught.value.fields["field"] == "capacity"
    assert caught.value.fields["value"] == size


@pytest.mark.parametrize(
    ("kind", "fields", "wrong"),
    [
        (TierConfig, {"tier": 3, "capacity": 5}, "tier"),
        (TierConfig, {"tier": "DRAM", "capacity": None}, "capacity"),
        (Share, {"block_bytes": 1.5, "fraction": 1.0}, "block_bytes"),
        (Share, {"block_bytes": "4096", "fraction": 1.0}, "block_bytes"),
        (Share, {"block_bytes": 4096, "fraction": "x"}, "fraction"),
        (Share, {"block_bytes": 4096, "fraction": None}, "fraction"),
        (Share, {"block_bytes": 4096, "fraction": float("nan")}, "fraction"),
        (Limits, {"sessions": "7"}, "limits.sessions"),
        (Limits, {"requests": 1.5}, "limits.requests"),
        (Limits, {"idle_seconds": None}, "limits.idle_seconds"),
        (Limits, {"write_seconds": float("nan")}, "limits.write_seconds"),
    ],
)
def test_tiers_shares_and_limits_check_their_own_fields(kind: Any, fields: dict[str, Any], wrong: str) -> None:
    """Where they are made, not where the configuration is."""
    with pytest.raises(InvalidConfig) as caught:
        kind(**fields)

    assert caught.value.fields["field"] == wrong


@pytest.mark.parametrize("text", ["copy_threads = '2'", "nope = 1", "admit_ms = 1.5", "codec = 'gzip'", "= 1"])
def test_a_file_that_cannot_be_is_refused(text: str, tmp_path: Path) -> None:
    """With the file's name, and what the value itself would say."""
    path = tmp_path / "tiercache.toml"
    path.write_text(f"{text}\n[[tiers]]\ntier = 'DRAM'\ncapacity = '1 MiB'\n")

    with pytest.raises(InvalidConfig) as caught:
        Config.from_toml(path)

    assert str(path) in str(caught.value)


def test_a_file_says_the_same_as_arguments(tmp_path: Path) -> None:
    """Tables become the same values."""
    path = tmp_path / "tiercache.toml"
    path.write_text(
        "copy_threads = 3\n[[tiers]]\ntier = 'DRAM'\ncapacity = '1 MiB'\n[[shares]]\nblock_bytes = 4096\nfraction = 1\n"
    )

    assert Config.from_toml(path) == Config.of(dram="1 MiB", copy_threads=3, shares=(Share(block_bytes=4096, fraction=1.0),))
