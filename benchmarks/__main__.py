"""Measure, print a table, write JSON; exit 1 if a target is missed."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

from benchmarks import posix, s3
from benchmarks.measuring import Row, table


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser("scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller roots: a look, no measurement")
    parser.add_argument("--json", metavar="FILE", help="write one object for each row there")
    parser.add_argument("--only", metavar="WORD", default="", help="only groups whose name has WORD")
    options = parser.parse_args()
    began, rows = time.monotonic(), list[Row]()
    groups = [(f"posix.{group.__name__}", group) for group in posix.GROUPS]
    groups += [(f"s3.{group.__name__}", group) for group in s3.GROUPS]
    for name, group in groups:
        if options.only in name:
            print(f"{time.monotonic() - began:5.0f} s  {name} …", file=sys.stderr, flush=True)
            rows += group(options.quick)
    machine = f"{platform.machine()}, Python {platform.python_version()}, Linux {platform.release()}"
    print(f"{machine}, {time.monotonic() - began:.0f} s\n")
    print(table(rows))
    if options.json:
        Path(options.json).write_text("".join(f"{row.as_json()}\n" for row in rows))
    missed = [row for row in rows if row.holds is False]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
