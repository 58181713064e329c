"""What `publishd probe` can tell of a file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from publishd.stores import Finding


def diagnose(root: str) -> list[Finding]:
    """One finding per check of the file system that holds the root."""
    raise NotImplementedError(root)
