"""Taking turns with a peer, and the row of the table that comes of it."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    """Least and greatest: of the ratios round by round, or of the values where there is no peer."""
    target: float | None = None
    """The most that `ratio` may be, or `value` where there is no peer."""
    note: str = ""

    @property
    def measure(self) -> float:
        """What the target is for."""
        return self.value if self.ratio is None else self.ratio

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        return None if self.target is None else self.measure <= self.target

    def as_json(self) -> str:
        """One object."""
        return json.dumps({**self.__dict__, "holds": self.holds})


@dataclass
class Turns:
    """Seconds of the work and of its peers, taken in turns so that what disturbs the machine disturbs all of them."""

    ours: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)

    def rows(self, work: str, targets: dict[str, float], note: str = "") -> list[Row]:
        """A row for each peer, in their order."""
        value = statistics.median(self.ours)
        rows = []
        for peer, seconds in self.theirs.items():
            ratios = [ours / theirs for ours, theirs in zip(self.ours, seconds, strict=False)]
            ratio = value / statistics.median(seconds)
            rows.append(Row(work, value, "s", peer, ratio, (min(ratios), max(ratios)), targets.get(peer), note))
        return rows


def take_turns(rounds: int, ours: Callable[[], float], peers: dict[str, Callable[[], float]]) -> Turns:
    """Each is asked once a round for the seconds that it took; one round before is not counted."""
    turns = Turns(theirs={peer: [] for peer in peers})
    for number in range(rounds + 1):
        ours_took, took = ours(), {peer: ask() for peer, ask in peers.items()}
        if number:
            turns.ours.append(ours_took)
            for peer, seconds in took.items():
                turns.theirs[peer].append(seconds)
    return turns


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def process(command: Sequence[str], **options: Any) -> Callable[[], float]:
    """The seconds of a whole process, which must succeed."""

    def run() -> float:
        began = time.perf_counter()
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, **options)
        return time.perf_counter() - began

    return run


def of_values(work: str, unit: str, values: Sequence[float], target: float | None = None, note: str = "") -> Row:
    """The row of something that has no peer: its median."""
    return Row(work, statistics.median(values), unit, spread=(min(values), max(values)), target=target, note=note)


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [("work", "value", "peer", "ratio", "least … greatest", "target", "")]
    for row in rows:
        spread = f"{row.spread[0]:.2f} … {row.spread[1]:.2f}" if row.spread else ""
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"≤ {row.target:g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[row.holds]
        lines.append(
            (row.work, f"{row.value:.4g} {row.unit}", row.peer, ratio, spread, target, " ".join((verdict, row.note)).strip())
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
