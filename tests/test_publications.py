"""The names of publications, and publishing and resolving over a store (rules 1, 5, 6, 7 and 8)."""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes import FaultyStore, MemoryStore, after, before, cancels, fails, loses_reply, passes, waits
from publishd.errors import (
    Denied,
    InvalidEntry,
    NotAFolder,
    NotFound,
    NotPublished,
    PerhapsOurs,
    StoreError,
    SyncFailed,
    Unavailable,
)
from publishd.publications import (
    Announced,
    Publication,
    Saves,
    announce,
    check_path,
    longest_path,
    look_again,
    parse,
    present,
    publish,
    published,
    read,
    resolve,
    resolve_verified,
    unsafe,
    withdrawn,
)
from publishd.stores import PRUNE, PUB, Kind, list_fresh

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fakes import Effect

EXECUTION = "exec/1.4101.0"
SAVE = f"{EXECUTION}/checkpoint-500"
REFERENCE = "00000000000001000000-00000000000000000500-MV4GKYZPGEXDIMJQGEXDAL3DNBSWG23QN5UW45BNGUYDA"
MAX = 2**64 - 1
HEAD = f"{1_000_000:020}-{500:020}-"


def name(path: str | bytes, epoch: str = f"{1_000_000:020}", step: str = f"{500:020}") -> str:
    """An entry's name made without publishd, whatever its path is."""
    raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    return f"{epoch}-{step}-{base64.b32encode(raw).decode().rstrip('=')}"


# The codec


def test_the_reference_value() -> None:
    """The name that the storage format gives as its example is made and read."""
    publication = Publication(1_000_000, 500, SAVE)
    assert publication.name == REFERENCE
    assert parse(REFERENCE) == publication
    assert (publication.key, publication.record) == (f"pub/{REFERENCE}", f"prune/{REFERENCE}")


GOOD_PATHS = [
    SAVE,
    "checkpoint-5",
    "a",
    "exec/1/x",
    "executions/1",
    "exec2/1",
    "pub2/a",
    "public",
    "prunes/a",
    "a/pub",
    "a/prune/b",
    "a/exec",
    "...",
    ".hidden/..b/c..",
    " ",
    "-rf",
    "a\\b",
    "läuf/lau\u0308f",
    "caf\udce9/\udc80",
    "日本\u2028",
    "*?[a]",
    "=",
]


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_a_safe_path_survives_the_way_there_and_back(path: str) -> None:
    """Any relative path without control characters can be published, whatever its bytes."""
    publication = Publication(0, MAX, path)
    assert publication.name == name(path, "0" * 20, str(MAX))
    assert parse(publication.name) == publication
    assert unsafe(path) is None


BAD_PATHS = {
    "empty": "",
    "dot": ".",
    "dots": "..",
    "absolute": "/etc",
    "root": "/",
    "trailing slash": "exec/1/x/",
    "doubled slash": "exec//1/x",
    "dot inside": "exec/./1/x",
    "dot at the end": "exec/1/x/.",
    "dots inside": "exec/1/x/../../../../etc",
    "dots at the start": "../other/x",
    "dots at the end": "exec/1/..",
    "newline": "exec/1/a\nrm -rf x",
    "newline at the end": "exec/1/x\n",
    "nul": "exec/1/x\0",
    "escape": "exec/1/\x1b[31m",
    "delete": "exec/1/\x7f",
    "C1": "exec/1/\x85",
    "last C1": "exec/1/\x9f",
    "pub": "pub",
    "in pub": f"pub/{REFERENCE}",
    "prune": "prune",
    "in prune": "prune/x/y",
    "exec": "exec",
    "execution": "exec/1.4101.0",
}


@pytest.mark.parametrize("path", BAD_PATHS.values(), ids=BAD_PATHS.keys())
def test_an_unsafe_path_does_not_parse(path: str) -> None:
    """No entry names what lies outside the root, what is publishd's own, a whole execution, or what can't be printed."""
    with pytest.raises(ValueError, match=r"\S"):
        parse(name(path))
    assert unsafe(path)
    with pytest.raises(NotPublished):
        check_path(path, 255)


BAD_NAMES = {
    "nothing": "",
    "stray": "README",
    "temporary": f".{REFERENCE}.tmp",
    "no path": HEAD,
    "no dash": HEAD[:-1],
    "too many dashes": HEAD.replace("-", "--") + "MFRGG",
    "19 digits": name("abc", epoch=f"{1_000_000:019}"),
    "21 digits": name("abc", epoch=f"{1_000_000:021}"),
    "19 digits of step": name("abc", step=f"{500:019}"),
    "21 digits of step": name("abc", step=f"{500:021}"),
    "epoch too great": name("abc", epoch=str(MAX + 1)),
    "step too great": name("abc", step=str(MAX + 1)),
    "greatest 20 digits": name("abc", epoch="9" * 20),
    "sign": name("abc", epoch="+" + "0" * 19),
    "minus": name("abc", step="-" + "0" * 19),
    "underscore": name("abc", epoch="1_0" + "0" * 17),
    "blank": name("abc", epoch=" " + "0" * 19),
    "hexadecimal": name("abc", epoch="0x" + "0" * 18),
    "Arabic-Indic digits": name("abc", epoch="٠" * 19 + "٥"),
    "superscript": name("abc", step="0" * 19 + "²"),
    "full-width digit": name("abc", step="0" * 19 + "５"),
    "lower case": REFERENCE.lower(),
    "one lower-case letter": HEAD + "MFRGg",
    "padding": HEAD + "MFRGG===",
    "zero for O": HEAD + "MFRG0",
    "one for I": HEAD + "MFRG1",
    "eight": HEAD + "MFRG8",
    "base32hex": HEAD + "C5H66",
    "unicode letter": HEAD + "MFRGＧ",
    "underscore in path": HEAD + "MF_GG",
    "slash": HEAD + "MFRGG/",
    "blank at the end": f"{REFERENCE} ",
    "newline at the end": f"{REFERENCE}\n",
    "carriage return at the end": f"{REFERENCE}\r",
    "newline at the start": f"\n{REFERENCE}",
    "suffix": f"{REFERENCE}.tmp",
    "hidden": f".{REFERENCE}",
    "not UTF-8": f"{REFERENCE}\udce9",
    # 'a' is ME; MF, MG and MH differ in bits that stand for nothing.
    "spare bit, 2 letters": HEAD + "MF",
    "spare bits, 2 letters": HEAD + "MH",
    "spare bit, 4 letters": HEAD + "MFRB",
    "spare bit, 5 letters": HEAD + "MFRGH",
    "spare bit, 7 letters": HEAD + "MFRGGZB",
    "1 letter": HEAD + "A",
    "3 letters": HEAD + "MFR",
    "6 letters": HEAD + "MFRGGZ",
    "9 letters": HEAD + "MFRGGZDFA",
    "11 letters": HEAD + "MFRGGZDFMFR",
    "zeros": HEAD + "AAAAAAAA",
}


@pytest.mark.parametrize("bad", BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_a_malformed_name_does_not_parse(bad: str) -> None:
    """Only the one canonical spelling of a publication is a name."""
    with pytest.raises(ValueError, match=r"\S"):
        parse(bad)


# Other things run beside the tests: how long one example takes says nothing.
calm = settings(deadline=None)
components = st.text(st.characters(blacklist_categories=["Cc", "Cs"], blacklist_characters="/"), min_size=1, max_size=12).filter(
    lambda text: text not in (".", "..")
)
raw_components = st.binary(min_size=1, max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
numbers = st.integers(0, MAX) | st.sampled_from([0, 1, 9, 10, MAX - 1, MAX])
paths = st.lists(components | raw_components, min_size=1, max_size=4).map("/".join).filter(lambda path: unsafe(path) is None)
publications = st.builds(Publication, numbers, numbers, paths)


@calm
@given(publications)
def test_any_publication_survives_the_way_there_and_back(publication: Publication) -> None:
    """Encoding and decoding are inverse, and the name is that of RFC 4648."""
    assert parse(publication.name) == publication
    assert publication.name == name(publication.path, f"{publication.epoch:020}", f"{publication.step:020}")
    assert re.fullmatch("[0-9]{20}-[0-9]{20}-[A-Z2-7]+", publication.name)


@calm
@given(publications, publications)
def test_names_are_ordered_as_publications_are(one: Publication, other: Publication) -> None:
    """A greater name is a greater (epoch, step), so that every reader agrees which is the latest."""
    if one[:2] != other[:2]:
        assert (one.name < other.name) == (one[:2] < other[:2])
    assert (one.name == other.name) == (one == other)


def decoded(text: str) -> bytes | None:
    """The standard library's decoder, made strict: None unless the text is the canonical encoding of what it decodes to."""
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError:
        return None
    return raw if base64.b32encode(raw).decode().rstrip("=") == text else None


@calm
@given(
    st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", min_size=1, max_size=40)
    | st.text("ABCdef01289=-_ Ａ", min_size=1, max_size=10)
    | st.binary(min_size=1, max_size=30).map(lambda raw: base64.b32encode(raw).decode().rstrip("="))
)
@example("MF")
@example("MFRGH")
def test_the_decoder_agrees_with_base64(text: str) -> None:
    """A name parses exactly if the standard library's decoder gives a safe path that encodes to it again."""
    raw = decoded(text)
    path = None if raw is None else raw.decode("utf-8", "surrogateescape")
    if path is None or unsafe(path):
        with pytest.raises(ValueError, match=r"\S"):
            parse(HEAD + text)
    else:
        assert parse(HEAD + text).path == path


@calm
@given(st.text("./pubrnexc1\n\x7f\x85é", max_size=12))
def test_a_path_parses_exactly_if_it_is_safe(path: str) -> None:
    """What may be published and what may be read are the same paths."""
    if unsafe(path):
        with pytest.raises(ValueError, match=r"\S"):
            parse(name(path))
    else:
        assert parse(name(path)).path == path


@pytest.mark.parametrize(("limit", "longest"), [(255, 133), (143, 63), (44, 1), (43, 0), (42, 0), (10, 0), (1024, 613)])
def test_the_longest_path_that_a_name_limit_leaves(limit: int, longest: int) -> None:
    """A name limit of 255 bytes leaves 133 bytes of path."""
    assert longest_path(limit) == longest
    assert len(Publication(0, 0, "x" * (longest + 1)).name) > limit
    assert not longest or len(Publication(0, 0, "x" * longest).name) <= limit


@pytest.mark.parametrize("letter", ["x", "ü", "日", "\udce9"])
def test_a_path_too_long_is_refused_with_the_limit(letter: str) -> None:
    """The limit counts bytes, and stands in the message (rule 3)."""
    size = len(letter.encode("utf-8", "surrogateescape"))
    fits = letter * (133 // size) + "x" * (133 % size)
    check_path(fits, 255)
    with pytest.raises(NotPublished, match=r"\b134\b.*\b133\b"):
        check_path(fits + "x", 255)


# Publishing


@pytest.fixture
def memory() -> MemoryStore:
    """A root with one save."""
    store = MemoryStore()
    hf(store, 500)
    return store


def hf(store: MemoryStore, step: int, execution: str = EXECUTION) -> Publication:
    """A complete Trainer save; its publication, which is not made."""
    save = f"{execution}/checkpoint-{step}"
    store.write(f"{save}/model.safetensors", b"weights")
    store.write(f"{save}/trainer_state.json", b'{"global_step": %d}' % step)
    return Publication(1_000_000, step, save)


def published_hf(store: MemoryStore, *steps: int) -> list[Publication]:
    """Complete saves with their entries."""
    made = [hf(store, step) for step in steps]
    for publication in made:
        store.write(publication.key)
    return made


PUBLICATION = Publication(1_000_000, 500, SAVE)
NAME = PUBLICATION.name


async def test_publishing_creates_one_entry(memory: MemoryStore) -> None:
    """The entry is the only thing in pub/, and it is empty."""
    assert await publish(memory, PUBLICATION) is Announced.CREATED
    assert memory.names(PUB) == [NAME]
    assert memory.contents[PUBLICATION.key] == b""


async def test_publishing_again_is_success_and_touches_nothing(memory: MemoryStore) -> None:
    """An entry that stands is as good as one just made (rule 1)."""
    memory.write(PUBLICATION.key, b"somebody's")
    contents = dict(memory.contents)
    assert await publish(memory, PUBLICATION) is Announced.EXISTED
    assert memory.contents == contents


@pytest.mark.parametrize("two_step_move", [False, True])
async def test_of_many_publishers_one_creates_the_entry(two_step_move: bool) -> None:
    """Many publishers of one save are harmless: all succeed, one entry stands (rule 1)."""
    store = MemoryStore(two_step_move=two_step_move)
    results = await asyncio.gather(*(publish(store, hf(store, 500)) for _ in range(30)))
    assert Counter(results) == {Announced.CREATED: 1, Announced.EXISTED: 29}
    assert store.names(PUB) == [NAME]


async def test_an_entry_whose_reply_was_lost_is_found_by_the_next_try(memory: MemoryStore) -> None:
    """Where nobody can tell whether the entry was made, publishing fails, and trying again succeeds (rule 1)."""
    store = FaultyStore(memory, [("create", "pub/*", loses_reply())])
    with pytest.raises(Unavailable):
        await publish(store, PUBLICATION)
    assert await publish(store, PUBLICATION) is Announced.EXISTED
    assert memory.names(PUB) == [NAME]


async def test_an_entry_that_may_be_ours_is_success(memory: MemoryStore) -> None:
    """After a lost answer nobody claims to know who made the entry (rule 1)."""
    store = FaultyStore(memory, [("create", "pub/*", loses_reply(PerhapsOurs))])
    assert await publish(store, PUBLICATION) is Announced.EITHER
    assert memory.names(PUB) == [NAME]


async def test_an_entry_that_may_be_ours_is_looked_at_again(memory: MemoryStore) -> None:
    """What this call may have created it takes back if the save is gone by now (rule 5)."""
    store = FaultyStore(memory, [("create", "pub/*", loses_reply(PerhapsOurs)), ("list", PRUNE, passes)])
    store.script.append(("list", PRUNE, before(lambda: memory.remove(SAVE))))
    with pytest.raises(NotPublished, match="gone"):
        await publish(store, PUBLICATION)
    assert memory.names(PUB) == []


async def test_the_save_is_durable_before_the_entry_is_created(memory: MemoryStore) -> None:
    """The store is asked to sync the save first (rule 2)."""
    store = FaultyStore(memory)
    await publish(store, PUBLICATION)
    assert memory.synced == [(SAVE, True)]
    assert store.calls.index(("sync", SAVE)) < store.calls.index(("create", PUBLICATION.key))


@pytest.mark.parametrize("operation", ["list", "sync", "create", "name_limit"])
@pytest.mark.parametrize("error", [SyncFailed, Denied, Unavailable])
async def test_a_failing_store_leaves_no_entry(memory: MemoryStore, operation: str, error: type[StoreError]) -> None:
    """Where the first call of a kind fails nothing is published, and the failure is told as it is (rule 2)."""
    store = FaultyStore(memory, [(operation, "*", fails(error))])
    with pytest.raises(error):
        await publish(store, PUBLICATION)
    assert memory.names(PUB) == []


@pytest.mark.parametrize("operation", ["list", "sync", "create"])
async def test_a_cancelled_publish_leaves_no_entry(memory: MemoryStore, operation: str) -> None:
    """Where publishing is cancelled on the way, nothing is published."""
    store = FaultyStore(memory, [(operation, "*", cancels())])
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(publish(store, PUBLICATION))
    assert memory.names(PUB) == []


@pytest.mark.parametrize("path", ["exec/1.4101.0/none", "exec/none/checkpoint-500", f"{SAVE}/trainer_state.json/x", f"{SAVE}0"])
async def test_a_save_that_is_not_there_is_not_published(memory: MemoryStore, path: str) -> None:
    """A save must be there to be published."""
    with pytest.raises(NotPublished, match=re.escape(path)):
        await publish(memory, Publication(1_000_000, 500, path))
    assert memory.names(PUB) == []


async def test_a_path_too_long_is_refused_before_anything_is_done() -> None:
    """The limit is the store's, and nothing is listed, synced or created beyond asking for it (rule 3)."""
    store = FaultyStore(MemoryStore(name_limit=80))
    with pytest.raises(NotPublished, match=r"\b23\b"):
        await publish(store, PUBLICATION)
    assert [operation for operation, _ in store.calls] == ["name_limit"]


async def test_a_file_may_be_published(memory: MemoryStore) -> None:
    """A save may be a single file."""
    memory.write(f"{EXECUTION}/last.ckpt", b"x")
    assert await publish(memory, Publication(1, 2, f"{EXECUTION}/last.ckpt")) is Announced.CREATED


async def test_two_saves_of_one_step_are_two_publications(memory: MemoryStore) -> None:
    """B08: by hand, two saves at one step give two entries, and every reader takes the one of the greater name."""
    for run in ("run-0", "run-1"):
        hf(memory, 459, f"{EXECUTION}/{run}")
        await publish(memory, Publication(1_000_000, 459, f"{EXECUTION}/{run}/checkpoint-459"))
    assert len(memory.names(PUB)) == 2
    latest = await resolve(memory)
    assert latest
    assert latest.name == memory.names(PUB)[-1]
    assert latest.path == f"{EXECUTION}/run-1/checkpoint-459"


# Looking again (rule 5)

WITHDRAWN = {
    "itself": SAVE,
    "something inside": f"{SAVE}/rank-0",
    "something around": "exec/1.4101.0",
    "all around": "exec",
}
NOT_WITHDRAWN = {"longer name": f"{SAVE}0", "shorter name": SAVE[:-1], "sibling": f"{EXECUTION}/x", "elsewhere": "checkpoint-500"}


def record(path: str) -> str:
    """The key of a record of another epoch that names this path."""
    return f"{PRUNE}/{name(path, epoch='0' * 20)}"


@pytest.mark.parametrize("path", [SAVE, f"{SAVE}/rank-0", "runs", "runs/a/b/c"])
async def test_a_recorded_save_is_not_published(memory: MemoryStore, path: str) -> None:
    """A save that a prune has withdrawn, or one inside or around it, gets no entry (rules 5 and 12)."""
    memory.write("runs/a/b/file")
    memory.write(record(path))
    publication = PUBLICATION if path.startswith(SAVE) else Publication(1, 1, "runs/a/b")
    store = FaultyStore(memory)
    with pytest.raises(NotPublished, match="prune"):
        await publish(store, publication)
    assert (store.count("sync"), store.count("create")) == (0, 0)


@pytest.mark.parametrize("path", NOT_WITHDRAWN.values(), ids=NOT_WITHDRAWN.keys())
async def test_a_record_of_another_save_is_no_hindrance(memory: MemoryStore, path: str) -> None:
    """Neither a sibling's record nor junk in prune/ stops a publication (rule 5)."""
    memory.write(record(path))
    memory.write(f"{PRUNE}/junk")
    assert await publish(memory, PUBLICATION) is Announced.CREATED


@pytest.mark.parametrize("path", [SAVE, f"{SAVE}/rank-0"])
async def test_an_entry_is_taken_back_if_a_record_appeared_meanwhile(memory: MemoryStore, path: str) -> None:
    """A prune that recorded the save while it was being published wins: the publisher removes its entry and fails (rule 5)."""
    store = FaultyStore(memory, [("create", "pub/*", before(lambda: memory.write(record(path))))])
    with pytest.raises(NotPublished, match="prune"):
        await publish(store, PUBLICATION)
    assert memory.names(PUB) == []


async def test_an_entry_is_taken_back_if_a_record_around_it_appeared(memory: MemoryStore) -> None:
    """A record that names something around the save withdraws it as well (rule 5)."""
    memory.write("runs/a/b/file")
    store = FaultyStore(memory, [("create", "pub/*", after(lambda: memory.write(record("runs/a"))))])
    with pytest.raises(NotPublished, match="prune"):
        await publish(store, Publication(1, 1, "runs/a/b"))
    assert memory.names(PUB) == []


@pytest.mark.parametrize("moment", [before, after])
async def test_an_entry_is_taken_back_if_the_save_is_gone(
    memory: MemoryStore, moment: Callable[[Callable[[], object]], Effect]
) -> None:
    """A save that vanished while it was being published is not published (rule 5)."""
    effect = moment(lambda: memory.remove(SAVE))
    store = FaultyStore(memory, [("create", "pub/*", effect)])
    with pytest.raises(NotPublished, match=f"{SAVE}.*gone"):
        await publish(store, PUBLICATION)
    assert memory.names(PUB) == []


async def test_only_the_own_entry_is_taken_back(memory: MemoryStore) -> None:
    """Another publisher's entry of the same save is not this one's to remove (rule 5)."""
    other = PUBLICATION._replace(epoch=999)
    memory.write(other.key)
    store = FaultyStore(memory, [("create", "pub/*", after(lambda: memory.remove(SAVE)))])
    with pytest.raises(NotPublished):
        await publish(store, PUBLICATION)
    assert memory.names(PUB) == [other.name]


async def test_an_entry_that_stood_before_is_never_taken_back(memory: MemoryStore) -> None:
    """Who did not create the entry does not remove it, even if the save is gone by now (rules 1 and 5)."""
    memory.write(PUBLICATION.key)
    store = FaultyStore(memory, [("create", "pub/*", before(lambda: memory.remove(SAVE)))])
    assert await publish(store, PUBLICATION) is Announced.EXISTED
    assert memory.names(PUB) == [NAME]


async def test_looking_again_tells_the_good_from_the_bad(memory: MemoryStore) -> None:
    """Of several entries created, exactly those go whose save is gone or withdrawn (rule 5)."""
    good, gone, recorded = published_hf(memory, 1, 2, 3)
    memory.remove(gone.path)
    memory.write(record(recorded.path))
    refused = await look_again(memory, [good, gone, recorded], await withdrawn(memory))
    assert set(refused) == {gone, recorded}
    assert memory.names(PUB) == [good.name]


async def test_looking_again_costs_two_listings(memory: MemoryStore) -> None:
    """However many entries of one execution were created, its folder and prune/ are listed once."""
    memory.write(f"{PRUNE}/junk")
    made = published_hf(memory, *range(1, 20))
    store = FaultyStore(memory)
    assert await look_again(store, made, await withdrawn(store)) == {}
    assert sorted(store.calls) == [("list", EXECUTION), ("list", PRUNE)]


async def test_a_doubtful_second_look_is_an_error(memory: MemoryStore) -> None:
    """Where the second look fails the publisher says so; it does not claim success (rules 5 and 6)."""
    store = FaultyStore(memory, [("create", "pub/*", after(lambda: store.script.append(("list", "*", fails()))))])
    with pytest.raises(Unavailable):
        await publish(store, PUBLICATION)


async def test_trainers_own_sign_is_looked_for_again_before_the_create(memory: MemoryStore) -> None:
    """A save in which Trainer's sign appeared during the sync is not published."""
    torn = before(lambda: memory.write(f"{SAVE}/checkpoint-is-incomplete.txt"))
    store = FaultyStore(memory, [("sync", "*", torn)])
    with pytest.raises(NotPublished, match=r"checkpoint-is-incomplete\.txt"):
        await announce(store, PUBLICATION)
    assert memory.names(PUB) == []


# Resolving (rules 6, 7 and 8)


async def test_a_root_without_entries_resolves_to_nothing(memory: MemoryStore) -> None:
    """A root that was read and has no entry is "nothing yet", saves or not; B69."""
    for store in (memory, MemoryStore()):
        assert await resolve(store) is None
        assert await resolve_verified(store, lambda *_: pytest.fail("nothing to pass over")) is None


async def test_the_latest_is_the_greatest_epoch_then_step(memory: MemoryStore) -> None:
    """B16: order is by number, 10000 after 9000; a later epoch wins over a greater step."""
    published_hf(memory, 9_000, 10_100, 9_900, 10_000)
    latest = await resolve(memory)
    assert latest
    assert latest.step == 10_100
    memory.write(PUBLICATION._replace(epoch=1_000_001).key)
    assert await resolve(memory) == PUBLICATION._replace(epoch=1_000_001)


async def test_step_zero_is_a_step() -> None:
    """B14: step 0 of epoch 0 is resolved like any other."""
    store = MemoryStore()
    first = hf(store, 0)._replace(epoch=0)
    store.write(first.key)
    assert await resolve(store) == first


async def test_published_is_in_order_latest_last(memory: MemoryStore) -> None:
    """The whole list is ordered by epoch, step, name."""
    made = [Publication(epoch, step, path) for epoch in (2, 1) for step in (10, 9) for path in ("b", "a")]
    for publication in made:
        memory.write(publication.key)
    assert await published(memory) == sorted(made, key=lambda publication: publication.name)


RESOLVING: dict[str, Callable[[FaultyStore], Awaitable[object]]] = {
    "resolve": resolve,
    "verify": lambda store: resolve_verified(store, lambda *_: None),
    "list": published,
}


@pytest.mark.parametrize("command", RESOLVING)
@pytest.mark.parametrize("error", [NotFound, NotAFolder, Denied, Unavailable])
@pytest.mark.parametrize("folder", [PUB, ""])
async def test_any_doubt_about_the_listing_is_an_error(command: str, error: type[StoreError], folder: str) -> None:
    """Where pub/ can't be listed, or neither it nor the root, there is no answer (rule 6)."""
    script = [("list", PUB, fails(NotFound)), ("list", "", fails(error))] if folder == "" else [("list", PUB, fails(error))] * 2
    memory = MemoryStore()
    published_hf(memory, 500)
    store = FaultyStore(memory, script)
    with pytest.raises(error):
        await RESOLVING[command](store)


@pytest.mark.parametrize("command", ["resolve", "verify"])
@pytest.mark.parametrize("pattern", [EXECUTION, SAVE])
@pytest.mark.parametrize("error", [Denied, Unavailable])
async def test_any_doubt_about_the_save_is_an_error(command: str, pattern: str, error: type[StoreError]) -> None:
    """Where it can't be seen whether the save is there and whole, there is no answer (rule 6)."""
    memory = MemoryStore()
    published_hf(memory, 500)
    with pytest.raises(error):
        await RESOLVING[command](FaultyStore(memory, [("list", pattern, fails(error))]))


@pytest.mark.parametrize("command", RESOLVING)
async def test_a_missing_root_is_an_error(command: str) -> None:
    """A root that is not there is not "nothing yet" (rule 6)."""
    store = FaultyStore(MemoryStore(), [("list", "", fails(NotFound))])
    with pytest.raises(NotFound):
        await RESOLVING[command](store)


async def test_a_missing_pub_is_believed_only_if_the_root_lacks_it(memory: MemoryStore) -> None:
    """A "no such folder" that the root's listing belies is not believed: pub/ is listed again (rule 6)."""
    store = FaultyStore(memory, [("list", PUB, fails(NotFound))])
    memory.write(PUBLICATION.key)
    assert await resolve(store) == PUBLICATION
    assert store.calls[:3] == [("list", PUB), ("list", ""), ("list", PUB)]


async def test_a_pub_that_is_listed_but_not_found_again_is_an_error(memory: MemoryStore) -> None:
    """Where the root shows pub/ and it can't be opened all the same, there is no answer (rule 6)."""
    memory.write(PUBLICATION.key)
    with pytest.raises(NotFound):
        await resolve(FaultyStore(memory, [("list", PUB, fails(NotFound))] * 2))


async def test_an_execution_that_seems_missing_is_looked_for_in_its_parent(memory: MemoryStore) -> None:
    """The save's own folders are not given up on a cached "no such folder" either (rule 6)."""
    memory.write(PUBLICATION.key)
    store = FaultyStore(memory, [("list", EXECUTION, fails(NotFound)), ("list", "exec", fails(NotFound))])
    assert await resolve(store) == PUBLICATION
    assert await list_fresh(FaultyStore(memory, [("list", SAVE, fails(NotFound))]), SAVE) is not None


@pytest.mark.parametrize("command", RESOLVING)
async def test_resolving_changes_nothing(memory: MemoryStore, command: str) -> None:
    """Only listings and reads are made (rule 6)."""
    published_hf(memory, 400, 500)
    store, contents = FaultyStore(memory), dict(memory.contents)
    await RESOLVING[command](store)
    assert {operation for operation, _ in store.calls} <= {"list", "read"}
    assert memory.contents == contents


STRAYS: list[tuple[str, bytes | Kind]] = [
    ("README", b""),
    (f"{REFERENCE}.tmp", b""),
    (name("abc") + "\n", b""),
    (HEAD + "MF", b""),
    (name("../other/x"), b""),
    (name("exec/1"), b""),
    (name("exec/1/link"), Kind.LINK),
    (name("exec/1/fifo"), Kind.OTHER),
    (f"{name('exec/1/folder')}/inside", b""),
]


@pytest.mark.parametrize("command", RESOLVING)
@pytest.mark.parametrize(("stray", "content"), STRAYS, ids=range(len(STRAYS)))
async def test_what_is_no_entry_stops_resolve_and_is_named(command: str, stray: str, content: bytes | Kind) -> None:
    """A thing in pub/ that does not parse, or is not a regular file, is never skipped (rule 7)."""
    memory = MemoryStore()
    published_hf(memory, 500)
    memory.write(f"{PUB}/{stray}", content)
    with pytest.raises(InvalidEntry, match="/memory/pub/"):
        await RESOLVING[command](FaultyStore(memory))


async def test_reading_gives_the_good_beside_the_bad(memory: MemoryStore) -> None:
    """Who has to go on gets every publication, and one error for each stray thing (rule 7)."""
    made = published_hf(memory, 500, 600)
    memory.write(f"{PUB}/README")
    memory.write(f"{PUB}/{name('exec/1/x')}", Kind.LINK)
    publications, invalid = await read(memory)
    assert publications == made
    assert [error.which.rpartition("/")[2] for error in invalid] == [name("exec/1/x"), "README"]


async def test_the_content_of_an_entry_does_not_matter(memory: MemoryStore) -> None:
    """B40: an entry with a body is judged by its name alone."""
    memory.write(PUBLICATION.key, b"0\r\n\r\n")
    assert await resolve(memory) == PUBLICATION


@pytest.mark.parametrize("save", ["checkpoint-500", "step-500", "final", "last.ckpt"])
async def test_a_save_that_is_gone_is_an_error_that_names_it(memory: MemoryStore, save: str) -> None:
    """No older publication is answered by itself: resolve lists once more, then fails (rule 8)."""
    published_hf(memory, 400)
    memory.write(Publication(1_000_000, 600, f"{EXECUTION}/{save}").key)
    memory.remove(SAVE)
    store = FaultyStore(memory)
    with pytest.raises(NotPublished, match=f"/memory/{EXECUTION}/{save}.*gone.*-verify"):
        await resolve(store)
    assert store.count("list", PUB) == 2


async def test_a_prune_between_the_listings_is_no_error(memory: MemoryStore) -> None:
    """A save that a prune removed after pub/ was listed leads to the one published meanwhile (rule 8)."""
    published_hf(memory, 500)

    def published_and_pruned() -> None:
        published_hf(memory, 600)
        memory.remove(PUBLICATION.key)
        memory.remove(SAVE)

    latest = await resolve(FaultyStore(memory, [("list", PUB, after(published_and_pruned))]))
    assert latest
    assert latest.step == 600


async def test_a_prune_while_the_save_is_looked_at_is_no_error(memory: MemoryStore) -> None:
    """The same holds if the save goes between its being seen and the look for Trainer's sign in it (rule 8)."""
    published_hf(memory, 500)

    def published_and_pruned() -> None:
        published_hf(memory, 600)
        memory.remove(PUBLICATION.key)
        memory.remove(SAVE)

    latest = await resolve(FaultyStore(memory, [("list", SAVE, before(published_and_pruned))]))
    assert latest
    assert latest.step == 600


async def test_a_save_that_goes_while_it_is_looked_at_is_gone(memory: MemoryStore) -> None:
    """Where nothing newer was published it is an error that says what has become of it (rule 8)."""
    published_hf(memory, 500)
    store = FaultyStore(memory, [("list", SAVE, before(lambda: memory.remove(SAVE)))])
    with pytest.raises(NotPublished, match=f"/memory/{SAVE}.*gone"):
        await resolve(store)


async def test_a_torn_save_is_not_resolved(memory: MemoryStore) -> None:
    """A save in which Trainer's own sign stands is refused by name."""
    published_hf(memory, 400, 500)
    memory.write(f"{SAVE}/checkpoint-is-incomplete.txt")
    with pytest.raises(NotPublished, match=rf"/memory/{SAVE}.*checkpoint-is-incomplete\.txt"):
        await resolve(memory)


async def test_resolve_does_not_judge_the_marker(memory: MemoryStore) -> None:
    """Without -verify a publication is believed: a save published by hand needs no marker."""
    published_hf(memory, 500)
    memory.remove(f"{SAVE}/trainer_state.json")
    assert await resolve(memory) == PUBLICATION


async def verified(store: MemoryStore) -> tuple[int | None, list[tuple[int, str]]]:
    """The step that -verify answers, and what it passed over."""
    passed: list[tuple[int, str]] = []
    found = await resolve_verified(store, lambda publication, reason: passed.append((publication.step, reason)))
    return found.step if found else None, passed


BREAKAGES: dict[str, Callable[[MemoryStore, str], object]] = {
    "it is gone": lambda store, save: store.remove(save),
    "no trainer_state.json yet": lambda store, save: store.remove(f"{save}/trainer_state.json"),
    "does not decode": lambda store, save: store.write(f"{save}/trainer_state.json", b'{"global_step": 50'),
    "says global_step 7": lambda store, save: store.write(f"{save}/trainer_state.json", b'{"global_step": 7}'),
    "not a regular file": lambda store, save: store.write(f"{save}/trainer_state.json", Kind.LINK),
    "checkpoint-is-incomplete.txt": lambda store, save: store.write(f"{save}/checkpoint-is-incomplete.txt"),
    "not a folder": lambda store, save: store.replace(save, b"a file"),
}


@pytest.mark.parametrize("reason", BREAKAGES)
async def test_verify_passes_over_what_is_not_whole_and_says_why(memory: MemoryStore, reason: str) -> None:
    """-verify answers the newest whole save and names each newer one with the reason (rule 8)."""
    published_hf(memory, 300, 400, 500)
    BREAKAGES[reason](memory, SAVE)
    answer, passed = await verified(memory)
    assert answer == 400
    assert [step for step, _ in passed] == [500]
    assert reason in passed[0][1]


async def test_verify_fails_where_none_is_left(memory: MemoryStore) -> None:
    """Publications of which none is whole are an error, not "nothing yet" (rule 8)."""
    for publication in published_hf(memory, 400, 500):
        memory.remove(publication.path)
    with pytest.raises(NotPublished, match="/memory"):
        await verified(memory)


async def test_verify_judges_by_the_framework_of_the_folder_name(memory: MemoryStore) -> None:
    """A step-N save needs .metadata; a save of any other name must only exist (rule 8)."""
    memory.write(f"{EXECUTION}/final/x")
    memory.write(f"{EXECUTION}/step-600/__0_0.distcp")
    for step, save in ((550, "final"), (600, "step-600")):
        memory.write(Publication(1_000_000, step, f"{EXECUTION}/{save}").key)
    assert await verified(memory) == (550, [(600, "no .metadata yet")])
    memory.write(f"{EXECUTION}/step-600/.metadata")
    assert await verified(memory) == (600, [])


async def test_present_lists_each_folder_once(memory: MemoryStore) -> None:
    """Presence is judged by one listing per folder, never by asking for a fixed name (rule 9)."""
    made = [*published_hf(memory, 1, 2, 3), Publication(1, 9, f"{EXECUTION}/gone"), Publication(1, 9, "none/x")]
    made.append(Publication(1, 9, f"{SAVE}/trainer_state.json/x"))
    store = FaultyStore(memory)
    assert await present(store, made) == set(made[:3])
    assert store.count("list", EXECUTION) == 1
    assert store.count("read") == 0


async def test_a_listing_that_hangs_is_waited_for(memory: MemoryStore) -> None:
    """While a store does not answer there is no answer either."""
    memory.write(PUBLICATION.key)
    event, reached = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(resolve(FaultyStore(memory, [("list", PUB, waits(event, reached=reached))])))
    await reached.wait()
    assert not task.done()
    event.set()
    assert await task == PUBLICATION


# Sets of saves, and the fakes' own script


@pytest.mark.parametrize("path", WITHDRAWN.values(), ids=WITHDRAWN.keys())
def test_saves_touch_what_is_inside_and_around(path: str) -> None:
    """A save protects itself, what is inside it and what is around it."""
    assert Saves([path]).touch(SAVE)
    assert Saves([SAVE]).touch(path)
    assert Saves(["x", path, "y/z"]).touch(SAVE)


@pytest.mark.parametrize("path", NOT_WITHDRAWN.values(), ids=NOT_WITHDRAWN.keys())
def test_saves_do_not_touch_what_only_looks_alike(path: str) -> None:
    """A common beginning of names is no relation."""
    assert not Saves([path]).touch(SAVE)
    assert not Saves([SAVE]).touch(path)
    assert not Saves([]).touch(path)


async def test_a_script_is_followed_in_order(memory: MemoryStore) -> None:
    """Entries of a FaultyStore's script are consumed one by one; what none names goes through."""
    store = FaultyStore(memory, [("list", "exec*", passes), ("list", "exec", fails(Denied)), ("read", "*", fails())])
    assert len(await store.list("exec")) == 1
    with pytest.raises(Denied):
        await store.list("exec")
    assert len(await store.list("exec")) == 1
    with pytest.raises(Unavailable):
        await store.read(f"{SAVE}/none", 1)
    assert store.script == []


async def test_verify_does_not_believe_that_a_listed_save_is_gone() -> None:
    """Rule 6: "no such name" for what its folder's listing shows is a doubt, as NFS caches it; it is no older answer."""
    memory = MemoryStore()
    for step in (1, 2):
        memory.write(f"exec/a/step-{step}/.metadata")
        memory.write(Publication(1, step, f"exec/a/step-{step}").key)
    store = FaultyStore(memory, [("list", "exec/a/step-2", fails(NotFound))])
    with pytest.raises(StoreError):
        await resolve_verified(store, lambda *_: None)
