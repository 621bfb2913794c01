"""A client that needs nothing but the standard library, so that it runs under any Python: `attach.py DESCRIPTORS FETCH END`.

It fetches descriptors with the frame FETCH (hexadecimal), maps all of them, reads every page, writes nothing, and ends as END
says: `return`, `exit`, `exception`, `terminated` or `killed`. A tracker of resources, such as would unlink shared memory that it
has heard of, runs beside it.
"""

import mmap
import os
import signal
import socket
import sys
from multiprocessing import resource_tracker

MOST = 64


def main(path: str, fetch: str, end: str) -> None:
    """Attach and end."""
    resource_tracker.ensure_running()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(path)
    link.send(bytes.fromhex(fetch))
    packet, descriptors, _, _ = socket.recv_fds(link, 65536, MOST)
    assert descriptors, packet
    maps = []
    for descriptor in descriptors:
        maps.append(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        os.close(descriptor)
    total = sum(sum(each[:: mmap.PAGESIZE]) for each in maps)
    print(len(maps), total, flush=True)
    if end == "exit":
        sys.exit(3)
    if end == "exception":
        raise RuntimeError("on purpose")
    if end == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
