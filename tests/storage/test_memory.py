"""Host memory is there before it is promised, can't be resized, and is gone with its last user; limits are found and named."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import Closed, MemoryRefused
from tiercache.storage.memory import HostMemory, MemoryLimit, memory_limit, require_memory

MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712\n"


def descriptors() -> set[str]:
    return {link for name in os.listdir("/proc/self/fd") if (link := _target(name))}


def _target(name: str) -> str:
    try:
        return f"{name} {os.readlink(f'/proc/self/fd/{name}')}"
    except OSError:  # the descriptor that listed the folder
        return ""


def test_memory_is_zeros_of_the_size_asked_for() -> None:
    """Fresh memory is zeros, exactly as long as asked for, not only rounded to pages."""
    memory = HostMemory(MIB + 5)

    assert (memory.size, memory.array.shape) == (MIB + 5, (MIB + 5,))
    assert os.fstat(memory.descriptor).st_size == MIB + 5
    assert not memory.array.any()
    memory.close()


def test_memory_is_allocated_when_the_constructor_returns() -> None:
    """Every page is there before the first touch: a size alone would be a bus error later."""
    memory = HostMemory(3 * MIB)

    assert os.fstat(memory.descriptor).st_blocks * 512 >= 3 * MIB
    memory.close()


def test_the_descriptor_maps_the_same_bytes() -> None:
    """What one process writes through the descriptor the other sees."""
    memory = HostMemory(8192)
    other = mmap.mmap(memory.descriptor, 8192)

    memory.array[4096:4101] = np.frombuffer(b"hello", np.uint8)
    other[0:3] = b"abc"

    assert other[4096:4101] == b"hello"
    assert memory.array[:4].tobytes() == b"abc\0"
    other.close()
    memory.close()


@pytest.mark.parametrize("size", [4096, 12288])
def test_nobody_can_resize_the_memory(size: int) -> None:
    """Shrinking would be a bus error for all who map it; the seals forbid it, and can't be changed either."""
    memory = HostMemory(8192)

    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    assert os.fstat(memory.descriptor).st_size == 8192
    memory.close()


def test_the_descriptor_is_not_inherited() -> None:
    """A child gets the memory only when it is handed over."""
    memory = HostMemory(4096)

    assert not os.get_inheritable(memory.descriptor)
    memory.close()


def test_a_reader_can_read_and_not_write() -> None:
    """A read-only descriptor shows the bytes and refuses a writable mapping."""
    memory = HostMemory(4096)
    memory.array[:2] = 7
    reader = memory.open_readonly()

    with pytest.raises(PermissionError):
        mmap.mmap(reader, 4096)
    with mmap.mmap(reader, 4096, prot=mmap.PROT_READ) as view:
        seen = view[:3]

    assert seen == b"\x07\x07\x00"
    assert not os.get_inheritable(reader)
    os.close(reader)
    memory.close()


def test_views_outlive_the_memory_and_then_everything_is_gone() -> None:
    """Closing under a view is no crash: its bytes stay until it goes, and with it the last descriptor and mapping."""
    before = descriptors()
    memory = HostMemory(MIB)
    memory.array[:] = 9
    view = memory.array[4096:].reshape(-1, 1024)

    memory.close()
    memory.close()
    view[0, 0] = 10
    total = int(view.sum())
    del view

    assert total == 9 * (MIB - 4096) + 1
    assert descriptors() == before


def test_closed_memory_says_so() -> None:
    """After closing, neither bytes nor descriptors are handed out; a number would name another file by then."""
    memory = HostMemory(4096)
    memory.close()

    for ask in (lambda: memory.array, lambda: memory.descriptor, memory.open_readonly):
        with pytest.raises(Closed):
            ask()


def test_forgotten_memory_is_given_back() -> None:
    """Memory that nobody closed goes with its last reference."""
    before = descriptors()
    memory = HostMemory(4096)
    during = descriptors()

    del memory
    gc.collect()

    assert len(during) > len(before)
    assert descriptors() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_memory_that_cannot_be_had_is_refused_by_size(code: int) -> None:
    """A failed allocation is MemoryRefused with the size and the reason, at once, and leaves no descriptor."""
    before = descriptors()

    def allocate(descriptor: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(MemoryRefused, match=r"64\.0 MiB \(67108864 bytes\)") as caught:
        HostMemory(64 * MIB, allocate=allocate)

    assert caught.value.fields == {"size": 64 * MIB, "errno": code}
    assert os.strerror(code) in str(caught.value)
    assert descriptors() == before


def test_an_interrupted_allocation_leaves_no_descriptor() -> None:
    """What is no error of the system passes through, and the descriptor is closed all the same."""
    before = descriptors()

    def allocate(descriptor: int, offset: int, length: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HostMemory(4096, allocate=allocate)

    assert descriptors() == before


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that fails after the allocation is refused the same way, and the allocated memory goes back."""
    before = descriptors()

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryRefused, match="8192 bytes"):
        HostMemory(8192)

    assert descriptors() == before


def test_memory_above_the_limit_is_not_even_tried() -> None:
    """More than the machine has is refused before the kernel is asked, which would allocate until something is killed."""
    asked: list[int] = []

    with pytest.raises(MemoryRefused, match=str(1 << 62)):
        HostMemory(1 << 62, allocate=lambda descriptor, offset, length: asked.append(length))

    assert asked == []


@pytest.mark.parametrize("size", [0, -1])
def test_memory_has_at_least_one_byte(size: int) -> None:
    """Nothing, and less, is refused."""
    with pytest.raises(MemoryRefused, match=str(size)):
        HostMemory(size)


class Machine:
    """A machine in a folder: what the kernel shows under /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"

    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, text: str) -> None:
        self.write(self.proc / "self" / "cgroup", text)

    def total(self, kib: int) -> None:
        self.write(self.proc / "meminfo", f"MemTotal:       {kib} kB\nMemFree:  17 kB\n")

    def limit(self) -> MemoryLimit | None:
        return memory_limit(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_groups_is_bounded_by_its_memory(machine: Machine) -> None:
    """MemTotal is the limit, in bytes, where no group says less."""
    machine.total(2048)

    assert machine.limit() == MemoryLimit(2 * MIB, str(machine.proc / "meminfo"))


def test_a_machine_that_tells_nothing_bounds_nothing(machine: Machine) -> None:
    """Without any file there is no limit to find, and every need passes."""
    assert machine.limit() is None
    require_memory(1 << 60, proc=machine.proc, cgroup=machine.cgroup)


@given(
    limits=st.lists(st.none() | st.integers(1, 1 << 40), min_size=1, max_size=6),
    total=st.integers(1, 1 << 32),
    version=st.sampled_from([1, 2]),
)
def test_the_least_limit_of_all_groups_up_to_the_root_counts(
    tmp_path_factory: pytest.TempPathFactory, limits: list[int | None], total: int, version: int
) -> None:
    """A group is bounded by its own limit and by those of all groups around it, in both versions."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.total(total)
    root, name, unlimited = (
        (machine.cgroup, "memory.max", "max\n")
        if version == 2
        else (machine.cgroup / "memory", "memory.limit_in_bytes", UNLIMITED_V1)
    )
    path = ""
    for depth, limit in enumerate(limits):
        path += f"/g{depth}" if depth else ""
        machine.write(root / path.lstrip("/") / name, unlimited if limit is None else f"{limit}\n")
    machine.group(f"0::{path or '/'}\n" if version == 2 else f"5:devices:/x\n4:cpu,memory:{path or '/'}\n0::/\n")

    found = machine.limit()

    assert found is not None
    assert found.bytes == min([total * 1024, *(limit for limit in limits if limit is not None)])


def test_a_group_that_lies_outside_of_what_is_mounted_still_counts(machine: Machine) -> None:
    """In a container the process's path may be the host's, while the mount shows the container's group as its root."""
    machine.total(1 << 20)
    machine.group("4:memory:/docker/0123\n0::/../../docker/0123\n")
    machine.write(machine.cgroup / "memory" / "memory.limit_in_bytes", "5000000\n")
    machine.write(machine.cgroup / "memory.max", "4000000\n")

    assert machine.limit() == MemoryLimit(4_000_000, str(machine.cgroup / "memory.max"))


def test_a_group_of_another_path_does_not_count(machine: Machine) -> None:
    """The limit of a neighbour is not ours."""
    machine.total(1000)
    machine.group("0::/ours\n")
    machine.write(machine.cgroup / "theirs" / "memory.max", "1\n")
    machine.write(machine.cgroup / "ours" / "memory.max", "max\n")

    assert machine.limit() == MemoryLimit(1_024_000, str(machine.proc / "meminfo"))


@pytest.mark.parametrize("text", ["", "max", "-1", "a lot", "\x00", "1e9"])
def test_a_limit_that_is_no_number_bounds_nothing(machine: Machine, text: str) -> None:
    """A file that says something else than a number is passed over."""
    machine.total(1000)
    machine.group(f"0::/g\n{text}\n")
    machine.write(machine.cgroup / "g" / "memory.max", text)

    assert machine.limit() == MemoryLimit(1_024_000, str(machine.proc / "meminfo"))


def test_a_need_above_the_limit_is_refused_with_both(machine: Machine) -> None:
    """The error names the need, the limit and where the limit stands; a need of exactly the limit passes."""
    machine.total(1 << 30)
    machine.group("0::/box\n")
    machine.write(machine.cgroup / "box" / "memory.max", str(512 * MIB))
    require_memory(512 * MIB, proc=machine.proc, cgroup=machine.cgroup)

    with pytest.raises(MemoryRefused, match=r"2\.0 GiB .*limit is 512\.0 MiB") as caught:
        require_memory(2048 * MIB, proc=machine.proc, cgroup=machine.cgroup)

    assert caught.value.fields == {"need": 2048 * MIB, "limit": 512 * MIB, "source": str(machine.cgroup / "box" / "memory.max")}


def test_this_machine_has_a_limit() -> None:
    """The real files are read: this process has some limit, and what it uses is within it."""
    limit = memory_limit()

    assert limit is not None
    assert limit.bytes >= 64 * MIB


def test_other_threads_run_while_pages_are_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps, all of them, and also where the kernel can't: a daemon answers `starting` meanwhile."""
    asked: list[tuple[int, int]] = []

    class Advised(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            asked.append((start, length))
            if start:
                raise OSError(errno.EINVAL, "an old kernel")
            super().madvise(option, start, length)

    monkeypatch.setattr("tiercache.storage.memory.mmap.mmap", Advised)
    memory = HostMemory(40 << 20)
    try:
        assert asked == [(0, 16 << 20), (16 << 20, 16 << 20)] and not memory.array.any()
    finally:
        memory.close()
