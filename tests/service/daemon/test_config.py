"""What a configuration says of the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.caches import small
from tiercache.config import Config, Limits
from tiercache.errors import InvalidConfig
from tiercache.service.cli_serve import effective

FILE = '[[tiers]]\ntier = "DRAM"\ncapacity = "1 MiB"\n'


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"write_policy": "never"}, "write_policy"),
        ({"write_through_hits": 0}, "write_through_hits"),
        ({"limits": Limits(sessions=0)}, "limits.sessions"),
        ({"limits": Limits(leases=-1)}, "limits.leases"),
        ({"limits": Limits(lease_seconds=0.0)}, "limits.lease_seconds"),
        ({"limits": Limits(queued_bytes="some")}, "limits.queued_bytes: 'some'"),
        ({"admin": "127.0.0.1:9410"}, "admin"),
        ({"admin": "here", "admin_token_file": "t"}, "here"),
        ({"admin": "h:99999", "admin_token_file": "t"}, "h:99999"),
        ({"admin_token_file": "t"}, "admin"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, object], names: str) -> None:
    with pytest.raises(InvalidConfig, match=names):
        small(**fields)  # type: ignore[arg-type]


def test_an_unknown_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(FILE + "[limits]\nsession = 4\n")

    with pytest.raises(InvalidConfig, match="session"):
        Config.from_toml(tmp_path / "c.toml")


def test_the_command_line_stands_above_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('directory = "/there"\nadmit_ms = 7\n' + FILE)
    none: dict[str, str | None] = {"hbm": None, "dram": None, "ssd": None}

    found = effective(tmp_path / "c.toml", {**none, "dram": "2 MiB", "ssd": "9 MiB"}, {"directory": "/here", "admin": None})

    assert found == Config.of(dram="2 MiB", ssd="9 MiB", directory="/here", admit_ms=7)
    assert effective(None, none, {}) == Config.of(dram="1 GiB")
