"""Every error publishd expects, as one line: what could not be done, to which, why, and what to do about it."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control characters, line separators and bytes that are not UTF-8, so that `text` stays one harmless line."""
    return _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class PublishdError(Exception):
    """An expected failure. Its text is one line: what, which, cause and, in brackets, the remedy."""

    def __init__(self, what: str, which: str, cause: str, remedy: str = "") -> None:
        super().__init__(what, which, cause, remedy)
        self.what, self.which, self.cause, self.remedy = what, which, cause, remedy

    def __str__(self) -> str:
        line = ": ".join(part for part in (self.what, self.which, self.cause) if part)
        return printable(f"{line} ({self.remedy})" if self.remedy else line)


class UsageError(PublishdError):
    """The command line or the environment asks for something that has no meaning; exit status 2, nothing was done."""


class InvalidEntry(PublishdError):
    """Something in `pub/` is not an entry: its name does not parse, or it is not a regular file."""


class NotPublished(PublishdError):
    """The save may not be published, or not now: it is gone, incomplete, withdrawn, or its path does not fit."""


class StoreError(PublishdError):
    """The store could not do what was asked, or it can't be known whether it did."""


class NotFound(StoreError):
    """Nothing stands under this key."""


class AlreadyExists(StoreError):
    """Something stands under this key already."""


class NotAFile(StoreError):
    """What stands under this key is not a regular file."""


class NotAFolder(StoreError):
    """What stands under this key is not a folder."""


class Linked(StoreError):
    """The key leads through a symbolic link, which the operation does not follow."""


class TooLarge(StoreError):
    """The content is larger than the caller wants to hold."""


class Denied(StoreError):
    """The store refuses, and will go on refusing until somebody changes its rights."""


class NoSpace(StoreError):
    """The store is full, or a quota is used up."""


class SyncFailed(StoreError):
    """Content could not be made durable; what the store holds after a crash is unknown."""


class Unavailable(StoreError):
    """The store failed for a reason that may pass."""


class NotSupported(StoreError):
    """The store lacks an operation that publishing can't do without."""


class NoCredentials(StoreError):
    """The source of credentials gave none that work."""


class PerhapsOurs(AlreadyExists):
    """It stands there, and an attempt of this very call whose answer was lost may have made it."""
