"""The public names are a contract: adding or dropping one is a decision, made here."""

from __future__ import annotations

import inspect

import pytest

import tiercache
from tiercache import errors

FACE = {
    # the cache and its clients
    "BlockingClient",
    "TierCache",
    "connect",
    # what a caller describes
    "KVSpec",
    "Namespace",
    "Tier",
    # what is told
    "Extent",
    "Refusal",
    "Stored",
    # the configuration
    "Config",
    "Limits",
    "Share",
    "TierConfig",
    # errors
    "AuditFailed",
    "Closed",
    "DeviceRefused",
    "DirectoryLocked",
    "DirectoryRefused",
    "InvalidConfig",
    "InvalidFrame",
    "InvalidInput",
    "InvalidSpec",
    "InvalidStart",
    "InvalidTensor",
    "InvalidTokens",
    "JoinRefused",
    "LeaseError",
    "LeaseLost",
    "LeaseReleased",
    "LimitReached",
    "MemoryRefused",
    "NoShare",
    "Refused",
    "SocketRefused",
    "SpecMismatch",
    "StaleHandle",
    "StoreError",
    "StoreFull",
    "TierCacheError",
    "TierTooSmall",
    "UnknownHandle",
    "UnsupportedSpec",
    "Untrusted",
    "VersionMismatch",
    "WorkerDied",
}


def test_the_public_names_are_these() -> None:
    assert {name for name in tiercache.__all__ if not name.startswith("__")} == FACE


def test_no_public_name_is_listed_twice() -> None:
    assert len(tiercache.__all__) == len(set(tiercache.__all__))


@pytest.mark.parametrize("name", sorted(FACE))
def test_each_public_name_is_there(name: str) -> None:
    """The lazy ones too."""
    value = getattr(tiercache, name)

    assert inspect.getdoc(value), f"{name} has no docstring"
    assert name in dir(tiercache)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(tiercache, "no_such_name")  # noqa: B009 - a type checker would refuse the plain form


def test_every_exception_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.TierCacheError)}

    assert defined <= FACE


def test_the_drawing_of_errors_is_the_tree_of_errors() -> None:
    """The drawing at the top of errors.py is what people read."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip("│├└─ ").split(" ")[0]
        if not isinstance(getattr(errors, name, None), type):
            continue
        depth = line.index(name)
        above = [(column, parent) for column, parent in above if column < depth]
        drawn[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))

    assert drawn == {name: getattr(errors, name).__bases__[0].__name__ for name in drawn}
    assert set(drawn) == {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
