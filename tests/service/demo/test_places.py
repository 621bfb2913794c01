"""Where the demo's things lie."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tiercache.config import Config
from tiercache.errors import DirectoryRefused, InvalidConfig
from tiercache.service.address import DESCRIPTORS_SUFFIX, MOST_PATH_BYTES
from tiercache.service.demo.places import Places, to_toml


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files whose name is longer than a socket's address may be."""
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_socket_has_a_short_name_where_temporary_files_have_long_ones(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory goes where temporary files go, the sockets' folder to where both addresses fit."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))

    places = Places.choose(None)

    assert places.directory.parent == deep
    assert places.run.parent != deep and os.access(places.run.parent, os.W_OK)
    assert len(os.fsencode(places.socket)) + len(DESCRIPTORS_SUFFIX) <= MOST_PATH_BYTES


def test_where_no_name_is_short_enough_it_is_refused(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says how long a path may be."""
    monkeypatch.setattr("tiercache.service.demo.places._parents", lambda: iter([deep]))

    with pytest.raises(InvalidConfig, match=f"an address holds {MOST_PATH_BYTES}"):
        Places.choose(None)


def test_the_folder_for_sockets_is_never_the_one_that_is_kept(tmp_path: Path, temporary: Path) -> None:
    """A directory that was named may lie on any file system, and what is in it stays."""
    places = Places.choose(tmp_path / "mine")

    assert places.directory == tmp_path / "mine"
    assert places.run.parent == temporary


@pytest.mark.parametrize("name", ["plain", 'quo"ted \\ slash', "Grüße 🧊", "line\nend\ttab\x7f"])
def test_the_daemon_reads_the_configuration_that_was_written(tmp_path: Path, name: str) -> None:
    """Whatever the directory is called."""
    config = Config.of(hbm=98304, dram="128 KiB", ssd="2 MiB", directory=str(tmp_path / name), drain_seconds=10.0)
    places = Places(tmp_path / "here", tmp_path / "run")

    places.prepare(config)

    read = Config.from_toml(places.config)
    assert (read.path, read.drain_seconds) == (config.path, config.drain_seconds)
    assert [(tier.place, tier.bytes) for tier in read.tiers] == [(tier.place, tier.bytes) for tier in config.tiers]


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A file, and a name that no configuration can say."""
    (tmp_path / "file").write_text("")
    torn = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))

    with pytest.raises(DirectoryRefused, match="Not a directory"):
        Places(tmp_path / "file" / "below", tmp_path).prepare(Config.of(dram="1 MiB"))
    with pytest.raises(DirectoryRefused, match="not UTF-8"):
        Places(torn, tmp_path).prepare(Config.of(dram="1 MiB", directory=str(torn)))


def test_what_is_written_is_what_the_demo_sets() -> None:
    """Everything else of the daemon's configuration stays at its default."""
    assert to_toml(Config.of(dram="1 MiB", directory="/d", drain_seconds=1.0)) == (
        'directory = "/d"\ndrain_seconds = 1.0\n\n[[tiers]]\ntier = "DRAM"\ncapacity = 1048576\n'
    )
