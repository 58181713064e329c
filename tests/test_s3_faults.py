"""S3 stores that fail, lie, stall or answer in another's place, and networks that do: nothing is lost, nothing is believed."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import sys
import threading
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count, pairwise, repeat
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import pytest
from aiobotocore.httpsession import AIOHTTPSession

from commands import ATTEMPT, EPOCH, Ran, Watch, environment, eventually, run
from publishd.credentials import Credentials, LiveCredentials
from publishd.errors import AlreadyExists, NoCredentials, NotFound, NotSupported, PerhapsOurs, StoreError, TooLarge, Unavailable
from publishd.publications import Announced, Publication, publish, resolve
from publishd.stores import s3_client
from publishd.stores.s3 import S3Settings, S3Store
from services.exchanges import Answer, Fate, error, xml
from services.places import REGION
from services.programs import free_ports
from services.scripted import PASS, Scripted, ScriptedS3, after

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from services.certificates import Authority
    from services.exchanges import Behaviour, Request, Step
    from services.proxies import Listener

# Seen once in thousands of tests on a loaded machine, where nothing is left to the collector otherwise; not traced yet.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning")

ROOT = "s3://bucket/team/p"
SAVE = f"exec/{ATTEMPT}/checkpoint-5"
ENTRY = Publication(EPOCH, 5, SAVE)
PAGE = b"<!DOCTYPE html><html><head><title>Login</title></head><body><p>Who are you?</p></body></html>"
# As most web pages are: no XML.
SLOPPY_PAGE = b"<!doctype html><html><meta charset=utf-8><p>Who are you?<br>Log in.</html>"
# What a server says of itself and of a request, none of which is to be repeated.
CHATTY = {"RequestId": "REQ8F3A", "HostId": "HOST77", "AWSAccessKeyId": "AKIDSMALL", "StringToSign": "secret-of-the-small-one"}
TALK = re.compile("REQ8F3A|HOST77|AKIDSMALL|secret-of-the|Signature=|Traceback")

_SMALL = {
    "_FIRST_WAIT": 0.02,
    "_LONGEST_WAIT": 0.04,
    "_PATIENCE_SECONDS": 2.0,
    "_CONNECT_SECONDS": 0.7,
    "_READ_SECONDS": 0.7,
    "_ATTEMPT_SECONDS": 1.5,
    "_ATTEMPT_SECONDS_WITH_CONTENT": 1.5,
    "_SETTLING_SECONDS": 1.5,
}
# The command with patience for a second in place of half a minute.
_HURRIED = f"""
import sys
import publishd.stores.s3_client as client
vars(client).update({_SMALL!r})
sys.argv = sys.argv[1:]
from publishd.__main__ import main
main()
"""
HURRIED = [sys.executable, "-c", _HURRIED]


# What is needed to look at a store's faults


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience for a second in place of half a minute."""
    for name, value in _SMALL.items():
        monkeypatch.setattr(s3_client, name, value, raising=False)


class Source:
    """A source that gives these sets in turn, and then the last one for ever; `fetches` counts."""

    which = "source"

    def __init__(self, *sets: Credentials) -> None:
        self._sets = sets or (Credentials("AKIDSMALL", "secret-of-the-small-one"),)
        self.fetches = 0

    async def fetch(self) -> Credentials:
        self.fetches += 1
        return self._sets[min(self.fetches, len(self._sets)) - 1]

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def opened(server: Scripted | str, source: Source | None = None, **settings: Any) -> AsyncIterator[S3Store]:
    """A store of the root at this server."""
    endpoint = server if isinstance(server, str) else server.endpoint
    settings = {"endpoint": endpoint, "region": REGION, **settings}
    store = S3Store("bucket", "team/p", LiveCredentials(source or Source()), S3Settings(**settings))
    try:
        yield store
    finally:
        await store.aclose()


@pytest.fixture
async def store(scripted: ScriptedS3, hurried: None) -> AsyncIterator[S3Store]:
    """A store at the scripted server, in a hurry."""
    async with opened(scripted) as store:
        yield store


def put(server: ScriptedS3, key: str, content: bytes = b"") -> None:
    server.s3.objects["bucket", f"team/p/{key}"] = content


def keys(server: ScriptedS3, below: str = "") -> list[str]:
    return [key.removeprefix("team/p/") for key in server.s3.keys("bucket", f"team/p/{below}")]


def save(server: ScriptedS3, step: int) -> Publication:
    """A complete save, not published."""
    path = f"exec/{ATTEMPT}/checkpoint-{step}"
    put(server, f"{path}/model.safetensors", b"weights")
    put(server, f"{path}/trainer_state.json", b'{"global_step": %d}' % step)
    return Publication(EPOCH, step, path)


def published(server: ScriptedS3, *steps: int) -> list[Publication]:
    publications = [save(server, step) for step in steps]
    for publication in publications:
        put(server, publication.key)
    return publications


def command(server: ScriptedS3, name: str, *arguments: str, hurry: bool = True, root: str = ROOT) -> Ran:
    prefix = HURRIED if hurry else []
    flags = (*server.flags, *arguments)
    return run(name, "-checkpoint", root, *flags, env=environment(**server.environ), prefix=prefix)


class SmallRoot:
    """The root of a scripted server, as `Watch` knows roots."""

    path = ROOT
    flags: tuple[str, ...] = ()

    def __init__(self, server: ScriptedS3) -> None:
        self._server, self.environ = server, server.environ

    @property
    def steps(self) -> list[int]:
        return [int(key.split("-")[1]) for key in keys(self._server, "pub/")]

    def hf(self, step: int) -> str:
        return save(self._server, step).path

    dcp = hf


def watching(server: ScriptedS3) -> Watch:
    root = SmallRoot(server)
    return Watch(root, "hf", *server.flags, env=environment(**server.environ), prefix=HURRIED)


def listing(content: str = "", truncated: str = "false", name: str = "bucket") -> Answer:
    return xml("ListBucketResult", f"<Name>{name}</Name><IsTruncated>{truncated}</IsTruncated>{content}")


def chatty(status: int, code: str) -> Answer:
    """An error that says more than is to be repeated."""
    return error(status, code, None, **CHATTY)


def gaps(requests: list[Request]) -> list[float]:
    return [later.time - earlier.time for earlier, later in pairwise(requests)]


# The traps


async def test_a_dropped_put_is_not_silently_sent_again(
    scripted: ScriptedS3, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt is one request, also on a connection that was used before (aiohttp's _retry_connection)."""
    monkeypatch.setattr(s3_client, "_ATTEMPTS", 1)
    await store.list("")
    scripted.script("PUT", "*", repeat(after(Fate.DROP)))
    with pytest.raises(Unavailable, match="closed in the middle"):
        await store.create("pub/x")
    first, second = scripted.requests
    assert (first.method, second.method, second.connection) == ("GET", "PUT", first.connection)


def test_what_is_private_to_the_libraries_is_there() -> None:
    """The names that the client rests on exist as it knows them; what they do is tested beside this."""
    assert "_retry_connection" in aiohttp.ClientSession.ATTRS
    assert [*inspect.signature(AIOHTTPSession._get_session).parameters] == ["self", "proxy_url"]
    assert inspect.iscoroutinefunction(AIOHTTPSession._get_session)


@pytest.mark.parametrize("operation", ["list", "read", "create", "delete"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(scripted: ScriptedS3, store: S3Store, operation: str, status: int) -> None:
    """Where a redirect leads nothing is sent, on this host or another, and the answer there counts for nothing."""
    with Scripted(lambda _: Answer(200, PAGE, {"ETag": '"x"'})) as other:
        for target in (f"{other.endpoint}/login", f"{scripted.endpoint}/login"):
            scripted.queue.append(Answer(status, b"", {"Location": target}))
            with pytest.raises(Unavailable, match=f"redirect to http://127.0.0.1:[0-9]+ .status {status}"):
                await getattr(store, operation)(*(["x", 9] if operation == "read" else ["x"]))
        assert (len(other.requests), len(scripted.requests)) == (0, 2)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_never_answers(silent_proxy: Listener, hurried: None, scheme: str) -> None:
    """A request through a proxy that accepts and then says nothing ends in time; CONNECT is under no time-out but ours."""
    async with opened(f"{scheme}://s3.example", proxy=silent_proxy.url) as store:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"no answer in time.*proxy"):
            await asyncio.wait_for(store.list("pub"), 30)
    assert time.monotonic() - began < 15
    assert silent_proxy.heads
    assert silent_proxy.heads[0].startswith(b"CONNECT" if scheme == "https" else b"GET http://s3.example/")


async def test_a_store_that_stops_in_the_middle(scripted: ScriptedS3, store: S3Store) -> None:
    """An answer that comes byte by byte for ever is given up, too: every piece resets the time-out of reading."""
    scripted.script("GET", "*", repeat(Answer(200, b"<" * 1000, pause=0.2)))
    with pytest.raises(Unavailable, match="no answer in time"):
        await asyncio.wait_for(store.list("pub"), 30)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_clients_own_proxies_are_none(
    request: pytest.FixtureRequest, trap: Listener, authority: Authority, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Even with the variables still set, as they are for whoever imports the store, no proxy is used but the named one."""
    server: ScriptedS3 = request.getfixturevalue("scripted" if scheme == "http" else "scripted_https")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, trap.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with opened(server, ca=str(authority.ca)) as store:
        assert await store.list("") == []
    assert (trap.heads, len(server.requests)) == ([], 1)


async def test_the_clients_own_settings_are_the_flags(
    scripted: ScriptedS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No profile, file or endpoint of the environment is read, even where the variables are still set (session_vars)."""
    (tmp_path / ".aws").mkdir()
    config = tmp_path / ".aws/config"
    config.write_text("[default]\nregion = mars\ns3 =\n  addressing_style = virtual\n  payload_signing_enabled = true\n")
    misleading = {"HOME": str(tmp_path), "AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "none", "AWS_DEFAULT_PROFILE": "none"}
    misleading |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "3"}
    for name, value in misleading.items():
        monkeypatch.setenv(name, value)
    async with opened(scripted) as store:
        await store.list("")
    async with opened("") as store:  # nothing is sent to Amazon's
        await store._client._connected()
        assert store._client.address.endswith(".amazonaws.com")
    assert [request.path for request in scripted.requests] == ["/bucket"]
    assert f"/{REGION}/" in scripted.requests[0].headers["Authorization"]


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_b40_an_entry_is_put_without_framing(request: pytest.FixtureRequest, authority: Authority, scheme: str) -> None:
    """The PUT of an entry has a length of 0 and nothing that a store could take for content or has to know."""
    server: ScriptedS3 = request.getfixturevalue("scripted" if scheme == "http" else "scripted_https")
    async with opened(server, ca=str(authority.ca)) as store:
        await store.create("pub/x")
        await store.move("pub/x", "prune/x")
    for sent in server.seen("PUT"):
        names = {name.lower() for name in sent.headers}
        assert (sent.headers["Content-Length"], sent.body) == ("0", b"")
        assert not names & {"content-encoding", "transfer-encoding", "expect", "x-amz-trailer", "x-amz-sdk-checksum-algorithm"}
        assert not [name for name in names if "checksum" in name or "decoded" in name]
        assert not sent.headers["x-amz-content-sha256"].startswith("STREAMING")
    assert server.s3.objects == {("bucket", "team/p/prune/x"): b""}


def test_b40_an_entry_with_a_body_is_judged_by_its_name(scripted: ScriptedS3) -> None:
    """What another program's framing left as the content of an entry does not matter."""
    save(scripted, 5)
    put(scripted, ENTRY.key, b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n")
    command(scripted, "resolve").succeeded(f"{ROOT}/{SAVE}\n".encode())


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted", "Whatever", ""])
async def test_a_conflict_settles_nothing(scripted: ScriptedS3, store: S3Store, code: str) -> None:
    """A 409, whatever its code, is tried again: something else was under way, and it may have failed."""
    answer = error(409, code) if code else Answer(409)
    scripted.script("PUT", "*", [answer, answer, PASS])
    await store.create("pub/x")
    assert len(scripted.seen("PUT")) == 3


async def test_conflicts_for_ever(scripted: ScriptedS3, store: S3Store) -> None:
    """A 409 that stays is an error, neither success nor an existing entry; a bounded number of attempts was made."""
    scripted.script("PUT", "*", repeat(error(409, "ConditionalRequestConflict")))
    with pytest.raises(Unavailable, match="409, ConditionalRequestConflict"):
        await store.create("pub/x")
    assert 3 <= len(scripted.requests) <= 8


# Exclusive create


LOST = {
    "500": after(error(500, "InternalError")),
    "503": after(Answer(503, PAGE)),
    "504": after(Answer(504)),
    "drop": after(Fate.DROP),
    "cut": after(Answer(200, b"x" * 100, {"ETag": '"x"'}, cut=10)),
    "timeout": after(Fate.SILENCE),
    "400 RequestTimeout": after(error(400, "RequestTimeout")),
    "500 in a 200": after(error(200, "InternalError")),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
async def test_an_answer_is_lost(scripted: ScriptedS3, store: S3Store, lost: Step) -> None:
    """Where the store did it and the answer was lost, the next says that it exists, and nobody claims by whom."""
    scripted.script("PUT", "*", [lost])
    with pytest.raises(PerhapsOurs):
        await store.create("pub/x")
    assert keys(scripted) == ["pub/x"]


@pytest.mark.parametrize("before", [[], [error(409, "ConditionalRequestConflict")]])
async def test_it_exists(scripted: ScriptedS3, store: S3Store, before: list[Answer]) -> None:
    """Where every answer came, and none of them can have been a success, an entry that stands there is another's."""
    put(scripted, "pub/x", b"untouched")
    scripted.script("PUT", "*", before)
    with pytest.raises(AlreadyExists) as caught:
        await store.create("pub/x")
    assert type(caught.value) is AlreadyExists
    assert scripted.s3.objects["bucket", "team/p/pub/x"] == b"untouched"
    assert all(sent.headers["If-None-Match"] == "*" for sent in scripted.seen("PUT"))


@pytest.mark.parametrize("lost", [Fate.DROP, Fate.DROP_UNREAD, error(503, "SlowDown"), Answer(502, PAGE), Answer(429)])
async def test_it_was_not_done_after_all(scripted: ScriptedS3, store: S3Store, lost: Step) -> None:
    """A request that had no effect is made again, and then this call has created the entry."""
    scripted.queue.append(lost)
    await store.create("pub/x")
    assert keys(scripted) == ["pub/x"]


@pytest.mark.parametrize(
    "answer",
    [Answer(200), Answer(200, PAGE), Answer(200, SLOPPY_PAGE), Answer(204), Answer(200, b"", {"ETag": ""})],
    ids=["empty", "page", "sloppy page", "204", "no text"],
)
async def test_created_is_only_what_has_an_etag(scripted: ScriptedS3, store: S3Store, answer: Answer) -> None:
    """Success without an ETag is not an object store's, and no publication."""
    scripted.script("PUT", "*", repeat(answer))
    with pytest.raises(Unavailable, match="S3 store"):
        await store.create("pub/x")


@pytest.mark.parametrize("answer", [Answer(501), error(501, "NotImplemented"), error(400, "NotImplemented")])
async def test_a_store_that_lacks_exclusive_create(scripted: ScriptedS3, store: S3Store, answer: Answer) -> None:
    """Such a store is said to lack the operation, at the first answer."""
    scripted.script("PUT", "*", repeat(answer))
    with pytest.raises(NotSupported, match=r"lacks this operation .*probe"):
        await store.create("pub/x")
    assert len(scripted.requests) == 1


async def test_b43_waits_grow(scripted: ScriptedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """SlowDown five times, then success: each wait is at least about twice as long as the one before could be short."""
    monkeypatch.setattr(s3_client, "_FIRST_WAIT", 0.1)
    scripted.script("PUT", "*", repeat(error(503, "SlowDown"), 5))
    async with opened(scripted) as store:
        await store.create("pub/x")
    waited = gaps(scripted.requests)
    assert len(waited) == 5
    for number, gap in enumerate(waited):
        assert gap > 0.8 * 0.05 * 2**number, waited


async def test_b43_waits_end(scripted: ScriptedS3, store: S3Store) -> None:
    """A store that is overloaded for ever is given up after a bounded number of attempts, in bounded time."""
    scripted.script("PUT", "*", repeat(error(503, "SlowDown")))
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"can't serve it now \(status 503, SlowDown\)"):
        await store.create("pub/x")
    assert time.monotonic() - began < 10
    assert 3 <= len(scripted.requests) <= 8


def test_b43_overloaded_for_a_minute(scripted: ScriptedS3) -> None:
    """With the patience that users have: at most 8 requests, within 40 s, seldom enough, and one line."""
    scripted.script("*", "*", repeat(chatty(503, "SlowDown")))
    began = time.monotonic()
    command(scripted, "resolve", hurry=False).failed(f"{ROOT}/pub: ", "503, SlowDown")
    assert time.monotonic() - began < 40
    assert 4 <= len(scripted.requests) <= 8
    assert scripted.requests[-1].time - scripted.requests[0].time > 3
    assert min(gaps(scripted.requests)) > 0.05


PUBLISHED = "it is published (an answer was lost, so whether by this call is not known)"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([PASS], "published"),
        ([LOST["drop"]], PUBLISHED),
        ([LOST["500"]], PUBLISHED),
        ([LOST["timeout"]], PUBLISHED),
        ([error(409, "ConditionalRequestConflict")], "published"),
    ],
    ids=["done", "drop", "500", "timeout", "409"],
)
def test_publish_says_what_it_knows(scripted: ScriptedS3, steps: list[Step], said: str) -> None:
    """A save whose entry stands is published, exit 0; who made the entry is said only where it is known."""
    save(scripted, 5)
    scripted.script("PUT", "pub/*", steps)
    ran = command(scripted, "publish", f"{ROOT}/{SAVE}", "5").succeeded(b"")
    assert ran.err == f"publishd publish: {said}: {ROOT}/{SAVE}: epoch {EPOCH}, step 5\n"
    assert keys(scripted, "pub/") == [ENTRY.key]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(200), "no ETag"),
        (chatty(501, "NotImplemented"), "lacks this operation"),
        (chatty(400, "NotImplemented"), "lacks this operation"),
        (chatty(409, "OperationAborted"), "something else is being done"),
        (chatty(403, "AccessDenied"), "denies access"),
        (chatty(404, "NoSuchBucket"), "no such bucket"),
        (Answer(404, PAGE), "404"),
        (Answer(412, PAGE), ""),
    ],
    ids=["no ETag", "501", "400", "409", "403", "bucket", "404", "412 by others"],
)
def test_publish_does_not_claim_what_did_not_happen(scripted: ScriptedS3, answer: Answer, said: str) -> None:
    """Where no entry came to stand, publish fails with one line; only a 412 is believed, whoever says it."""
    save(scripted, 5)
    scripted.script("PUT", "pub/*", repeat(answer))
    ran = command(scripted, "publish", SAVE, "5")
    if said:
        ran.failed(f"cannot {'believe the store' if said == 'no ETag' else 'create'}: {ROOT}/", said)
    else:
        ran.succeeded(b"")
    assert not TALK.search(ran.err)


# Listings


UNBELIEVABLE = {
    "truncated without a token": listing(truncated="true"),
    "the same token for ever": listing("<NextContinuationToken>t</NextContinuationToken>", "true"),
    "the first version of listings": listing("<NextMarker>t</NextMarker>", "true"),
    "no IsTruncated": xml("ListBucketResult", "<Name>bucket</Name>"),
    "a web page": Answer(200, PAGE, {"Content-Type": "text/html"}),
    "a sloppy web page": Answer(200, SLOPPY_PAGE, {"Content-Type": "text/html"}),
    "text": Answer(200, b"It works!"),
    "JSON": Answer(200, b'{"IsTruncated": false}', {"Content-Type": "application/json"}),
    "nothing": Answer(200),
    "204": Answer(204),
    "compressed": Answer(200, b"\x1f\x8b\x08\x00", {"Content-Encoding": "gzip"}),
    "broken XML": Answer(200, listing().body[:-9]),
    "half of it": Answer(200, listing().body, cut=60),
    "another bucket": listing(name="other"),
    "other keys": listing("<Contents><Key>team/p/exec/x</Key></Contents>"),
    "other folders": listing("<CommonPrefixes><Prefix>team/p/exec/</Prefix></CommonPrefixes>"),
    "a key without a name": listing("<Contents><Size>1</Size></Contents>"),
    "a folder without a name": listing("<CommonPrefixes></CommonPrefixes>"),
    "two names of one key": listing("<Contents><Key>team/p/pub/a</Key><Key>team/p/pub/b</Key></Contents>"),
    "a size that is none": listing("<Contents><Key>team/p/pub/a</Key><Size>big</Size></Contents>"),
    "a time that is none": listing("<Contents><Key>team/p/pub/a</Key><LastModified>never</LastModified></Contents>"),
    "an error in a 200": error(200, "InternalError"),
    "a refusal in a 200": error(200, "AccessDenied"),
    "404 as a web server": Answer(404, PAGE, {"Content-Type": "text/html"}),
    "404 and nothing": Answer(404),
    "404 as of an object": error(404, "NoSuchKey"),
    "304": Answer(304),
    "a code that is none": Answer(403, b"<Error><Code><b>x</b></Code></Error>"),
    "two codes": Answer(403, b"<Error><Code>AccessDenied</Code><Code>SlowDown</Code></Error>"),
    "a header that is no text": Answer(200, listing().body, {"X-Odd": "\xff"}),
    "a huge header": Answer(200, listing().body, {"X-Big": "x" * 100_000}),
    "10,000 headers": Answer(200, listing().body, {f"X-{number}": "x" for number in range(10_000)}),
    "a length that is none": Answer(200, listing().body, {"Content-Length": "long"}),
}


@pytest.mark.parametrize("answer", UNBELIEVABLE.values(), ids=UNBELIEVABLE)
async def test_a_listing_that_is_none(scripted: ScriptedS3, store: S3Store, answer: Answer) -> None:
    """Whatever is not a complete listing of what was asked for, of pub/ or of all, is an error, never "nothing yet"."""
    published(scripted, 5)
    for lies_about in ("/pub/", ""):
        steps = repeat(lambda asked, behave, end=lies_about: answer if asked.key.endswith(end) else behave(asked), 20)
        scripted.queue.extend(steps)
        with pytest.raises(StoreError) as caught:
            await resolve(store)
        scripted.queue.clear()
        assert caught.value.which.startswith(ROOT)
        assert not TALK.search(str(caught.value))


@pytest.mark.parametrize(
    "name",
    [
        "truncated without a token",
        "the same token for ever",
        "no IsTruncated",
        "a web page",
        "nothing",
        "broken XML",
        "half of it",
        "another bucket",
        "other keys",
        "404 as a web server",
        "two codes",
    ],
)
def test_resolve_believes_no_other_listing(name: str) -> None:
    """Exit 1, empty stdout, one line that names the folder and says what to check."""
    with ScriptedS3() as server:
        server.script("GET", "*", repeat(UNBELIEVABLE[name]))
        ran = command(server, "resolve").failed(f"{ROOT}/pub: ", "see -endpoint and -proxy")
    assert not TALK.search(ran.err)


async def test_nothing_is_deleted_by_answers_nobody_believes(scripted: ScriptedS3, store: S3Store) -> None:
    """A 404 without a store's own code is no sign that anything is gone, nor that a delete was done."""
    put(scripted, "pub/x")
    scripted.script("*", "*", repeat(Answer(404, PAGE)))
    attempts: list[Callable[[], Any]] = [
        lambda: store.delete("pub/x"),
        lambda: store.move("pub/x", "prune/x"),
        lambda: store.exists("pub/x"),
        lambda: store.read("pub/x", 9),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError) as caught:
            await attempt()
        assert not isinstance(caught.value, NotFound), caught.value


@pytest.mark.parametrize("page", [7, 1000])
@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
async def test_b36_every_page_is_read(page: int, count: int) -> None:
    """The newest publication is found however many there are, with the pages of pub/ and at most two requests more."""
    with ScriptedS3(page=page) as server:
        for step in range(count):
            put(server, Publication(EPOCH, step, f"exec/{ATTEMPT}/checkpoint-{step}").key)
        newest = save(server, count - 1)
        async with opened(server) as store:
            assert await resolve(store) == newest
        pages = -(-count // page)
        assert len(server.seen("GET", "pub/")) == pages
        assert len(server.requests) <= pages + 2


def test_b36_a_token_is_lost_once(scripted: ScriptedS3) -> None:
    """A truncated page that does not say how to go on fails the command, and the next one is right."""
    scripted.s3.page = 7
    newest = published(scripted, *range(20))[-1]

    def tokenless(request: Request, behave: Behaviour) -> Answer:
        answer = behave(request)
        body = re.sub(b"<NextContinuationToken>.*?</NextContinuationToken>", b"", answer.body)
        return Answer(answer.status, body, answer.headers)

    scripted.script("GET", "pub/", [PASS, tokenless])
    command(scripted, "resolve").failed("whether it goes on")
    command(scripted, "resolve").succeeded(f"{ROOT}/{newest.path}\n".encode())


# Deleting


def deleting(server: ScriptedS3, *steps: int) -> Ran:
    """`prune -keep 1` of saves of which one can't be deleted is told by its caller's script."""
    latest = published(server, *steps)[-1]
    ran = command(server, "prune", "-keep", "1")
    assert latest.key in keys(server)
    assert f"{latest.path}/model.safetensors" in keys(server)
    assert not server.seen("POST"), "several keys are never deleted at once"
    return ran


DENIED = chatty(403, "AccessDenied")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (DENIED, "denies access"),
        (Answer(200, PAGE, {"Content-Type": "text/html"}), "its answer to a delete has content"),
        (error(200, "AccessDenied"), "denies access"),
        (Answer(204), "the store says it is gone, and lists it"),
        (Answer(404, PAGE), "404"),
    ],
    ids=["403", "page", "error in a 200", "204 and not done", "404 of a web server"],
)
def test_b37_a_key_that_is_not_deleted(scripted: ScriptedS3, answer: Answer, said: str) -> None:
    """It is named, exit 1; the other victims go, the latest stays, and the record stays for the next prune."""
    scripted.script("DELETE", "checkpoint-1/model.safetensors", repeat(answer))
    ran = deleting(scripted, 1, 2, 3)
    assert (ran.code, ran.out) == (1, f"{ROOT}/exec/{ATTEMPT}/checkpoint-2\n".encode()), ran
    ran.said_one_line(f"{ROOT}/exec/{ATTEMPT}/checkpoint-1/model.safetensors", said)
    assert not TALK.search(ran.err)
    left = f"exec/{ATTEMPT}/checkpoint-1/model.safetensors"
    assert [key for key in keys(scripted) if "checkpoint-3" not in key][:1] == [left]
    assert keys(scripted, "prune/") == [Publication(EPOCH, 1, f"exec/{ATTEMPT}/checkpoint-1").record]
    assert len(keys(scripted, "pub/")) == 1


def test_b37_every_key_is_named(scripted: ScriptedS3) -> None:
    """Several keys of one save that can't be deleted are all named."""
    scripted.script("DELETE", "checkpoint-1/shard-[0-3]", repeat(DENIED))
    for number in range(5):
        put(scripted, f"exec/{ATTEMPT}/checkpoint-1/shard-{number}")
    ran = deleting(scripted, 1, 2)
    assert ran.code == 1
    ran.said_one_line(*(f"shard-{number}" for number in range(4)))
    assert keys(scripted, f"exec/{ATTEMPT}/checkpoint-1/") == [f"exec/{ATTEMPT}/checkpoint-1/shard-{n}" for n in range(4)]


def test_b37_what_is_gone_already(scripted: ScriptedS3) -> None:
    """A delete of what is gone is success, by 204 or as some stores say it, and so is one whose answer was lost."""
    steps: list[Step] = [after(error(404, "NoSuchKey")), after(Answer(200)), LOST["drop"], LOST["500"]]
    scripted.script("DELETE", "*", steps)
    deleting(scripted, 1, 2, 3).succeeded()
    assert {key.split("/")[0] for key in keys(scripted)} == {"exec", "pub"}
    assert len(keys(scripted)) == 3


async def test_a_record_stands_before_its_entry_is_gone(scripted: ScriptedS3, store: S3Store) -> None:
    """However a move is cut short, the entry stands until its record does."""
    put(scripted, "pub/x")
    scripted.script("PUT", "prune/x", [error(403, "AccessDenied"), *[Fate.DROP] * 8, after(Fate.DROP), PASS])
    scripted.script("DELETE", "pub/x", [*[Fate.DROP] * 8, after(Fate.DROP)])
    for expected in (["pub/x"], ["pub/x"], ["prune/x", "pub/x"]):
        with pytest.raises(StoreError):
            await store.move("pub/x", "prune/x")
        assert keys(scripted) == expected
    await store.move("pub/x", "prune/x")
    assert keys(scripted) == ["prune/x"]
    with pytest.raises(NotFound):
        await store.move("pub/x", "prune/x")


@pytest.mark.parametrize(
    ("at", "left"), [("PUT", ["pub/x"]), ("DELETE", ["prune/x", "pub/x"])], ids=["before the record", "after the record"]
)
async def test_a_cancelled_move(scripted: ScriptedS3, store: S3Store, at: str, left: list[str]) -> None:
    """A move that is cancelled goes no step further, and can be made again."""
    put(scripted, "pub/x")
    scripted.script(at, "*", [Fate.SILENCE])
    moving = asyncio.create_task(store.move("pub/x", "prune/x"))
    await asyncio.to_thread(eventually, lambda: scripted.seen(at))
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert (keys(scripted), len(scripted.seen("DELETE"))) == (left, int(at == "DELETE"))
    await store.move("pub/x", "prune/x")
    assert keys(scripted) == ["prune/x"]


async def test_a_tree_is_deleted_marker_first(scripted: ScriptedS3, store: S3Store) -> None:
    """Nothing else of a save is deleted before its marker is gone, also where the marker's delete is repeated."""
    save(scripted, 5)
    scripted.script("DELETE", "trainer_state.json", [error(503, "SlowDown"), Fate.DROP, after(Fate.DROP)])
    await store.delete_tree(SAVE, ["trainer_state.json"])
    order = [sent.key.rpartition("/")[2] for sent in scripted.seen("DELETE")]
    assert order == ["trainer_state.json"] * 4 + ["model.safetensors"]
    assert keys(scripted) == []


async def test_a_tree_is_deleted_in_spite_of_some_keys(scripted: ScriptedS3, store: S3Store) -> None:
    """What can be deleted is; the error names what can't, of every kind of failure."""
    for number in range(40):
        put(scripted, f"{SAVE}/shard-{number:02}")
    scripted.script("DELETE", "shard-07", repeat(DENIED))
    scripted.script("DELETE", "shard-31", repeat(error(503, "SlowDown")))
    with pytest.raises(StoreError) as caught:
        await store.delete_tree(SAVE)
    assert "shard-07" in str(caught.value)
    assert "shard-31" in str(caught.value)
    assert keys(scripted) == [f"{SAVE}/shard-07", f"{SAVE}/shard-31"]
    await store.delete(f"{SAVE}0")  # its connections and turns are all given back


async def test_a_cancelled_deletion(scripted: ScriptedS3, store: S3Store) -> None:
    """A deletion that is cancelled stops, marker first as ever, and can be made again."""
    save(scripted, 5)
    scripted.script("DELETE", "trainer_state.json", [Fate.SILENCE])
    deletion = asyncio.create_task(store.delete_tree(SAVE, ["trainer_state.json"]))
    await asyncio.to_thread(eventually, lambda: scripted.seen("DELETE"))
    deletion.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deletion
    assert len(keys(scripted)) == 2
    await store.delete_tree(SAVE, ["trainer_state.json"])
    assert keys(scripted) == []


# Regions, clocks, credentials


HOSTILE = "evil.example/?x=\x1b[31m"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            error(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}),
            "in region eu-west-1, not us-east-1 (set -region",
        ),
        (error(301, "PermanentRedirect", Endpoint="bucket.s3.evil.example"), "status 301"),
        (
            error(307, "TemporaryRedirect", {"Location": "https://s3.evil.example/bucket?X-Amz-Signature=x"}),
            "https://s3.evil.example",
        ),
        (error(400, "AuthorizationHeaderMalformed", Region="eu-central-1"), "in region eu-central-1, not us-east-1"),
        (error(400, "AuthorizationHeaderMalformed", Region="us-east-1"), "another region than us-east-1, or another address"),
        (error(400, "AuthorizationHeaderMalformed", Region="evil.example/#"), "another region than us-east-1, or"),
        (error(400, "AuthorizationHeaderMalformed", {"x-amz-bucket-region": HOSTILE}), "another region than us-east-1, or"),
        (error(400, "IllegalLocationConstraintException", Region="eu-west-3"), "eu-west-3"),
        (error(301, "PermanentRedirect", {"x-amz-bucket-region": HOSTILE, "Location": f"http://{HOSTILE}"}), "redirect"),
        (Answer(302, b"", {"Location": "\x1b]0;x\x07://evil.example/"}), "redirect"),
        (Answer(302, b"", {"Location": f"{'a' * 3000}://evil.example/"}), "redirect"),
        (Answer(302, b"", {"Location": "http://user:secret-of-the@evil.example/"}), "redirect"),
        (Answer(302, b"", {"Location": "//evil.example:99999/"}), "redirect"),
    ],
)
async def test_b43_a_region_that_is_another(scripted: ScriptedS3, store: S3Store, answer: Answer, said: str) -> None:
    """The region is named, or that it is another; nothing goes anywhere else, and nothing hostile is printed."""
    scripted.script("*", "*", repeat(answer))
    with Scripted(lambda _: answer) as proxy:  # sees whatever would go to another host
        async with opened(scripted, proxy=proxy.endpoint) as behind_it:
            for one in (store, behind_it):
                with pytest.raises(Unavailable) as caught:
                    await one.list("pub")
                assert said in str(caught.value)
                assert len(str(caught.value)) < 400
                assert not re.search("[\x00-\x1f]|secret-of-the|Signature|aaaaaaaa", str(caught.value))
        assert [request.target.partition("?")[0] for request in proxy.requests] == [f"{scripted.endpoint}/bucket"]
    assert [(request.method, request.path) for request in scripted.requests] == [("GET", "/bucket")]


@pytest.mark.parametrize("hostile", [HOSTILE, "eu-west-1"])
def test_b43_a_region_is_printed_if_it_is_one(scripted: ScriptedS3, hostile: str) -> None:
    """One line, as ever; what has not the form of a region is left out."""
    headers = {"x-amz-bucket-region": hostile, "Location": f"http://{HOSTILE}"}
    scripted.script("*", "*", repeat(error(301, "PermanentRedirect", headers)))
    ran = command(scripted, "resolve", hurry=False).failed(f"{ROOT}/pub: ", "eu-west-1" if hostile != HOSTILE else "redirect")
    assert not re.search("[\x00-\x09\x0b-\x1f]|x=", ran.err)
    assert len(scripted.requests) == 1


def test_b41_a_clock_that_is_wrong() -> None:
    """Minutes and direction are said, and the watch goes on and publishes once the clock is right."""
    keys_ = {"AKIDSMALL": "secret-of-the-small-one"}
    with ScriptedS3(secrets=keys_, clock=timedelta(minutes=20)) as server:
        command(server, "resolve").failed("this node's clock is 20 minutes behind the store's")
        save(server, 5)
        with watching(server) as watch:
            watch.says("20 minutes behind")
            seen = len(server.requests)
            eventually(lambda: len(server.requests) > seen + 3, "more scans")
            assert watch.log.count("20 minutes behind") == 1
            server.s3.clock = timedelta()
            eventually(lambda: keys(server, "pub/"), "a publication")
            watch.stop().succeeded()
        server.s3.clock = timedelta(minutes=-40)
        command(server, "resolve").failed("this node's clock is 40 minutes ahead of the store's")


async def test_b41_a_clock_is_not_a_matter_of_credentials(scripted: ScriptedS3, hurried: None) -> None:
    """No other credentials are asked for, however often the clock is found wrong."""
    source = Source()
    scripted.script("*", "*", repeat(error(403, "RequestTimeTooSkewed"), 5))
    async with opened(scripted, source) as store:
        for _ in range(5):
            with pytest.raises(Unavailable, match="clock"):
                await store.list("pub")
        assert await store.list("") == []
    assert (source.fetches, len(scripted.requests)) == (1, 6)


MINTED = Credentials("AKIDMINTED", "minted-secret", minted=True)


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "InvalidClientTokenId"])
async def test_b57_keys_that_were_just_made(scripted: ScriptedS3, hurried: None, code: str) -> None:
    """Keys made for us at this moment are used again for some seconds, with waits, and no others are made."""
    source = Source(MINTED)
    scripted.script("*", "*", repeat(error(403, code), 5))
    async with opened(scripted, source) as store:
        await store.create("pub/x")
    assert (source.fetches, len(scripted.requests)) == (1, 6)
    assert min(gaps(scripted.requests)) > 0.005


async def test_b57_keys_that_never_come_to_be_known(scripted: ScriptedS3, hurried: None) -> None:
    """That ends after a bounded number of attempts and at most one other set of keys."""
    source = Source(MINTED, Credentials("AKIDMINTED2", "minted-secret-2", minted=True))
    scripted.script("*", "*", repeat(chatty(403, "InvalidAccessKeyId")))
    async with opened(scripted, source) as store:
        with pytest.raises(NoCredentials, match="does not know the access key") as caught:
            await store.create("pub/x")
    assert source.fetches <= 2
    assert 3 <= len(scripted.requests) <= 9
    assert not TALK.search(str(caught.value))


REJECTED = ["InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch", "InvalidToken", "TokenRefreshRequired"]


@pytest.mark.parametrize("code", REJECTED)
async def test_keys_that_are_no_longer_right(scripted: ScriptedS3, hurried: None, code: str) -> None:
    """A set that the store rejects is replaced once, and the request made with the next."""
    source = Source(Credentials("AKIDOLD", "old-secret"), Credentials("AKIDNEW", "new-secret"))
    scripted.script("*", "*", [error(400, code)])
    async with opened(scripted, source) as store:
        await store.create("pub/x")
    assert source.fetches == 2
    assert [re.findall("Credential=([A-Z]+)", sent.headers["Authorization"])[0] for sent in scripted.requests] == [
        "AKIDOLD",
        "AKIDNEW",
    ]


@pytest.mark.parametrize("code", REJECTED)
async def test_keys_that_are_never_right(scripted: ScriptedS3, hurried: None, code: str) -> None:
    """One other set is asked for, and then it is an error; another call soon after asks for none."""
    source = Source(*(Credentials(f"AKID{number}", f"secret-{number}") for number in range(9)))
    scripted.script("*", "*", repeat(chatty(403, code)))
    async with opened(scripted, source) as store:
        for _ in range(3):
            with pytest.raises(NoCredentials) as caught:
                await store.create("pub/x")
            assert not TALK.search(str(caught.value))
    assert source.fetches == 2
    assert len(scripted.requests) <= 6


# What stands where, and what is seen of it


def test_b65_an_entry_that_lists_and_does_not_open(scripted: ScriptedS3) -> None:
    """Resolve trusts one listing: entries are never opened."""
    published(scripted, 5)
    scripted.script("*", "pub/0*", repeat(error(404, "NoSuchKey")))
    command(scripted, "resolve").succeeded(f"{ROOT}/{SAVE}\n".encode())


async def test_b65_an_entry_that_does_not_list_yet(scripted: ScriptedS3, store: S3Store) -> None:
    """Publish is judged by the PUT alone, and the second publish finds that it exists."""
    save(scripted, 5)
    scripted.script("GET", "pub/*", repeat(listing()))
    assert [await publish(store, ENTRY) for _ in range(2)] == [Announced.CREATED, Announced.EXISTED]
    assert keys(scripted, "pub/") == [ENTRY.key]


def test_b66_a_marker_before_its_shards(scripted: ScriptedS3) -> None:
    """The marker decides: uploads that are still open are not seen by any listing, so the save is published. (Stated.)"""
    put(scripted, f"{SAVE}/trainer_state.json", b'{"global_step": 5}')
    with watching(scripted) as watch:
        eventually(lambda: keys(scripted, "pub/") == [ENTRY.key], "a publication")
        watch.stop().succeeded()
    assert not [request for request in scripted.requests if "uploads" in request.query]


# A watch


TROUBLES: dict[str, Step] = {
    "SlowDown": chatty(503, "SlowDown"),
    "drop": Fate.DROP,
    "page": Answer(200, SLOPPY_PAGE),
    "404": Answer(404, PAGE),
    "no sense": UNBELIEVABLE["two codes"],
    "no key": UNBELIEVABLE["a key without a name"],
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_a_watch_outlives_every_fault(trouble: Step) -> None:
    """It goes on whatever is answered, says each reason once, and publishes when the store is itself again."""
    broken = threading.Event()

    def sometimes(request: Request, behave: Behaviour) -> Answer | Fate:
        if not broken.is_set():
            return behave(request)
        return trouble(request, behave) if callable(trouble) else trouble

    with ScriptedS3() as server, watching(server) as watch:
        server.script("*", "*", repeat(sometimes))
        watch.watching()
        broken.set()
        save(server, 5)
        watch.says("trying again at every scan", times=1)
        seen = len(server.requests)
        eventually(lambda: len(server.requests) > seen + 12, "more scans", 40)
        assert watch.process.poll() is None, watch.log
        assert watch.log.count("trying again at every scan") == 1, watch.log
        assert not TALK.search(watch.log)
        broken.clear()
        eventually(lambda: keys(server, "pub/") == [ENTRY.key], "a publication")
        watch.stop().succeeded()


def test_a_watch_publishes_although_answers_are_lost(scripted: ScriptedS3) -> None:
    """Saves whose create fails in every way are published all the same, each once, and none is said to be another's."""
    scripted.script(
        "PUT", "pub/*", [LOST["drop"], LOST["500"], error(409, "OperationAborted"), error(503, "SlowDown"), Fate.DROP]
    )
    for step in (1, 2, 3, 4):
        save(scripted, step)
    with watching(scripted) as watch:
        eventually(lambda: len(keys(scripted, "pub/")) == 4, "four publications")
        watch.stop().succeeded()
        assert watch.log.count("published: ") == 4, watch.log


# Every failure says what it is


def closed_port() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def proxied(answer: Answer, scheme: str) -> Callable[[Any], Iterator[list[str]]]:
    def arrange(_: Any) -> Iterator[list[str]]:
        with Scripted(lambda _: answer) as proxy:
            yield ["-endpoint", f"{scheme}://s3.example", "-proxy", proxy.endpoint]

    return arrange


def answered(answer: Answer) -> Callable[[Any], Iterator[list[str]]]:
    def arrange(_: Any) -> Iterator[list[str]]:
        with Scripted(lambda _: answer) as server:
            yield ["-endpoint", server.endpoint]

    return arrange


def at(endpoint: str, *flags: str) -> Callable[[Any], Iterator[list[str]]]:
    return lambda _: iter([["-endpoint", endpoint, *flags]])


def over_tls(*names: str, days: int = 2, ca: bool = True, plain: bool = False) -> Callable[[Authority], Iterator[list[str]]]:
    def arrange(authority: Authority) -> Iterator[list[str]]:
        with ScriptedS3(authority.certificate(*names, days=days)) as server:
            endpoint = server.endpoint.replace("https", "http") if plain else server.endpoint
            yield ["-endpoint", endpoint, *(["-ca", str(authority.ca)] if ca else [])]

    return arrange


def silent(_: Any) -> Iterator[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield ["-endpoint", f"http://127.0.0.1:{listener.getsockname()[1]}"]


def tls_to_plain(_: Any) -> Iterator[list[str]]:
    with ScriptedS3() as server:
        yield ["-endpoint", server.endpoint.replace("http", "https")]


def signed_wrongly(**options: Any) -> Callable[[Any], Iterator[list[str]]]:
    def arrange(_: Any) -> Iterator[list[str]]:
        with ScriptedS3(**options) as server:
            yield ["-endpoint", server.endpoint]

    return arrange


KINDS: dict[str, tuple[Callable[[Any], Iterator[list[str]]], list[str]]] = {
    "refused": (at(f"http://{closed_port()}"), ["no connection: Connection refused", "see -endpoint"]),
    "no such host": (at("http://no-such-host.invalid"), ["no connection: ", "not known", "see -endpoint"]),
    "silence": (silent, ["no answer in time", "see -endpoint"]),
    "hangs up": (answered(Answer(200, b"x" * 99, cut=9)), ["closed in the middle", "see -endpoint"]),
    "TLS name": (over_tls("other.example"), ["TLS: ", "not valid for 'localhost'"]),
    "TLS private CA": (over_tls("localhost", ca=False), ["TLS: unable to get local issuer certificate", "-ca"]),
    "TLS expired": (over_tls("localhost", days=0), ["TLS: certificate has expired"]),
    "http to https": (over_tls("localhost", plain=True), ["closed in the middle", "https"]),
    "https to http": (tls_to_plain, ["TLS: ", "is it an https endpoint"]),
    "proxy refused": (
        at("http://s3.example", "-proxy", f"http://{closed_port()}"),
        ["no connection to the proxy: Connection refused", "see -proxy"],
    ),
    "proxy unknown": (at("http://s3.example", "-proxy", "http://no-such-proxy.invalid:1"), ["not known", "-proxy"]),
    "proxy 407": (proxied(Answer(407), "http"), ["the proxy", "407", "see -proxy"]),
    "proxy 407 https": (proxied(Answer(407), "https"), ["the proxy", "407", "see -proxy"]),
    "proxy 403": (proxied(Answer(403, PAGE), "http"), ["denies access", "-proxy"]),
    "proxy 403 https": (proxied(Answer(403, PAGE), "https"), ["the proxy refuses", "403", "see -proxy"]),
    "proxy 503": (proxied(Answer(503, PAGE), "http"), ["503", "-proxy"]),
    "proxy 503 https": (proxied(Answer(503, PAGE), "https"), ["the proxy refuses", "503", "see -proxy"]),
    "another region": (signed_wrongly(secrets={"AKIDSMALL": ""}, region="eu-west-1"), ["in region eu-west-1", "set -region"]),
    "another secret": (signed_wrongly(secrets={"AKIDSMALL": "other"}), ["signature wrong", "secret key"]),
    "another key": (signed_wrongly(secrets={}), ["does not know the access key", "-creds"]),
    "expired": (answered(chatty(400, "ExpiredToken")), ["expired", "-creds"]),
    "denied": (signed_wrongly(scope="team/q/"), ["denies access", "prefix"]),
    "no bucket": (answered(chatty(404, "NoSuchBucket")), ["no such bucket", "-endpoint"]),
    "a web server": (answered(Answer(404, PAGE)), ["404", "S3", "-endpoint"]),
    "a web page": (answered(Answer(200, PAGE)), ["no complete listing", "S3 store", "-endpoint"]),
    "a sloppy page": (answered(Answer(200, SLOPPY_PAGE)), ["S3 store", "-endpoint"]),
    "not HTTP": (answered(Answer(200, b"", {"Content-Length": "many"})), ["answer", "-endpoint"]),
}


@pytest.mark.parametrize(("arrange", "said"), KINDS.values(), ids=KINDS)
def test_every_failure_says_which_it_is(
    authority: Authority, arrange: Callable[[Any], Iterator[list[str]]], said: list[str]
) -> None:
    """Exit 1, empty stdout, and one line: what failed, to which, why, and what to check; no secret and no request id."""
    env = environment(AWS_ACCESS_KEY_ID="AKIDSMALL", AWS_SECRET_ACCESS_KEY="secret-of-the-small-one", AWS_SESSION_TOKEN="HOST77")
    for flags in arrange(authority):
        ran = run("resolve", "-checkpoint", ROOT, "-creds", "env", "-region", REGION, *flags, env=env, prefix=HURRIED)
        ran.failed(f"{ROOT}/pub: ", *said)
        assert not TALK.search(ran.err), ran


# Answers without an end


class Endless:
    """A server that answers each request with a head and then more, until the client goes or `_ENOUGH` bytes are sent."""

    _ENOUGH = 96 << 20

    def __init__(self, head: bytes, more: bytes) -> None:
        self._head, self._more = head, more * (1 + (64 << 10) // len(more))
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    connection.recv(1 << 16)
                    connection.sendall(self._head)
                    while self.sent < self._ENOUGH:
                        connection.sendall(self._more)
                        self.sent += len(self._more)
                except OSError:
                    pass  # the client has had enough


_XML = b"Content-Type: application/xml\r\nConnection: close\r\n\r\n"
KEY = b"<Contents><Key>team/p/pub/x</Key></Contents>"
ENDLESS = {
    "listing": (b"HTTP/1.1 200 OK\r\n" + _XML + b"<ListBucketResult>", KEY),
    "listing in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"100\r\n%b\r\n" % (b"x" * 256)),
    "error": (b"HTTP/1.1 403 No\r\n" + _XML + b"<Error>", b"<Message>no</Message>"),
    "header": (b"HTTP/1.1 200 OK\r\nX-Big: ", b"x"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-Some: header\r\n"),
    "before the answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("word", ["True", "TRUE", "1", " true", ""])
async def test_a_listing_that_goes_on_in_other_words(scripted: ScriptedS3, store: S3Store, word: str) -> None:
    """Only `true` means that there is more; another word beside a token is a doubt, not the end (rule 6)."""
    page = b"<IsTruncated>%b</IsTruncated><NextContinuationToken>t</NextContinuationToken>" % word.encode()
    key = b"<Name>bucket</Name><Contents><Key>team/p/pub/a</Key></Contents>"
    scripted.script("GET", "*", [Answer(200, b"<ListBucketResult>%b%b</ListBucketResult>" % (key, page))])
    with pytest.raises(Unavailable, match="whether it goes on"):
        await store.list("pub")


async def test_a_key_that_is_listed_twice_is_there_once(scripted: ScriptedS3, store: S3Store) -> None:
    """A prune would count it twice, and delete one save too many (rule 10)."""
    key = b"<Contents><Key>team/p/pub/a</Key></Contents>"
    page = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>%b%b</ListBucketResult>" % (key, key)
    scripted.script("GET", "*", [Answer(200, page)])
    assert [entry.name for entry in await store.list("pub")] == ["a"]


@pytest.mark.parametrize("key", [b"", b"<Contents><Key>team/p/pub/a</Key></Contents>"])
async def test_a_listing_without_an_end(scripted: ScriptedS3, store: S3Store, key: bytes) -> None:
    """Pages that bring nothing new are followed for a while only."""
    numbers = count()

    def page(_request: Request, _behave: Behaviour) -> Answer:
        token = b"<NextContinuationToken>%d</NextContinuationToken>" % next(numbers)
        more = b"<Name>bucket</Name><IsTruncated>true</IsTruncated>"
        return Answer(200, b"<ListBucketResult>%b%b%b</ListBucketResult>" % (more, key, token))

    scripted.script("GET", "*", repeat(page))
    with pytest.raises(Unavailable, match="without an end"):
        await store.list("pub")
    assert next(numbers) < 200


@pytest.mark.parametrize(
    ("kind", "operation"), [*((kind, "list") for kind in ENDLESS), *(("error", name) for name in ("read", "create", "delete"))]
)
async def test_an_answer_without_an_end(hurried: None, kind: str, operation: str) -> None:
    """It is given up in time, and before it has taken the memory that training needs."""
    with Endless(*ENDLESS[kind]) as server:
        async with opened(server.endpoint) as store:
            with pytest.raises(StoreError):
                await asyncio.wait_for(getattr(store, operation)(*(["x", 9] if operation == "read" else ["x"])), 30)
        assert server.sent < 64 << 20


async def test_a_marker_without_an_end(hurried: None) -> None:
    """A content longer than the caller wants is not read; one read piece by piece takes a piece of memory at a time."""
    head = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n' % (1 << 40)
    with Endless(head, b"x") as server:
        async with opened(server.endpoint) as store:
            with pytest.raises(TooLarge):
                await store.read("x", 1 << 20)
            pieces = store.stream("x")
            assert [len(await anext(pieces)) <= 1 << 20 for _ in range(8)] == [True] * 8
            await pieces.aclose()
        assert server.sent < 64 << 20


@pytest.mark.parametrize("headers", [{}, {"ETag": '"x"', "Transfer-Encoding": "chunked"}], ids=["no ETag", "no length"])
async def test_a_marker_of_no_store(scripted: ScriptedS3, store: S3Store, headers: dict[str, str]) -> None:
    """What an answer without ETag or length holds is not believed, and its connection is given back."""
    scripted.script("GET", "*", repeat(Answer(200, b"0\r\n\r\n", headers)))
    for _ in range(3):
        with pytest.raises(Unavailable, match="no ETag or no length"):
            await store.read("x", 9)


@pytest.mark.parametrize("lost", [Answer(200, b"12345", {"ETag": '"x"'}, cut=2), Fate.DROP, error(503, "SlowDown"), Answer(500)])
async def test_a_marker_that_breaks_off(scripted: ScriptedS3, store: S3Store, lost: Step) -> None:
    """A marker is read again until it comes whole."""
    put(scripted, "x", b"12345")
    scripted.script("GET", "*", [lost, lost])
    assert await store.read("x", 9) == b"12345"
    scripted.script("GET", "*", repeat(lost))
    with pytest.raises(Unavailable):
        await store.read("x", 9)
