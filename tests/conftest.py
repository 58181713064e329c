"""Fixtures that every test may use: a checkpoint root, and the installed command run against it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("contract", "commands")

from commands import Root  # noqa: E402 - its asserts are rewritten

pytest_plugins = [
    "services.certificates",
    "services.moto",
    "services.proxies",
    "services.scripted",
    "services.seaweed",
    "services.vault",
    "s3_roots",
]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests under a real system, which one worker runs and mostly waits in, begin first."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A checkpoint root with the folder of one execution."""
    return Root(tmp_path / "root").make()


@pytest.fixture(autouse=True, scope="session")
def nothing_is_ignored() -> Iterator[None]:
    """Where the tests themselves run under nohup or in the background, what they start must not inherit it."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
