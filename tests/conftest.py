"""Fixtures that every test may use: a checkpoint root, and the installed command run against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("contract", "commands")

from commands import Root  # noqa: E402 - its asserts are rewritten

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A checkpoint root with the folder of one execution."""
    return Root(tmp_path / "root").make()
