"""Whatever is typed, or stands in a marker or a name: an answer or the expected error, and no secret repeated."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes import MemoryStore
from publishd.cli import COMMANDS
from publishd.credentials import open_source, parse_source
from publishd.credentials.urls import parse_proxy
from publishd.errors import UsageError
from publishd.flags import count, duration, unsigned
from publishd.frameworks import FRAMEWORKS, incomplete
from publishd.options import parse_options
from publishd.publications import parse, unsafe
from soaking import soak

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = soak(300)
SECRET = "hunter2-Geheimnis"
usual = settings(max_examples=EXAMPLES, deadline=None)

anything = st.text() | st.text(st.sampled_from("vault:https//h.x?&=%auth0123456789-_~'\"\\\n\x00é²"), max_size=60)
pieces = st.sampled_from(
    [
        "vault:",
        "https://",
        "http://",
        "host",
        ":8200",
        "/",
        "team/s3",
        "?",
        "&",
        "auth=",
        "token",
        "approle",
        "role_id=",
        "%",
        "%00",
        "ca=",
        "proxy=",
        "namespace=",
        "file:",
        "/x",
        "profile=",
        "env",
        "=",
        "secret_id_file=",
        SECRET,
        " ",
        "\n",
        "é",
        "[::1]",
        "@",
    ]
)
pieced = st.lists(pieces, max_size=12).map("".join)


def refusal(call: Callable[[], object], expected: type[Exception]) -> str:
    """What it says of a refusal, or ''; nothing but the expected is ever raised."""
    try:
        call()
    except expected as error:
        return str(error) or "refused without a word"
    return ""


@usual
@given(anything | pieced)
@example("vault:https://h:8200/p?auth=token&auth=token")
def test_a_source_is_one_or_an_error_without_the_value(text: str) -> None:
    """The -creds grammar, and what a source needs of the environment."""
    said = refusal(lambda: parse_source(text), ValueError)
    assert SECRET not in said
    if not said:
        spec = parse_source(text)
        shown = spec.address + spec.path  # files, hosts and paths are no secrets
        for words_ in (repr(spec), refusal(lambda: open_source(spec, {}), UsageError)):
            assert SECRET not in words_ or SECRET in shown


@usual
@given(anything | pieced)
def test_a_proxy_is_one_or_an_error_without_the_value(text: str) -> None:
    said = refusal(lambda: parse_proxy(text), ValueError)
    assert SECRET not in said
    assert said or text.lower().startswith(("http://", "https://"))


@usual
@given(st.text(st.sampled_from("0123456789hms.µun-+ e_²٣"), max_size=12) | anything)
def test_a_duration_is_finite_and_not_negative(text: str) -> None:
    try:
        seconds = duration(text)
    except ValueError:
        return
    assert math.isfinite(seconds)
    assert seconds >= 0
    assert text.isascii()


@usual
@given(st.text(st.sampled_from("0123456789-+ e_²٣"), max_size=25) | anything)
@example("20000000000000000000")
def test_a_number_is_plain_decimal(text: str) -> None:
    for kind, least, most in ((unsigned, 0, (1 << 64) - 1), (count, 1, math.inf)):
        try:
            number = kind(text)
        except ValueError:
            continue
        assert text.isascii()
        assert text.isdigit()
        assert number == int(text)
        assert least <= number <= most


FLAGS = sorted({f"-{flag.name}" for command in COMMANDS.values() for flag in command.flags})
words = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(FLAGS).map(lambda flag: f"-{flag}={SECRET}"),
    anything,
    pieced,
    st.just("--"),
    st.just("/root"),
)


@usual
@given(st.sampled_from(sorted(COMMANDS)), st.lists(words, max_size=8))
def test_a_command_line_is_understood_or_a_usage_error(name: str, argv: list[str]) -> None:
    """Nothing else is ever raised, and a value that may be a mistyped secret is not repeated."""
    command = COMMANDS[name]
    environ = {"DISPATCH_ATTEMPT": "a", "DISPATCH_EPOCH": "1", "AWS_SECRET_ACCESS_KEY": SECRET}
    understood = partial(
        parse_options,
        argv,
        environ,
        flags=command.flags,
        arguments=command.arguments,
        publishes=command.publishes,
        runs=command.runs,
    )
    said = refusal(understood, UsageError)
    assert SECRET not in said
    assert "\n" not in said


@usual
@given(st.text(st.sampled_from("0123456789-ABCDEFGHIJKLMNOPQRSTUVWXYZ234567="), max_size=80) | st.text(max_size=80))
def test_a_name_is_canonical_and_safe_or_no_publication(name: str) -> None:
    try:
        publication = parse(name)
    except ValueError:
        return
    assert publication.name == name
    assert unsafe(publication.path) is None
    assert not publication.path.startswith("/")
    assert ".." not in publication.path.split("/")


numbers = st.integers(0, 1 << 65) | st.floats() | st.booleans() | st.none() | st.text(max_size=4)
values: st.SearchStrategy[Any] = st.recursive(numbers, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
states = st.dictionaries(st.sampled_from(["global_step", "log_history", "é"]), values, max_size=3)


@usual
@given(st.binary(max_size=60) | states.map(lambda state: json.dumps(state).encode()), st.integers(0, 3))
@example(b'{"global_step": 1, "global_step": 2}', 2)
@example(b'\xef\xbb\xbf{"global_step": 1}', 1)
@example(b'{"global_step": 1}\x00', 1)
@example(b'{"global_step": NaN}', 0)
def test_a_marker_is_judged_as_python_reads_it(content: bytes, step: int) -> None:
    """Complete exactly if json reads an object whose global_step is that integer, which neither true nor 1.0 is."""
    try:
        stated = json.loads(content)["global_step"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        stated = None
    store = MemoryStore()
    save = f"exec/a/checkpoint-{step}"
    store.write(f"{save}/trainer_state.json", content)
    complete = asyncio.run(incomplete(store, FRAMEWORKS["hf"], save)) is None
    assert complete == (type(stated) is int and stated == step)


@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
def test_a_marker_nested_however_deep_is_no_crash(depth: int) -> None:
    store = MemoryStore()
    store.write("exec/a/checkpoint-1/trainer_state.json", b'{"global_step": 1, "x": ' + b"[" * depth + b"]" * depth + b"}")
    reason = asyncio.run(incomplete(store, FRAMEWORKS["hf"], "exec/a/checkpoint-1"))
    assert (reason is None) == (depth < 500) or reason
