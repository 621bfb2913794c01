"""Loading a model from a folder, and the namespace that tells its weights from others."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tiercache.errors import Refused
from tiercache.service.runners import model as module
from tiercache.service.runners.model import load_model, weights_digest


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> Path:
    """The tiny model as a folder on disk."""
    folder = tmp_path / "tiny-llama"
    tiny_model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))).save_pretrained(folder)
    return folder


def test_folder_is_loaded_without_the_network(folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local model comes from its folder alone, with the digest of its weights as its identity."""

    def refuse(*_: object) -> None:
        raise AssertionError("a look at the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    loaded = load_model(str(folder), threads=None)

    assert all(torch.equal(mine, saved) for mine, saved in zip(loaded.model.parameters(), tiny_model.parameters(), strict=True))
    assert not loaded.model.training
    assert loaded.tokenizer.decode([0]) == "a"
    assert loaded.namespace.model == "tiny-llama"
    assert loaded.namespace.weights == "sha256:" + hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_type_is_as_asked(folder: Path) -> None:
    """Weights, and with them the KV, have the type that was asked for."""
    assert load_model(str(folder), dtype="bfloat16", threads=None).model.dtype == torch.bfloat16


def test_threads_are_as_asked(folder: Path) -> None:
    """`threads` is torch's setting for the process."""
    before = torch.get_num_threads()
    try:
        load_model(str(folder), threads=1)

        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_digest_is_computed_once(folder: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known digest is read from the cache folder, and nothing is written beside the model."""
    before = sorted(folder.iterdir())
    first = weights_digest(folder)
    monkeypatch.setattr(module, "file_sha256", None)

    assert weights_digest(folder) == first
    assert sorted(folder.iterdir()) == before
    assert len(list((cache_home / "tiercache" / "weights").iterdir())) == 1


def test_changed_weights_have_another_digest(folder: Path) -> None:
    """A file of the same size and time, but other bytes, is read again."""
    path = folder / "model.safetensors"
    first = weights_digest(folder)
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert weights_digest(folder) != first


def test_digest_of_several_files_depends_on_each(tmp_path: Path) -> None:
    """Sharded weights count as one list of digests."""
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    first = weights_digest(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"c")

    assert weights_digest(tmp_path) != first


@pytest.mark.parametrize("what", ["empty", "no/such/../model name"])
def test_what_is_no_model_is_refused(tmp_path: Path, what: str) -> None:
    """A folder without a model, and a name that is none, are refused by name."""
    (tmp_path / "empty").mkdir()
    source = str(tmp_path / what) if what == "empty" else what

    with pytest.raises(Refused, match=what):
        load_model(source, threads=None)
