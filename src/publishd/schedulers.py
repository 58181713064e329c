"""The table of schedulers: which attempt and epoch a job has that nobody gave any (`publishd env`).

A requeue and a new submission both come later than what was before, so the epoch grows with either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from publishd.errors import UsageError
from publishd.flags import MAX_UNSIGNED, unsigned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RESTARTS = 1_000_000


def _slurm(environ: Mapping[str, str]) -> tuple[str, int]:
    """SLURM numbers jobs upwards; a requeued one keeps its number and has SLURM_RESTART_COUNT, unset in its first run."""
    job = _number(environ, "SLURM_JOB_ID")
    restart = _number(environ, "SLURM_RESTART_COUNT", "0")
    if restart >= _RESTARTS:
        raise UsageError("bad variable", "SLURM_RESTART_COUNT", f"must be less than {_RESTARTS}")
    epoch = job * _RESTARTS + restart
    if epoch > MAX_UNSIGNED:
        raise UsageError("bad variable", "SLURM_JOB_ID", f"must be at most {MAX_UNSIGNED // _RESTARTS}, restarts counted")
    return f"{job}.{restart}", epoch


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise UsageError("missing variable", name, "it is not set", "is this a job's script?")
    try:
        return unsigned(text)
    except ValueError as error:
        raise UsageError("bad variable", name, str(error)) from None


SCHEDULERS: dict[str, Callable[[Mapping[str, str]], tuple[str, int]]] = {"slurm": _slurm}
"""By name: the attempt and the epoch, of a job's environment. Each raises UsageError where it is no such job's."""
