"""Tells systemd how it goes (sd_notify), where it listens."""

from __future__ import annotations

import os
import socket


def notify(**state: str | int) -> None:
    """Send `state`, such as READY=1 or STATUS="…", to the socket that NOTIFY_SOCKET names; without one do nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    text = "\n".join(f"{name}={value}" for name, value in state.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.connect(address)
            sender.send(text.encode())
        except OSError:
            return  # who does not listen wants to know nothing
