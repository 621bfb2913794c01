"""Connections that say nothing: `crowd.py COUNT PATH…`.

It opens COUNT of them, to each path in turn (to one that ends in `.fd` as the socket of descriptors is, to `ADDRESS:PORT` over
TCP), says how many stand and what one that was refused was told, and keeps them until its input ends.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import sys
from collections.abc import Sequence


def opened(place: str) -> socket.socket:
    """Return a new connection."""
    if place.startswith("/"):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if place.endswith(".fd") else socket.SOCK_STREAM)
        link.connect(place)
        return link
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)))


def main(count: int, places: Sequence[str]) -> None:
    """Crowd."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    standing: list[socket.socket] = []
    told: set[str] = set()
    for number in range(count):
        link = opened(places[number % len(places)])
        standing.append(link)
        # One that is refused is closed soon; one that stands says nothing. Nobody has to wait for the latter.
        for each in readable(standing):
            standing.remove(each)
            with each:
                told.add(each.recv(4096).decode(errors="replace"))
    print(json.dumps([len(standing), sorted(told)]), flush=True)
    for line in sys.stdin:
        del line
        for each in readable(standing):
            standing.remove(each)
            with each:
                told.add(each.recv(4096).decode(errors="replace"))
        print(json.dumps([len(standing), sorted(told)]), flush=True)


def readable(links: Sequence[socket.socket]) -> list[socket.socket]:
    """Return those that the daemon has said something on, or ended."""
    waiting = select.poll()
    known = {}
    for link in links:
        waiting.register(link, select.POLLIN)
        known[link.fileno()] = link
    return [known[descriptor] for descriptor, _ in waiting.poll(0)]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
