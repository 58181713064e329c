"""Fencing: what an execution publishes is resolved only if its epoch is greater than that of every execution before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from publishd.errors import NotPublished
from publishd.publications import too_long
from publishd.stores import EXEC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from publishd.frameworks import Framework
    from publishd.publications import Publication

REMEDY = "every execution needs an attempt of its own and a greater epoch than all before"


def folder_of(attempt: str) -> str:
    """The key of the folder into which an execution writes."""
    return f"{EXEC}/{attempt}"


def published_by(attempt: str, published: Iterable[Publication]) -> list[Publication]:
    """The publications of an execution's saves, at whatever step and epoch, in their order."""
    return [publication for publication in published if publication.path.startswith(f"{folder_of(attempt)}/")]


def conflicts(root: str, attempt: str, epoch: int, published: list[Publication]) -> list[tuple[str, str]]:
    """Which (a path) and why: signs, in all publications in their order, that an execution has not its own attempt and epoch."""
    found = []
    if published and published[-1].epoch > epoch:
        newest = published[-1].epoch
        cause = f"epoch {newest} has published: what epoch {epoch} publishes is never resolved, and pruned first"
        found.append((root, cause))
    others = {publication.epoch for publication in published_by(attempt, published)} - {epoch}
    if others:
        epochs = ", ".join(map(str, sorted(others)))
        cause = f"its saves were published as epoch {epochs} and stay so; this execution is epoch {epoch}"
        found.append((f"{root}/{folder_of(attempt)}", cause))
    return found


def check_room(root: str, attempt: str, framework: Framework, name_limit: int) -> None:
    """Raise NotPublished where a store with this name limit, in bytes, can hold no entry of this execution."""
    reason = too_long(f"{folder_of(attempt)}/{framework.prefix}0", name_limit)
    if reason:
        path = f"{root}/{folder_of(attempt)}"
        raise NotPublished("cannot watch", path, f"even for its shortest save {reason}", "use a shorter attempt")
