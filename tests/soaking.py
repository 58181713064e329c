"""How much work the random and exhaustive tests do: once as much in CI, `PUBLISHD_SOAK` times as much where it is set."""

from __future__ import annotations

import os


def soak(amount: int) -> int:
    """The amount of a usual run, times PUBLISHD_SOAK."""
    return int(amount * float(os.environ.get("PUBLISHD_SOAK", "1")))


def soaking() -> bool:
    """Whether more is asked for than a usual run does."""
    return soak(100) > 100
