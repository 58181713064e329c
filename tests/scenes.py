"""Roots with something to be done, what stands there once it is done, and what must hold at any moment before."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commands import EPOCH, Root
from publishd.frameworks import FRAMEWORKS
from publishd.publications import Publication, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tree = dict[str, bytes | None]
"""Paths below a root to contents; None for a folder."""

MARKERS = [framework.marker for framework in FRAMEWORKS.values()]


def tree(root: Path) -> Tree:
    """What stands below the root now."""
    found: Tree = {}

    def look(folder: str, prefix: str) -> None:
        with os.scandir(folder) as children:
            for child in children:
                if child.is_dir(follow_symlinks=False):
                    found[prefix + child.name] = None
                    look(child.path, f"{prefix}{child.name}/")
                elif child.is_symlink():
                    found[prefix + child.name] = b"-> " + os.fsencode(os.readlink(child.path))
                else:
                    with open(child.path, "rb") as file:
                        found[prefix + child.name] = file.read()

    look(str(root), "")
    return found


def inside(path: str, save: str) -> bool:
    """Whether the path is the save's, or below it."""
    return path == save or path.startswith(f"{save}/")


def _entry(step: int, path: str | None = None, epoch: int = EPOCH) -> str:
    return Publication(epoch, step, path or f"exec/1.4101.0/checkpoint-{step}").name


@dataclass(frozen=True)
class Scene:
    """A command and the root it is given, made by `make` below a folder that holds nothing else of interest."""

    command: str
    arguments: Callable[[Root], tuple[str, ...]]
    make: Callable[[Root], None]
    removes: tuple[str, ...] = ()
    """The saves, entries and records that are gone in the end, with all that is below them."""
    adds: tuple[str, ...] = ()
    """Entries, and what else is there in the end: empty files."""
    finish: tuple[str, ...] = ()
    """What finishes it, where the same command again is not enough."""

    @property
    def answers(self) -> bool:
        """It prints one answer, or fails with one line."""
        return self.command in ("resolve", "list", "publish")

    @property
    def prunes(self) -> bool:
        """It also removes something."""
        return bool(self.removes)

    def line(self, root: Root, *more: str) -> tuple[str, ...]:
        """The command line."""
        command, *rest = self.arguments(root)
        return (command, "-checkpoint", str(root.path), *more, *rest)

    def done(self, before: Tree) -> Tree:
        """What stands there once all is done."""
        kept = {path: content for path, content in before.items() if not any(inside(path, gone) for gone in self.removes)}
        folders = dict.fromkeys({"prune"} if self.adds else ()) | dict.fromkeys(path.rpartition("/")[0] for path in self.adds)
        return kept | folders | dict.fromkeys(self.adds, b"")

    def check(self, before: Tree, now: Tree, *, recorded: bool = True) -> None:
        """What must hold at every moment, whatever happened; without `recorded` a save may be half gone and nothing say so."""
        done = self.done(before)
        records = {f"prune/{path.removeprefix('pub/')}" for path in self.removes if path.startswith("pub/")}
        added = set(now) - set(before)
        passing = set(self.removes) | records
        assert added <= set(done) | passing, f"made: {added - set(done) - passing}"
        lost = set(before) - set(now)
        assert lost <= set(before) - set(done), f"lost: {lost & set(done)}"
        altered = {path for path in now if path in before and now[path] != before[path]}
        assert not altered, f"altered: {altered}"
        assert not any(now[path] for path in added), "something new is not empty"
        names = [path.partition("/")[2] for path in now if path.startswith(("pub/", "prune/"))]
        published = [parse(name) for name in names if f"pub/{name}" in now]
        withdrawn = {parse(name).path for name in names if f"prune/{name}" in now}
        for publication in published:
            missing = [path for path in lost if inside(path, publication.path)]
            assert not missing, f"{publication} is published, but of its save is lost: {missing}"
            assert publication.path in now, f"{publication} is published, but there is no such save"
        for save in {path for path in self.removes if not path.startswith(("pub/", "prune/")) and path in now}:
            if any(inside(path, save) for path in lost):
                left = [marker for marker in MARKERS if f"{save}/{marker}" in now]
                assert not left, f"of {save} something is gone, but its marker still stands"
                assert save in withdrawn or not recorded, f"{save} is half gone, and no record says so"


def latest(now: Tree) -> str:
    """The path of the greatest publication, or ''."""
    names = sorted(path.removeprefix("pub/") for path in now if path.startswith("pub/"))
    return parse(names[-1]).path if names else ""


def _bystanders(root: Root) -> None:
    """What nobody may touch: saves that nothing has published, half ones, and another execution's."""
    half = root.hf(7)
    (half / "trainer_state.json").write_text('{"global_st')
    other = Root(root.path, "1.4101.1")
    other.hf(8)
    (root.path / "hand").mkdir()
    (root.path / "hand" / "notes").write_text("mine")


def _deep(save: Path) -> Path:
    """Give a save a folder in a folder."""
    (save / "optimizer" / "shard").mkdir(parents=True)
    (save / "optimizer" / "state").write_bytes(b"state")
    (save / "optimizer" / "shard" / "0").write_bytes(b"shard")
    return save


def _first(root: Root) -> None:
    _bystanders(root)
    _deep(root.hf(500))


def _next(root: Root) -> None:
    _first(root)
    root.publish(root.hf(400), 400)


def _old(root: Root) -> None:
    """Publications of which two name one save, and one a save that a later one needs; and what a killed prune left."""
    _bystanders(root)
    root.publish(_deep(root.hf(100)), 100)
    for step in (200, 300, 400):
        root.publish(root.hf(step), step)
    root.publish(root.execution / "checkpoint-100", 99)
    root.publish(root.execution / "checkpoint-300", 150)
    torn = root.hf(50)
    (torn / "trainer_state.json").unlink()
    (root.path / "prune" / _entry(50)).touch()
    (root.path / "prune" / _entry(400)).touch()  # its entry came back, and is among the latest: to be dropped


def _fresh(root: Root) -> None:
    """Saves that a watch has not seen yet, and one that is published."""
    _bystanders(root)
    root.publish(root.hf(400), 400)
    for step in (500, 600):
        _deep(root.hf(step))


_COMMAND = 'save="$PUBLISHD_OUT/step-600"; [ -e "$save" ] || { mkdir "$save" && : > "$save/.metadata"; }'
_HF = ("-framework", "hf")
_PRUNED = (
    *(f"exec/1.4101.0/checkpoint-{step}" for step in (50, 100, 200)),
    *(f"pub/{_entry(step)}" for step in (100, 200)),
    f"pub/{_entry(99, 'exec/1.4101.0/checkpoint-100')}",
    f"pub/{_entry(150, 'exec/1.4101.0/checkpoint-300')}",
    *(f"prune/{_entry(step)}" for step in (50, 400)),
)
_ENTRIES = tuple(f"pub/{_entry(step)}" for step in (500, 600))
_SAVE = "exec/1.4101.0/checkpoint-500"

SCENES = {
    "resolve": Scene("resolve", lambda _: ("resolve",), _next),
    "list": Scene("list", lambda _: ("list",), _next),
    "publish": Scene("publish", lambda root: ("publish", str(root.path / _SAVE), "500"), _next, adds=(f"pub/{_entry(500)}",)),
    "publish, the first": Scene(
        "publish", lambda root: ("publish", str(root.path / _SAVE), "500"), _first, adds=(f"pub/{_entry(500)}",)
    ),
    "prune": Scene("prune", lambda _: ("prune", "-keep", "2"), _old, removes=_PRUNED),
    "probe": Scene("probe", lambda _: ("probe",), _next),
    "watch -once": Scene("watch", lambda _: ("watch", *_HF, "-once"), _fresh, adds=_ENTRIES),
    "watch -once -keep": Scene(
        "watch",
        lambda _: ("watch", *_HF, "-once", "-keep", "1"),
        _fresh,
        removes=tuple(path for step in (400, 500) for path in (f"exec/1.4101.0/checkpoint-{step}", f"pub/{_entry(step)}")),
        adds=(f"pub/{_entry(600)}",),
        finish=("prune", "-keep", "1"),  # a watch prunes after it has published, and there may be nothing left to publish
    ),
}


SCENES["run"] = Scene(
    "run",
    lambda _: ("run", "-framework", "dcp", "-keep", "1", "--", "sh", "-c", _COMMAND),
    _next,
    removes=("exec/1.4101.0/checkpoint-400", f"pub/{_entry(400)}"),
    adds=(f"pub/{_entry(600, 'exec/1.4101.0/step-600')}", "exec/1.4101.0/step-600/.metadata"),
)


class Stage:
    """A scene whose root is made once, and copied for each run."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self._folder, self._runs = scene, folder, 0
        self._made = Root(folder / "made").make()
        scene.make(self._made)
        self.before = tree(self._made.path)

    def root(self) -> Root:
        """A fresh copy of the root; that of the run before goes."""
        shutil.rmtree(self._folder / f"root-{self._runs}", ignore_errors=True)
        self._runs += 1
        path = self._folder / f"root-{self._runs}"
        shutil.copytree(self._made.path, path, symlinks=True, copy_function=shutil.copyfile)
        return Root(path)
