"""The process: signals first, then everything else."""

from __future__ import annotations

import sys

from publishd.signals import Signals


def main() -> None:
    """Run the command line and exit; the console scripts `publishd` and `publish` come here."""
    signals = Signals().install()
    if sys.getfilesystemencoding() != "utf-8":
        signals.hold()
        _start_again_in_utf8()
    from publishd.cli import main as run

    run(sys.argv[1:], signals)


def _start_again_in_utf8() -> None:
    """Names are bytes: only UTF-8 with surrogate escapes carries all of them through text and back, under any locale."""
    import os

    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - this program itself


if __name__ == "__main__":
    main()
