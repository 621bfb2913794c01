"""Getting a model: weights, tokenizer, and the namespace that says whose KV it computes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from tiercache.errors import Refused
from tiercache.service.runners.packaged import NAME, Progress, cache_folder, file_sha256, packaged_model, silent
from tiercache.spec import Namespace

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


class Loaded(NamedTuple):
    """A model that is ready to run, its tokenizer, and the namespace of the KV that it computes."""

    model: Any
    tokenizer: Any
    namespace: Namespace


def load_model(
    source: str | None = None, *, dtype: str = "float32", threads: int | None = 1, progress: Progress = silent
) -> Loaded:
    """Load the model `source`: a folder, a GGUF file, a name on the hub, or None for the packaged small model.

    `dtype` is the type of weights and KV (give `KVSpec.from_config` the same). `threads` sets torch's threads for the whole
    process: one is best where other programs want the cores (two gave 1.6 times faster prefill on two idle cores, and no
    faster decoding); None leaves torch's own choice. A local model is loaded without a look at the network.

    The namespace's `weights` is the SHA-256 of the weight files; it is computed once (about 2 s/GiB) and kept in the cache
    folder. Raises Refused when there is no such model or it has no safetensors weights, and what `packaged_model` raises.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    path = packaged_model(progress=progress) if source is None else _local(source)
    progress("loading the model", None)
    if path.suffix == ".gguf":
        place, extra = path.parent, {"gguf_file": path.name}
        quantised = {"quantization_config": GgufConfig(dequantize=True)}
    else:
        place, extra, quantised = path, {}, {}
    kind: Any = AutoModelForCausalLM
    try:
        with _no_bars():  # progress is the caller's to show
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **extra)
            model = kind.from_pretrained(place, dtype=getattr(torch, dtype), local_files_only=True, **extra, **quantised).eval()
    except (OSError, ValueError) as error:
        raise Refused(f"{path} can't be loaded as a model: {error}", source=str(path)) from error
    name = NAME if source is None else (path.name if Path(source).expanduser().exists() else source)
    return Loaded(model, tokenizer, Namespace(model=name, weights=f"sha256:{weights_digest(path, progress)}"))


def weights_digest(path: Path, progress: Progress = silent) -> str:
    """Return the SHA-256 of a GGUF file or of a folder's safetensors files, from the cache folder if it is known there.

    What is known is filed under each file's path, inode, size and times of change, so that a changed file is read again.
    Several files count as the digest of the list of their digests. Raises Refused when there is no such file.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise Refused(f"{path} holds no safetensors weights", source=str(path))
    marks = [(file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file in files for stat in [file.stat()]]
    known = cache_folder() / "weights" / hashlib.sha256(repr((str(path.resolve()), marks)).encode()).hexdigest()
    if known.is_file():
        return known.read_text().strip()
    digests = [file_sha256(file, lambda fraction: progress("checking the weights", fraction)) for file in files]
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest()
    known.parent.mkdir(parents=True, exist_ok=True)
    fresh = known.with_name(f"{known.name}.{os.getpid()}")
    fresh.write_text(digest + "\n")
    fresh.replace(known)
    return digest


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _local(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    try:
        return Path(snapshot_download(source, allow_patterns=_WANTED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise Refused(f"{source!r} is neither a folder here nor a model that the hub gives: {error}", source=source) from error
