"""Which folders are saves, and when they are complete: names, markers, and Trainer's own sign (rule 4)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands import ATTEMPT, Root, eventually, require
from fakes import FaultyStore, MemoryStore, after, before, fails, waits
from publishd import frameworks
from publishd.errors import Denied, NotAFile, NotFound, StoreError, Unavailable
from publishd.frameworks import FRAMEWORKS, framework_of, incomplete, unfinished
from publishd.stores import Kind
from publishd.stores.posix import PosixStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

HF, DCP = FRAMEWORKS["hf"], FRAMEWORKS["dcp"]
SAVE = f"exec/{ATTEMPT}/checkpoint-500"
MARKER = f"{SAVE}/trainer_state.json"
SIGN = "checkpoint-is-incomplete.txt"
MIB = 1 << 20

# Names (B06, B07, B14)

STEPS = {"0": 0, "1": 1, "500": 500, "10000": 10_000, "18446744073709551615": 2**64 - 1}

NOT_STEPS = [
    "",
    "500-bak",
    "500-merged",
    "500 (copy)",
    "500.tmp",
    "500-staging",
    "500/",
    "best",
    "last",
    "1e5",
    "-500",
    "+500",
    "5_00",
    "500 ",
    " 500",
    "500\n",
    "500\r",
    "500\0",
    "\n500",
    "0500",
    "00",
    "-0",
    "0x1f4",
    "5.0",
    "500.0",
    "NaN",
    "²",
    "٥٠٠",
    "５００",
    "50０",
    "Ⅴ",
    "18446744073709551616",
    "99999999999999999999",
    "100000000000000000000",
    "9" * 200,
    "\udce9",
]

OTHER_NAMES = [
    "",
    "500",
    "checkpoint",
    "checkpoint-",
    "Checkpoint-500",
    "CHECKPOINT-500",
    "checkpoint_500",
    "checkpoint500",
    "checkpoint-500-checkpoint-500",
    "backup-checkpoint-500",
    "last-checkpoint",
    "tmp-checkpoint-500",
    "tmp-checkpoint-s0yubqtr",
    ".checkpoint-500",
    " checkpoint-500",
    "\ncheckpoint-500",
    "checkpoint-checkpoint-500",
    "checkpoint_001377",
    "checkpоint-500",
    "global_step500",
    "epoch-5",
    ".tmp-step-10",
    "step10",
    "step_10",
    "Step-10",
    "global-step-10",
    "step-step-10",
]


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())
@pytest.mark.parametrize(("digits", "step"), STEPS.items())
def test_plain_decimals_are_steps(framework: frameworks.Framework, digits: str, step: int) -> None:
    """A save is the prefix and a plain decimal of at most 2^64-1; step 0 is one."""
    assert framework.step(framework.prefix + digits) == step
    assert framework_of(f"exec/1/{framework.prefix}{digits}") is framework


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())
@pytest.mark.parametrize("digits", NOT_STEPS)
def test_b06_b07_look_alikes_are_no_saves(framework: frameworks.Framework, digits: str) -> None:
    """What Python would take for a number, or what only looks like one, is not a step."""
    assert framework.step(framework.prefix + digits) is None


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_b06_b14_other_names_are_no_saves(name: str) -> None:
    """A prefix must be there, once, as it is written, at the start."""
    assert [framework.step(name) for framework in FRAMEWORKS.values()] == [None, None]
    assert framework_of(f"exec/checkpoint-500/{name}") is None


def test_one_framework_s_save_is_not_another_s() -> None:
    """A folder's name says whose save it is."""
    assert (HF.step("step-500"), DCP.step("checkpoint-500")) == (None, None)
    assert framework_of("step-1/checkpoint-500") is HF
    assert framework_of("checkpoint-500") is HF
    assert framework_of("exec/checkpoint-1/step-500") is DCP
    assert framework_of("exec/1/step-500/final") is None


# Markers of hf (B03, B05)

COMPLETE = {
    "Trainer's": b'{\n  "epoch": 1.0,\n  "global_step": 500,\n  "log_history": []\n}\n',
    "shortest": b'{"global_step":500}',
    "NaN elsewhere": b'{"loss": NaN, "up": Infinity, "down": -Infinity, "global_step": 500}',
    "doubled key, the last wins": b'{"global_step": 1, "global_step": 500}',
    "key nested elsewhere too": b'{"global_step": 500, "log_history": [{"global_step": 3}], "x": {"global_step": "4"}}',
    "escaped key": b'{"global\\u005fstep": 500}',
    "blanks around": b' \r\n\t{"global_step" : 500 } \n\n',
    "BOM": b'\xef\xbb\xbf{"global_step": 500}',
    "UTF-16": '{"global_step": 500}'.encode("utf-16"),
    "UTF-16 without BOM": '{"global_step": 500}'.encode("utf-16-le"),
    "UTF-32": '{"global_step": 500}'.encode("utf-32"),
    "nested 100 deep": b'{"x": ' + b"[" * 100 + b"]" * 100 + b', "global_step": 500}',
    "4,000 digits elsewhere": b'{"x": ' + b"7" * 4_000 + b', "global_step": 500}',
}

INCOMPLETE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "cut off": (b'{"global_step": 50', "does not decode"),
    "cut off before the end": (b'{"global_step": 500', "does not decode"),
    "cut off after the comma": (b'{"global_step": 500,', "does not decode"),
    "only blanks": (b"  \n", "does not decode"),
    "NULs": (b"\0" * 20, "does not decode"),
    "NULs at the end": (b'{"global_step": 500}' + b"\0" * 20, "does not decode"),
    "more at the end": (b'{"global_step": 500}}', "does not decode"),
    "two documents": (b'{"global_step": 500}\n{"global_step": 500}', "does not decode"),
    "single quotes": (b"{'global_step': 500}", "does not decode"),
    "trailing comma": (b'{"global_step": 500,}', "does not decode"),
    "comment": (b'{"global_step": 500} // done', "does not decode"),
    "invalid UTF-8": (b'{"x": "caf\xe9", "global_step": 500}', "does not decode"),
    "cut UTF-8": (b'{"x": "\xc3', "does not decode"),
    "raw newline in a text": (b'{"x": "a\nb", "global_step": 500}', "does not decode"),
    "10,000 deep": (b'{"global_step": 500, "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "does not decode"),
    "10,000 deep and cut off": (b'{"global_step": 500, "x": ' + b"[" * 10_000, "does not decode"),
    "10,000 objects deep": (b'{"x": ' * 10_000 + b"1" + b"}" * 10_000, "does not decode"),
    "5,000 digits": (b'{"global_step": ' + b"5" * 5_000 + b"}", "does not decode"),
    "5,000 digits elsewhere": (b'{"x": ' + b"7" * 5_000 + b', "global_step": 500}', "does not decode"),
    "leading zero": (b'{"global_step": 0500}', "does not decode"),
    "plus": (b'{"global_step": +500}', "does not decode"),
    "hexadecimal": (b'{"global_step": 0x1f4}', "does not decode"),
    "underscore": (b'{"global_step": 5_00}', "does not decode"),
    "list": (b"[]", "has no integer global_step"),
    "list with it": (b'[{"global_step": 500}]', "has no integer global_step"),
    "null": (b"null", "has no integer global_step"),
    "object": (b"{}", "has no integer global_step"),
    "number": (b"500", "has no integer global_step"),
    "text": (b'"global_step"', "has no integer global_step"),
    "text in it": (b'{"global_step": "500"}', "has no integer global_step"),
    "true": (b'{"global_step": true}', "has no integer global_step"),
    "false": (b'{"global_step": false}', "has no integer global_step"),
    "null in it": (b'{"global_step": null}', "has no integer global_step"),
    "list in it": (b'{"global_step": [500]}', "has no integer global_step"),
    "500.0": (b'{"global_step": 500.0}', "has no integer global_step"),
    "5e2": (b'{"global_step": 5e2}', "has no integer global_step"),
    "NaN": (b'{"global_step": NaN}', "has no integer global_step"),
    "Infinity": (b'{"global_step": Infinity}', "has no integer global_step"),
    "another key": (b'{"Global_step": 500, "global_step ": 500}', "has no integer global_step"),
    "doubled key, the last wins": (b'{"global_step": 500, "global_step": "x"}', "has no integer global_step"),
    "nested": (b'{"state": {"global_step": 500}}', "has no integer global_step"),
    "another step": (b'{"global_step": 26}', "says global_step 26"),
    "a lesser step by doubling": (b'{"global_step": 500, "global_step": 26}', "says global_step 26"),
    "negative": (b'{"global_step": -500}', "says global_step -500"),
    "beyond 64 bits": (b'{"global_step": 18446744073709552116}', "says global_step 18446744073709552116"),
}


@pytest.fixture(params=["in this process", "by a child"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where markers are decoded: as they are, or as if each were too large for this process."""
    where: str = request.param
    if where == "by a child":
        monkeypatch.setattr("publishd.frameworks.IN_PROCESS_LIMIT", -1)
    return where


def hf(content: bytes | Kind) -> MemoryStore:
    """A store with a Trainer save whose marker has this content."""
    store = MemoryStore()
    store.write(f"{SAVE}/model.safetensors", b"weights")
    store.write(MARKER, content)
    return store


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("content", COMPLETE.values(), ids=COMPLETE.keys())
async def test_b03_b05_a_marker_that_states_its_step_is_complete(content: bytes) -> None:
    """Whatever Python's json reads, with the folder's step as a JSON integer, is complete."""
    assert json.loads(content)["global_step"] == 500
    assert await incomplete(hf(content), HF, SAVE) is None


@pytest.mark.parametrize(("content", "reason"), INCOMPLETE.values(), ids=INCOMPLETE.keys())
async def test_b03_b05_any_other_marker_is_not_complete(decoder: str, content: bytes, reason: str) -> None:
    """A marker that is half-written, of a wrong type or another step's means "not complete yet", for a reason."""
    said = await incomplete(hf(content), HF, SAVE)
    if decoder == "by a child" and not content:
        reason = "does not decode"
    assert said
    assert said.startswith(f"trainer_state.json {reason}")


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("step", "stated"), [(0, "0"), (2**64 - 1, "18446744073709551615")])
async def test_b14_the_least_and_the_greatest_step_can_be_stated(step: int, stated: str) -> None:
    """Step 0 is not "none", and the greatest step is read exactly."""
    store = MemoryStore()
    save = f"exec/1/checkpoint-{step}"
    store.write(f"{save}/trainer_state.json", b'{"global_step": %s}' % stated.encode())
    assert await incomplete(store, HF, save) is None
    store.write(f"{save}/trainer_state.json", b'{"global_step": %s.0}' % stated.encode())
    assert await incomplete(store, HF, save) == "trainer_state.json has no integer global_step"


async def test_b03_a_marker_is_read_again_each_time(root: Root) -> None:
    """A corrected marker counts although its size and times are those of the bad one."""
    marker = root.hf(500, "005") / "trainer_state.json"
    marker.write_text('{"global_step": "50"}')
    store, status = PosixStore(str(root.path)), marker.stat()
    assert await incomplete(store, HF, SAVE) == "trainer_state.json has no integer global_step"
    marker.write_text('{"global_step":  500}')
    os.utime(marker, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (marker.stat().st_size, marker.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert await incomplete(store, HF, SAVE) is None


async def test_b01_a_save_without_its_marker_is_not_complete() -> None:
    """Weights alone do not make a save."""
    store = MemoryStore()
    store.write(f"{SAVE}/model.safetensors", b"weights")
    store.write(f"{SAVE}/nested/trainer_state.json", b'{"global_step": 500}')
    store.write(f"{SAVE}/trainer_state.json.tmp", b'{"global_step": 500}')
    assert await incomplete(store, HF, SAVE) == HF.unmarked == "no trainer_state.json yet"


@pytest.mark.parametrize("kind", [Kind.LINK, Kind.OTHER, Kind.FOLDER])
async def test_a_marker_must_be_a_regular_file(kind: Kind) -> None:
    """By the listing alone a marker that is something else is none, for every framework."""
    for framework in FRAMEWORKS.values():
        store = MemoryStore()
        save = f"exec/1/{framework.prefix}500"
        store.write(f"{save}/{framework.marker}{'/inside' if kind is Kind.FOLDER else ''}", kind)
        assert await incomplete(store, framework, save) == f"{framework.marker} is not a regular file"


TROUBLE: list[tuple[type[StoreError], str]] = [
    (NotFound, "vanished"),
    (NotAFile, "is not a regular file"),
    (Denied, "cannot be read: the script says so"),
]


@pytest.mark.parametrize(("error", "reason"), TROUBLE)
async def test_a_marker_that_cannot_be_read_is_not_complete_yet(error: type[StoreError], reason: str) -> None:
    """B11: a marker that is unreadable, or went between listing and reading, gives a reason and no error."""
    store = FaultyStore(hf(b'{"global_step": 500}'), [("read", MARKER, fails(error))])
    assert await incomplete(store, HF, SAVE) == f"trainer_state.json {reason}"
    assert await incomplete(store, HF, SAVE) is None


@pytest.mark.parametrize("operation", ["list", "read"])
async def test_a_failing_store_says_nothing_about_the_save(operation: str) -> None:
    """Where the store fails it is not known whether the save is complete: that is an error, not a reason."""
    store = FaultyStore(hf(b'{"global_step": 500}'), [(operation, f"{SAVE}*", fails(Unavailable))])
    with pytest.raises(Unavailable):
        await incomplete(store, HF, SAVE)


async def test_a_complete_save_costs_two_listings_and_one_read() -> None:
    """The marker is looked for in a listing, never asked for by its name (rule 9)."""
    store = FaultyStore(hf(b'{"global_step": 500}'))
    assert await incomplete(store, HF, SAVE) is None
    assert store.calls == [("list", SAVE), ("read", MARKER), ("list", SAVE)]


async def test_an_unmarked_save_costs_one_listing() -> None:
    """As long as there is no marker nothing is opened."""
    memory = hf(b"")
    memory.remove(MARKER)
    store = FaultyStore(memory)
    await incomplete(store, HF, SAVE)
    assert store.calls == [("list", SAVE)]


# Trainer's own sign


async def test_a_save_with_trainer_s_sign_is_not_complete() -> None:
    """While the sign stands in the folder the save is not complete, whatever its marker says."""
    store = hf(b'{"global_step": 500}')
    store.write(f"{SAVE}/{SIGN}")
    assert await incomplete(store, HF, SAVE) == f"{SIGN} stands in it"
    store.remove(f"{SAVE}/{SIGN}")
    assert await incomplete(store, HF, SAVE) is None


@pytest.mark.parametrize("kind", [Kind.LINK, Kind.OTHER, b""])
async def test_the_sign_may_be_anything_of_that_name(kind: Kind | bytes) -> None:
    """The name alone is the sign."""
    store = hf(b'{"global_step": 500}')
    store.write(f"{SAVE}/{SIGN}", kind)
    assert await incomplete(store, HF, SAVE) == f"{SIGN} stands in it"


@pytest.mark.parametrize("effect", [before, after])
async def test_the_sign_is_looked_for_after_the_marker_was_read(effect: type) -> None:
    """A sign that appears while the marker is read is seen: it is looked for again after the marker."""
    memory = hf(b'{"global_step": 500}')
    store = FaultyStore(memory, [("read", MARKER, effect(lambda: memory.write(f"{SAVE}/{SIGN}")))])
    assert await incomplete(store, HF, SAVE) == f"{SIGN} stands in it"


async def test_a_sign_elsewhere_means_nothing() -> None:
    """Only a sign in the save's own folder counts, and only by its exact name."""
    store = hf(b'{"global_step": 500}')
    for key in (f"{SAVE}/nested/{SIGN}", f"exec/{ATTEMPT}/{SIGN}", f"{SAVE}/{SIGN}.bak", f"{SAVE}/x{SIGN}"):
        store.write(key)
    assert await incomplete(store, HF, SAVE) is None
    assert await unfinished(store, HF, SAVE) is None


async def test_the_sign_is_trainer_s_alone() -> None:
    """A framework without a sign is not asked for one; neither is a save of no known framework."""
    store = MemoryStore()
    store.write(f"exec/1/step-5/{SIGN}")
    store.write("exec/1/step-5/.metadata")
    assert await incomplete(store, DCP, "exec/1/step-5") is None
    faulty = FaultyStore(store)
    assert [await unfinished(faulty, framework, "exec/1/step-5") for framework in (DCP, None)] == [None, None]
    assert faulty.calls == []


# dcp


async def test_b12_a_dcp_save_is_complete_once_metadata_stands() -> None:
    """`.metadata` by its very name, empty or not, nothing else."""
    store = MemoryStore()
    for name in ("__0_0.distcp", ".metadata.tmp", "__0.metadata", "metadata", ".Metadata", "nested/.metadata"):
        store.write(f"exec/1/step-20/{name}", b"x")
    assert await incomplete(store, DCP, "exec/1/step-20") == "no .metadata yet"
    store.write("exec/1/step-20/.metadata")
    assert await incomplete(store, DCP, "exec/1/step-20") is None


# Markers too large to be decoded in this process


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A marker of more than 64 MiB, as a long log_history makes it: its end is still to be written."""
    path = tmp_path_factory.mktemp("large") / "trainer_state.json"
    with path.open("wb") as file:
        file.write(b'{"log_history": [NaN')
        for _ in range(65):
            file.write(b',\n{"text": "%s"}' % (b"x" * MIB))
        file.write(b"], ")
    assert path.stat().st_size > 64 * MIB
    return path


ENDS: dict[str, tuple[bytes, str | None]] = {
    "complete": (b'"global_step": 500}', None),
    "cut off": (b'"global_step": 50', "trainer_state.json does not decode (JSONDecodeError)"),
    "wrong step": (b'"global_step": 499}', "trainer_state.json says global_step 499"),
}


@pytest.fixture
def large_save(root: Root, large: Path) -> Iterator[Path]:
    """A save whose marker is the large one; it has no end yet."""
    marker = root.hf(500) / "trainer_state.json"
    marker.unlink()
    os.link(large, marker)
    size = marker.stat().st_size
    yield marker
    os.truncate(large, size)


@pytest.mark.parametrize("end", ENDS)
async def test_b55_a_large_marker_costs_this_process_no_memory(root: Root, large_save: Path, end: str) -> None:
    """More than 64 MiB are decoded in a child: the answer is right, and the own memory does not grow by the file's size."""
    content, reason = ENDS[end]
    with large_save.open("ab") as file:
        file.write(content)
    store = PosixStore(str(root.path))
    before_it = memory_peak_from_now()
    assert await incomplete(store, HF, SAVE) == reason
    assert memory("VmHWM") - before_it < 24 * MIB


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def memory_peak_from_now() -> int:
    """Start measuring the peak anew; what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        require("clear_refs", str(error))
    return memory("VmHWM")


async def test_what_is_not_larger_than_the_limit_is_decoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is larger needs a child, which a marker of more than 64 MiB must have."""
    assert frameworks.IN_PROCESS_LIMIT <= 64 * MIB
    monkeypatch.setattr("publishd.frameworks.IN_PROCESS_LIMIT", 19)
    monkeypatch.setattr("asyncio.create_subprocess_exec", lambda *_, **__: pytest.fail("a child was started"))
    assert await incomplete(hf(b'{"global_step":500}'), HF, SAVE) is None


@pytest.fixture
async def reaped() -> AsyncIterator[None]:
    """Wait after the test until no child is left, nor a pipe to one."""
    open_before = pipes()
    yield
    await asyncio.to_thread(eventually, lambda: not children() and pipes() <= open_before, "the end of the child")


class Decoding:
    """A marker that is being decoded by a child, which waits for the content until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("publishd.frameworks.IN_PROCESS_LIMIT", -1)
        self.go, reached = asyncio.Event(), asyncio.Event()
        store = FaultyStore(hf(b'{"global_step": 500}'), [("stream", MARKER, waits(self.go, reached=reached))])
        self.task = asyncio.create_task(incomplete(store, HF, SAVE))
        self.reached = reached

    async def child(self) -> int:
        """The child's process id, once it ignores what it is to ignore."""
        await self.reached.wait()
        found = await asyncio.to_thread(eventually, lambda: [pid for pid in children() if ignored(pid)], "the child")
        assert len(found) == 1
        return int(found[0])


def children() -> list[int]:
    """The children of this process that decode markers."""
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"global_step" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def pipes() -> int:
    """How many pipes this process holds open."""
    return sum(os.readlink(fd).startswith("pipe:") for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())


def ignored(pid: int) -> set[int]:
    """The signals that a process ignores."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    mask = int(line.split()[1], 16)
    return {number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if mask >> (number - 1) & 1}


@pytest.mark.usefixtures("reaped")
async def test_a_child_that_is_no_longer_wanted_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the decoding is given up, by a deadline or a signal, no child stays behind."""
    decoding = Decoding(monkeypatch)
    await decoding.child()
    decoding.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decoding.task


@pytest.mark.usefixtures("reaped")
async def test_a_child_that_is_killed_leaves_the_save_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that the kernel ended for its memory says nothing about the marker: not complete yet, and tried again."""
    decoding = Decoding(monkeypatch)
    os.kill(await decoding.child(), signal.SIGKILL)
    decoding.go.set()
    assert await decoding.task == "trainer_state.json does not decode (its child was killed)"


@pytest.mark.usefixtures("reaped")
async def test_a_child_ignores_what_is_sent_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's or a terminal's signal to all processes does not spoil the marker that is just being decoded."""
    decoding = Decoding(monkeypatch)
    child = await decoding.child()
    await asyncio.to_thread(eventually, lambda: len(ignored(child)) == 3, "ignoring all three")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(child, number)
    decoding.go.set()
    assert await decoding.task is None


@pytest.mark.usefixtures("reaped")
async def test_a_large_marker_that_vanishes_is_not_complete_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between asking for its size and streaming it the marker may go."""
    monkeypatch.setattr("publishd.frameworks.IN_PROCESS_LIMIT", -1)
    store = FaultyStore(hf(b'{"global_step": 500}'), [("stream", MARKER, fails(NotFound))])
    assert await incomplete(store, HF, SAVE) == "trainer_state.json vanished"


async def test_no_child_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for another process that is an error that may pass, not a reason."""
    monkeypatch.setattr("publishd.frameworks.IN_PROCESS_LIMIT", -1)
    monkeypatch.setattr("publishd.frameworks.sys.executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="No such file"):
        await incomplete(hf(b'{"global_step": 500}'), HF, SAVE)


@pytest.mark.usefixtures("reaped")
async def test_a_child_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that never answers is ended after its time, and the save is not complete yet."""
    monkeypatch.setattr("publishd.frameworks.IN_PROCESS_LIMIT", -1)
    monkeypatch.setattr("publishd.frameworks._CHILD_SECONDS", 0.2)
    monkeypatch.setattr("publishd.frameworks._CHILD", "global_step = __import__('time').sleep(60)")
    assert await incomplete(hf(b'{"global_step": 500}'), HF, SAVE) == "trainer_state.json takes longer than 0.2 s to decode"


def test_the_child_does_not_read_the_environment(root: Root) -> None:
    """What PYTHON* variables or a module in the working folder would change is the same for every decoder."""
    (root.path / "json.py").write_text("raise SystemExit('fooled')")
    program = (
        "import asyncio, sys; from publishd import frameworks; from publishd.stores.posix import PosixStore\n"
        "frameworks.IN_PROCESS_LIMIT = -1\n"
        f"print(asyncio.run(frameworks.incomplete(PosixStore(sys.argv[1]), frameworks.FRAMEWORKS['hf'], {SAVE!r})))"
    )
    root.hf(500)
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONSTARTUP": "json.py", "PYTHONINSPECT": "", "PYTHONHOME": ""}
    ran = subprocess.run([sys.executable, "-c", program, root.path], cwd=root.path, env=env, capture_output=True, check=False)
    assert ran.stdout == b"None\n", ran
