"""Fixtures that every test may use: a checkpoint root, and the installed command run against it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("contract", "commands", "scenes")

from commands import Root  # noqa: E402 - its asserts are rewritten

pytest_plugins = [
    "injected",
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

    from xdist.remote import Producer


REAL_SYSTEMS = ("tests/test_slurm.py", "tests/test_systemd.py", "tests/test_nfs.py", "tests/test_juicefs.py")
"""Tests under a system that is started for all of a file, and in which they mostly wait."""


class RealSystemsTogether(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives all tests of such a file to one worker, first; every other test to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in REAL_SYSTEMS else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RealSystemsTogether:
    """The groups of xdist itself are lost with pytest 9.2, which has no `_nodeid` any more (seen with xdist 3.8)."""
    return RealSystemsTogether(config, log)


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
