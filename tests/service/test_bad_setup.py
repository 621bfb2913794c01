"""Wrong layouts, configurations and surroundings: refused by name, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.service.caches import LARGE, SIZE, SPACE, SPEC, Books, opened, opened_kv, prompt, read, small, store
from tiercache.config import Config, Share
from tiercache.errors import (
    DirectoryLocked,
    DirectoryRefused,
    InvalidConfig,
    InvalidSpec,
    MemoryRefused,
    NoShare,
    SpecMismatch,
    TierTooSmall,
    UnsupportedSpec,
)
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.directory import DataDirectory

OTHER = Namespace(model="other", weights="sha256:2")


async def test_another_layout_of_an_open_namespace_is_refused(seed: int) -> None:
    """Both layouts are named; the first one goes on, and another namespace can have a layout of the same geometry."""
    turned = dataclasses.replace(SPEC, kv_heads=2, head_dim=16)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, prompt(seed, 2))
        before = Books(cache)
        with pytest.raises(SpecMismatch, match=r"open with KVSpec\(.*kv_heads=1.*got KVSpec\(.*kv_heads=2"):
            await cache.open(SPACE, turned)
        with pytest.raises(SpecMismatch):
            await cache.open(SPACE, LARGE)
        with pytest.raises(NoShare, match="8192 bytes; to store blocks of 32768 bytes"):
            await cache.open(OTHER, LARGE)
        assert Books(cache) == before

        other = await cache.open(OTHER, turned)

        await store(other, prompt(seed, 2), space=OTHER)
        assert await read(other, prompt(seed, 2), space=OTHER) == 2 * SIZE
        assert await read(kv, prompt(seed, 2)) == 2 * SIZE
        await cache.check()


async def test_a_block_size_without_a_share_is_refused(seed: int) -> None:
    """The shares that exist are named; so is a shape that can't share slots with one of as many bytes."""
    shares = (Share(block_bytes=SPEC.block_bytes, fraction=0.5), Share(block_bytes=LARGE.block_bytes, fraction=0.5))
    deeper = dataclasses.replace(SPEC, layers=2, head_dim=64)
    async with opened(small(hbm=16, dram=16, ssd=None, shares=shares)) as cache:
        kv, large = await cache.open(SPACE, SPEC), await cache.open(OTHER, LARGE)
        third = Namespace(model="third", weights="sha256:3")
        with pytest.raises(NoShare, match=r"no share of the tiers is for blocks of 10240 bytes.*8192, 32768"):
            await cache.open(third, dataclasses.replace(SPEC, layers=5))
        with pytest.raises(NoShare, match="8192 bytes have the shape"):
            await cache.open(third, deeper)
        await store(kv, prompt(seed, 2))
        await store(large, prompt(seed, 2), space=OTHER)
        assert await read(kv, prompt(seed, 2)) == await read(large, prompt(seed, 2), space=OTHER) == 2 * SIZE


@pytest.mark.parametrize("tier", ["hbm", "dram", "ssd"])
async def test_a_tier_that_holds_no_block_is_refused(tmp_path: Path, seed: int, tier: str) -> None:
    """The tier, what it has and what it would need are named; the same cache then takes a layout that fits."""
    sizes = {"hbm": "1 MiB", "dram": "1 MiB", "ssd": "1 MiB", tier: "36 KiB"}
    tall = dataclasses.replace(LARGE, layers=8)
    config = Config.of(**sizes, directory=str(tmp_path / "ssd"))
    async with opened(config) as cache:
        with pytest.raises(TierTooSmall, match=f"{tier.upper()}.*36864 bytes.*65536|{tier.upper()}.*36864 bytes.*69632"):
            await cache.open(SPACE, tall)

        kv = await cache.open(SPACE, LARGE)

        await store(kv, prompt(seed, 1))
        assert await read(kv, prompt(seed, 1)) == SIZE
        await cache.check()


async def test_what_is_no_namespace_and_no_layout_is_refused() -> None:
    """Values of other types, split KV and other shards are refused by name."""
    wrong: list[tuple[Any, Any, type[InvalidSpec], str]] = [
        ("m", SPEC, InvalidSpec, "not str"),
        (SPACE, {"layers": 4}, InvalidSpec, "not dict"),
        (None, SPEC, InvalidSpec, "not NoneType"),
        (Namespace(model="m", weights="w", world=2), SPEC, UnsupportedSpec, "world=2"),
    ]
    async with opened_kv(small(ssd=None)) as (cache, _):
        for space, spec, kind, message in wrong:
            with pytest.raises(kind, match=message):
                await cache.open(space, spec)
        with pytest.raises(UnsupportedSpec, match="shard=1"):
            await cache.open(SPACE, SPEC, shard=1)


def _config(kind: str, **fields: Any) -> Any:
    return getattr(transformers, kind)(**fields)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (lambda: _config("LlamaConfig", num_key_value_heads=8), (32, 8, 128, False)),
        (lambda: _config("Qwen2Config", use_sliding_window=False, num_key_value_heads=4), (32, 4, 128, False)),
        (lambda: _config("MistralConfig", sliding_window=None), (32, 8, 128, False)),
        (lambda: _config("MixtralConfig"), (32, 8, 128, False)),
        (lambda: _config("DeepseekV2Config"), (32, 1, 576, True)),
        (lambda: _config("DeepseekV3Config"), (61, 1, 576, True)),
        (lambda: _config("GPT2Config"), (12, 12, 64, False)),
        (lambda: _config("FalconConfig"), (32, 1, 64, False)),
        (lambda: SimpleNamespace(num_hidden_layers=2, num_attention_heads=8, hidden_size=512), (2, 8, 64, False)),
    ],
    ids=["Llama", "Qwen2", "Mistral without window", "Mixtral", "DeepSeek-V2", "DeepSeek-V3", "GPT-2", "Falcon", "plain"],
)
def test_layouts_of_models_with_full_attention(config: Any, shape: tuple[int, int, int, bool]) -> None:
    """Layers, heads and widths are those of the model's cache; latent attention is one tensor."""
    spec = KVSpec.from_config(config(), dtype="bfloat16", block_size=32)

    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.latent) == shape
    assert (spec.dtype, spec.block_size) == ("bfloat16", 32)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (lambda: _config("MistralConfig", sliding_window=4096), "sliding"),
        (lambda: _config("Qwen2Config", use_sliding_window=True), "sliding"),
        (lambda: _config("Gemma3TextConfig"), "sliding"),
        (lambda: _config("Gemma2Config"), "sliding"),
        (lambda: _config("GptOssConfig"), "sliding"),
        (lambda: _config("Llama4TextConfig"), "chunked"),
        (lambda: _config("Qwen3NextConfig"), "linear|state|mamba"),
        (lambda: _config("MambaConfig"), "linear|state|mamba"),
        (lambda: _config("Mamba2Config"), "linear|state|mamba"),
        (lambda: _config("JambaConfig"), "linear|state|mamba"),
        (lambda: _config("RecurrentGemmaConfig"), "linear|recurrent|sliding"),
        (lambda: _config("RwkvConfig"), "state"),
        (lambda: _config("Lfm2Config"), "conv"),
        (lambda: _config("GPTNeoConfig"), "local"),
        (lambda: _config("MllamaConfig"), "cross"),
        (lambda: _config("T5Config"), "cross"),
        (lambda: _config("WhisperConfig"), "cross"),
        (lambda: _config("BartConfig"), "cross"),
        (lambda: SimpleNamespace(num_hidden_layers=2, num_attention_heads=8, hidden_size=512, state_size=16), "state"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_attention_is_refused_by_name(config: Any, kind: str) -> None:
    """A model whose cache is not one group of full attention is not guessed at."""
    with pytest.raises(UnsupportedSpec, match=kind):
        KVSpec.from_config(config())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tiers = [{tier = "DRAM", capacity = "1 MiB"}]\nwatermrk_low = 0.1', "watermrk_low"),
        ('tiers = [{tier = "DRAM", capacity = "1 MiB", size = 3}]', "size"),
        ('tiers = [{tier = "DRAM"}]', "capacity"),
        ('tiers = [{tier = "TAPE", capacity = "1 MiB"}]', "'TAPE' is not a tier; the tiers are HBM, DRAM, SSD"),
        ('tiers = [{tier = "SSD", capacity = 9}, {tier = "DRAM", capacity = 9}]', "fastest first.*SSD, DRAM"),
        ('tiers = [{tier = "DRAM", capacity = "1 MiB"}, {tier = "DRAM", capacity = 9}]', "once each.*DRAM, DRAM"),
        ("tiers = []", "at least one tier"),
        ('tiers = [{tier = "DRAM", capacity = "much"}]', "'much' is not a size"),
        ('tiers = [{tier = "DRAM", capacity = 0}]', "above zero, not 0"),
        ('tiers = [{tier = "DRAM", capacity = true}]', "capacity"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\nadmit_ms = -1', "admit_ms: must lie between 0 and 600000, not -1"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\nadmit_ms = "soon"', "admit_ms"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\ndrain_seconds = nan', "drain_seconds.*nan"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\nlease_share = 2', "lease_share.*2"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\nwatermark_low = 0.4', "watermark_low .0.4. lies above"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\ncodec = "lz4"', "codec: must be 'raw' or 'zstd', not 'lz4'"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\ndevice = "cuda"', "device: 'cuda'"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\nshares = [{block_bytes = 8, fraction = 1.5}]', "fraction=1.5"),
        ('tiers = [{tier = "DRAM", capacity = 9}]\nshares = [{block_bytes = 8, part = 1}]', "part"),
        ("tiers = [", "config.toml"),
        ("\0\1", "config.toml"),
    ],
)
def test_a_configuration_that_can_not_be(tmp_path: Path, text: str, message: str) -> None:
    """Unknown keys, at any depth, and impossible values are refused with the file, the key and what is allowed."""
    file = tmp_path / "config.toml"
    file.write_text(text)

    with pytest.raises(InvalidConfig, match=message):
        Config.from_toml(file)
    with pytest.raises(InvalidConfig, match=r"absent\.toml"):
        Config.from_toml(tmp_path / "absent.toml")
    with pytest.raises(InvalidConfig, match=str(tmp_path)):
        Config.from_toml(tmp_path)


async def test_more_memory_than_there_is_is_refused() -> None:
    """Before anything is allocated: the sum of the tiers, the limit and where that is written are named."""
    with pytest.raises(MemoryRefused, match=r"1\.\d TiB.*the limit is .*\("):
        async with opened(Config.of(hbm="600 GiB", dram="600 GiB")):
            pass


async def test_a_directory_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place or on its way, and a network file system, are refused with the path and the reason."""
    file = tmp_path / "file"
    file.write_text("")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path}/net rw - nfs4 server:/x rw\n")
    defaults = DataDirectory.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "mounts", mounts)
    for path, message in (
        (file, "File exists|Not a directory"),
        (file / "x", "File exists|Not a directory"),
        (tmp_path / "net" / "x", "nfs4"),
    ):
        with pytest.raises(DirectoryRefused, match=message) as caught:
            async with opened(small(directory=path)):
                pass
        assert str(path) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "mounts"]


def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    """On a file system mounted read-only the error says so."""
    script = f'mount -t tmpfs -o ro none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    code = (
        "import asyncio, sys; from tiercache import Config, TierCache\n"
        "async def main():\n"
        "    async with TierCache(Config.of(dram='1 MiB', ssd='1 MiB', directory=sys.argv[1] + '/ssd')): pass\n"
        "asyncio.run(main())"
    )

    done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", code], capture_output=True, text=True, check=False)

    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert "DirectoryRefused" in done.stderr and "Read-only file system" in done.stderr


async def test_a_directory_with_an_owner_is_refused(tmp_path: Path, seed: int) -> None:
    """The owner's process id is named, through a link too; the owner sees nothing, and after its end the next one gets in."""
    config = small(directory=tmp_path / "ssd")
    (tmp_path / "link").symlink_to(tmp_path / "ssd")
    async with opened_kv(config) as (_, kv):
        await store(kv, prompt(seed, 2))
        for path in (tmp_path / "ssd", tmp_path / "link"):
            with pytest.raises(DirectoryLocked, match=f"process {os.getpid()}"):
                async with opened(small(directory=path)):
                    pass
        assert await kv.flush(prompt(seed, 2)) == 2 * SIZE
    async with opened_kv(config) as (_, kv):
        assert await read(kv, prompt(seed, 2)) == 2 * SIZE


LIGHT = """
import asyncio, sys
import tiercache
from tiercache import Config, InvalidTokens, KVSpec, Namespace, TierCache

async def main():
    async with TierCache(Config.of(hbm='1 MiB', dram='1 MiB', ssd='1 MiB', directory=sys.argv[1])) as cache:
        kv = await cache.open(Namespace(model='m', weights='w'), KVSpec(layers=2, kv_heads=1, head_dim=64, dtype='float32'))
        async with kv.match(range(100), request='r') as hit:
            assert (hit.tokens, await hit.ready(), hit.take(0)) == (0, 0, 0)
        for tokens in ([-1], 'text', [1.5]):
            try:
                await kv.insert(tokens, None)
            except InvalidTokens:
                pass
        async with kv.reserve(range(100)) as room:
            assert (room.present, room.pending, room.tokens) == (0, 0, 96)
            assert await room.commit(96) == 96
        assert await kv.flush(range(100)) == await kv.prefetch(range(100)) == await kv.pin(range(100), ttl=1) == 96
        assert await kv.delete(range(100)) == 96 and await kv.clear() == 0
        await cache.check()

asyncio.run(main())
print(sorted(name for name in ('torch', 'transformers', 'cupy', 'aiohttp') if name in sys.modules))
"""


def test_no_tensor_library_before_a_tensor(tmp_path: Path) -> None:
    """Opening, matching, reserving, committing and all that deals in tokens alone load neither torch nor a server."""
    done = subprocess.run([sys.executable, "-c", LIGHT, tmp_path / "ssd"], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "[]", done.stderr
