"""Structured logs: one JSON object a line, or words on a terminal.

They hold numbers, names of sockets and kinds of errors, never prompts or token ids.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class Lines(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, and what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _KNOWN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


class Words(logging.Formatter):
    """Formats a record for somebody who looks on: time of day, message, and what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback where there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        given = {name: value for name, value in vars(record).items() if name not in _KNOWN}
        said = " ".join([record.getMessage(), *(f"{name}={value}" for name, value in given.items())])
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{time} {level}{said}{trace}"


def log_to_stderr(level: str, *, words: bool) -> None:
    """Write what our own loggers say, from `level` on, to stderr, and warnings of everybody else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Words() if words else Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tiercache").setLevel(level.upper())
