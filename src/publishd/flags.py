"""The grammar of the command line: Go's flags and the usual ones, by a table.

`-keep 3`, `-keep=3`, `--keep 3` and `--keep=3` are the same. Names are exact (argparse can't be kept from abbreviating
names that begin with one dash, and repeats a wrong value, which may be a secret, in its message).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from publishd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `metavar` is empty for a switch; `parse` raises ValueError with what the value must be.

    The dictionaries of a flag that `adds` are put together where it is given more than once.
    """

    name: str
    help: str
    metavar: str = ""
    parse: Callable[[str], Any] = str
    required: bool = False
    adds: bool = False


def parse_flags(flags: Sequence[Flag], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags given, by name, and what is no flag; of a flag given twice the last counts, unless it `adds`.

    Raises UsageError naming the flag, never repeating its value.
    """
    known = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}
    positional: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            positional += rest
            break
        if not argument.startswith("-") or argument == "-" or re.match(r"-[0-9]", argument):
            positional.append(argument)
            continue
        name, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
        flag = known.get(name)
        if flag is None:
            raise UsageError("unknown flag", quotable(f"-{name}"), "this command has none of that name", "see --help")
        parsed = _value(flag, value if equals else None, rest)
        values[name] = {**values.get(name, {}), **parsed} if flag.adds else parsed
    missing = next((flag.name for flag in flags if flag.required and flag.name not in values), None)
    if missing:
        raise UsageError("missing flag", f"-{missing}", "it is required", "see --help")
    return values, positional


def _value(flag: Flag, value: str | None, rest: list[str]) -> Any:
    if not flag.metavar:
        if value not in (None, "true", "false"):
            raise UsageError("bad flag", f"-{flag.name}", "it takes no value")
        return value != "false"
    if value is None:
        if not rest:
            raise UsageError("bad flag", f"-{flag.name}", f"a value is missing: {flag.metavar}")
        value = rest.pop(0)
    try:
        return flag.parse(value)
    except ValueError as error:
        raise UsageError("bad flag", f"-{flag.name}", str(error)) from None


def quotable(word: str) -> str:
    """A mistyped word if it is nothing but letters and dashes; else nothing, because it may hold a secret."""
    return word if re.fullmatch("[A-Za-z-]{1,20}", word, re.ASCII) else ""


_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"


def duration(text: str) -> float:
    """Seconds of `10s`, `1m30s`, `500ms` or a plain number of seconds. Raises ValueError."""
    if re.fullmatch(_NUMBER, text, re.ASCII):
        return float(text)
    if not re.fullmatch(f"(?:{_NUMBER}(?:ms|[hms]))+", text, re.ASCII):
        raise ValueError("must be a duration such as 10s, 1m30s or 500ms")
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(f"({_NUMBER})(ms|[hms])", text, re.ASCII))


def positive_duration(text: str) -> float:
    """As `duration`, but 0 is refused."""
    seconds = duration(text)
    if not seconds:
        raise ValueError("must be a duration greater than 0")
    return seconds


MAX_UNSIGNED = 2**64 - 1


def unsigned(text: str) -> int:
    """An unsigned 64-bit decimal. Raises ValueError."""
    if not re.fullmatch("[0-9]{1,20}", text, re.ASCII) or int(text) > MAX_UNSIGNED:
        raise ValueError(f"must be a decimal number from 0 to {MAX_UNSIGNED}")
    return int(text)


def count(text: str) -> int:
    """A whole number of at least 1. Raises ValueError."""
    if not re.fullmatch("[1-9][0-9]{0,99}", text, re.ASCII):
        raise ValueError("must be a whole number of at least 1")
    return int(text)


def one_of(names: Mapping[str, object]) -> Callable[[str], str]:
    """A parser for one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text

    return parse
