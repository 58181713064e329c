"""The services that other tests rely on do what they say."""

from __future__ import annotations

import http.client
import itertools
import ssl
import subprocess
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from commands import eventually, require_program
from services.places import Place, Refused, S3Service
from services.scripted import PASS, Answer, Fate, ScriptedS3, after, error
from services.seaweed import SCOPED_BUCKET, SCOPED_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.certificates import Authority, Certificate
    from services.proxies import ForwardProxy, Listener
    from services.scripted import Step
    from services.seaweed import SeaweedFS


@pytest.fixture(params=["seaweed", "moto", "small"])
def service(request: pytest.FixtureRequest) -> Iterator[S3Service]:
    """Each S3 service in turn."""
    if request.param != "small":
        yield request.getfixturevalue(request.param)
        return
    with ScriptedS3() as server:
        yield from _opened(server)


def _opened(server: ScriptedS3) -> Iterator[S3Service]:
    service = S3Service(server.endpoint, server.keys)
    yield service
    service.close()


@pytest.fixture
def place(service: S3Service) -> Place:
    if service.endpoint.startswith("http://127.0.0.1") and service.keys.access_key == "AKIDSMALL":
        return Place(service, "bucket", "team/p")  # it has no buckets to make
    return service.place()


def refusal(service: S3Service, method: str, path: str, **options: Any) -> tuple[int, str]:
    """With which status and code the service refuses; (200, "") if it does not."""
    try:
        service.request(method, path, **options)
    except Refused as refused:
        return refused.status, refused.code
    return 200, ""


# What every S3 service does


def test_objects_come_and_go(place: Place) -> None:
    """What was put is got, listed below its folder, and gone when deleted."""
    place.put("a/b c+é/x", b"content")
    place.put("a/y")
    assert place.get("a/b c+é/x") == b"content"
    assert (place.keys(), place.names("a")) == (["a/b c+é/x", "a/y"], {"b c+é", "y"})
    place.delete("a/y")
    assert place.keys("a/") == ["a/b c+é/x"]
    with pytest.raises(Refused, match="404"):
        place.get("a/y")


def test_a_conditional_put_has_one_winner(place: Place) -> None:
    """The second exclusive create is refused, and after a delete the next one is not."""
    path, headers = f"/{place.bucket}/{place.prefix}/x", {"if-none-match": "*"}
    for expected in ((200, ""), (412, "PreconditionFailed")):
        assert refusal(place.service, "PUT", path, headers=headers) == expected
    place.delete("x")
    assert refusal(place.service, "PUT", path, headers=headers) == (200, "")


def test_a_page_is_not_the_listing(place: Place) -> None:
    """A listing goes on where its last page ended, common prefixes included, each once."""
    for key in ("a/1", "a/2", "b", "c/1", "c/2", "d"):
        place.put(key)
    query = {"list-type": "2", "prefix": f"{place.prefix}/", "delimiter": "/", "max-keys": "1"}
    seen = []
    for _ in range(10):
        page = ElementTree.fromstring(place.service.request("GET", f"/{place.bucket}", query))
        found = page.findtext("{*}Contents/{*}Key") or page.findtext("{*}CommonPrefixes/{*}Prefix") or ""
        seen.append(found.removeprefix(f"{place.prefix}/"))
        if page.findtext("{*}IsTruncated") == "false":
            break
        query["continuation-token"] = page.findtext("{*}NextContinuationToken") or ""
    assert seen == ["a/", "b", "c/", "d"]


# SeaweedFS


def test_seaweed_knows_who_asks(seaweed: SeaweedFS) -> None:
    """Wrong keys are told apart, and one who may only read can't write."""
    path = f"/{SCOPED_BUCKET}/{SCOPED_PREFIX}/x"
    assert refusal(seaweed, "PUT", path, keys=seaweed.wrong_secret) == (403, "SignatureDoesNotMatch")
    assert refusal(seaweed, "PUT", path, keys=seaweed.unknown) == (403, "InvalidAccessKeyId")
    assert refusal(seaweed, "PUT", path, keys=seaweed.reader) == (403, "AccessDenied")


@pytest.mark.parametrize(
    ("method", "path", "query", "status"),
    [
        ("PUT", f"/{SCOPED_BUCKET}/{SCOPED_PREFIX}/x", None, 200),
        ("DELETE", f"/{SCOPED_BUCKET}/{SCOPED_PREFIX}/x", None, 200),
        ("GET", f"/{SCOPED_BUCKET}", {"list-type": "2", "prefix": f"{SCOPED_PREFIX}/"}, 200),
        ("PUT", f"/{SCOPED_BUCKET}/{SCOPED_PREFIX}2/x", None, 403),
        ("DELETE", f"/{SCOPED_BUCKET}/other/x", None, 403),
        ("GET", f"/{SCOPED_BUCKET}", {"list-type": "2", "prefix": SCOPED_PREFIX}, 403),
        ("GET", f"/{SCOPED_BUCKET}", {"list-type": "2"}, 403),
        ("GET", f"/{SCOPED_BUCKET}", {"location": ""}, 403),
        ("HEAD", f"/{SCOPED_BUCKET}", None, 403),
    ],
)
def test_seaweed_keeps_one_to_a_prefix(
    seaweed: SeaweedFS, method: str, path: str, query: dict[str, str] | None, status: int
) -> None:
    """The scoped identity may do anything below its prefix, and nothing beside it or about the bucket."""
    assert refusal(seaweed, method, path, query=query, keys=seaweed.scoped)[0] == status


def test_seaweed_versions_leave_a_delete_marker(seaweed: SeaweedFS) -> None:
    """In a versioned bucket what was deleted is out of sight, and can be created again."""
    place = seaweed.place(seaweed.new_bucket(versioned=True))
    place.put("x", b"one")
    place.delete("x")
    assert place.keys() == []
    versions = seaweed.request("GET", f"/{place.bucket}", {"versions": ""})
    assert b"DeleteMarker" in versions
    assert refusal(seaweed, "PUT", f"/{place.bucket}/{place.prefix}/x", headers={"if-none-match": "*"}) == (200, "")


def https_status(url: str, ca: Authority | None) -> int:
    """The status of a GET, trusting the CA or the system's ones."""
    address = urlsplit(url)
    context = ssl.create_default_context(cafile=str(ca.ca) if ca else None)
    connection = http.client.HTTPSConnection(address.hostname or "", address.port, context=context, timeout=30)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def test_seaweed_speaks_tls(seaweed: SeaweedFS, authority: Authority) -> None:
    """Its https port is trusted by who knows the private CA, and by nobody else."""
    assert https_status(seaweed.https_endpoint, authority) == 403
    with pytest.raises(ssl.SSLCertVerificationError):
        https_status(seaweed.https_endpoint, None)


@pytest.mark.parametrize(
    ("names", "days", "cause"),
    [(("elsewhere.test",), 2, "Hostname mismatch"), (("*.a.localhost",), 2, "Hostname mismatch"), (("localhost",), 0, "expired")],
)
def test_certificates_may_be_wrong(authority: Authority, names: tuple[str, ...], days: int, cause: str) -> None:
    """A certificate for another host, or of yesterday, is what a client sees it is."""
    certificate = authority.certificate(*names, days=days)
    with ScriptedS3(certificate) as server, pytest.raises(ssl.SSLCertVerificationError, match=cause):
        https_status(server.endpoint, authority)


# The scripted server


def exchange(server: ScriptedS3, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_script_counts_requests(scripted: ScriptedS3) -> None:
    """The queue comes first, then the script for the key, then the small S3."""
    scripted.queue += [Answer(503), error(409, "ConditionalRequestConflict")]
    scripted.script("PUT", "pub/*", [PASS, Answer(500)])
    statuses = [exchange(scripted, "PUT", "/b/p/pub/x")[0] for _ in range(5)]
    assert statuses == [503, 409, 200, 500, 200]
    scripted.script("GET", "*", itertools.repeat(Answer(403, b"no")))
    assert [exchange(scripted, "GET", "/b/p/pub/x") for _ in range(3)] == [(403, b"no")] * 3


def test_requests_are_recorded_as_they_came(scripted: ScriptedS3) -> None:
    """Path, query and body are there undecoded and decoded."""
    exchange(scripted, "PUT", "/b//p/a%2Fb%20c?x=%2B", b"body")
    (request,) = scripted.seen("PUT", "a/b c")
    assert (request.target, request.body) == ("/b//p/a%2Fb%20c?x=%2B", b"body")
    assert (request.bucket, request.key, request.query) == ("b", "/p/a/b c", {"x": "+"})
    assert scripted.s3.objects == {("b", "/p/a/b c"): b"body"}


@pytest.mark.parametrize("fate", [Fate.DROP, Fate.DROP_UNREAD, after(Fate.DROP)])
def test_a_request_may_be_dropped(scripted: ScriptedS3, fate: Step) -> None:
    """The client sees its connection closed; whether the request took effect is the script's choice."""
    scripted.queue.append(fate)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        exchange(scripted, "PUT", "/b/p/x")
    assert bool(scripted.s3.objects) == (not isinstance(fate, Fate))
    assert len(scripted.requests) == (fate is not Fate.DROP_UNREAD)


def test_a_body_may_be_cut_and_slow(scripted: ScriptedS3) -> None:
    """The connection closes in the middle of the body; a slow body comes whole."""
    scripted.queue += [Answer(200, b"0123456789", cut=4), Answer(200, b"0123", delay=0.01, pause=0.01)]
    with pytest.raises(http.client.IncompleteRead) as caught:
        exchange(scripted, "GET", "/b/p/x")
    assert caught.value.partial == b"0123"
    assert exchange(scripted, "GET", "/b/p/x") == (200, b"0123")


def test_silence_ends_with_the_server() -> None:
    """A request that is never answered keeps nobody when the test is over."""
    with ScriptedS3() as server:
        server.queue.append(Fate.SILENCE)
        connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=30)
        connection.request("GET", "/b/p/x")
        eventually(lambda: server.requests, "the request")
    connection.close()


def test_a_failing_step_fails_the_test() -> None:
    """What a test's own step raises is not lost in a thread."""

    def step(*_: object) -> Answer:
        raise ZeroDivisionError

    server = ScriptedS3().__enter__()
    server.queue.append(step)
    assert exchange(server, "GET", "/b/p/x")[0] == 500
    with pytest.raises(ZeroDivisionError):
        server.__exit__()


def test_scripted_speaks_tls(scripted_https: ScriptedS3, authority: Authority) -> None:
    """Over TLS it is the same server."""
    assert https_status(scripted_https.endpoint, authority) == 501
    assert len(scripted_https.requests) == 1


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"secrets": {"AKIDSMALL": "secret-of-the-small-one"}}, (200, "")),
        ({"secrets": {"AKIDSMALL": "another"}}, (403, "SignatureDoesNotMatch")),
        ({"secrets": {}}, (403, "InvalidAccessKeyId")),
        ({"secrets": {"AKIDSMALL": "secret-of-the-small-one"}, "region": "eu-1"}, (400, "AuthorizationHeaderMalformed")),
        ({"scope": "p/"}, (200, "")),
        ({"scope": "q/"}, (403, "AccessDenied")),
    ],
)
def test_the_small_s3_checks_what_it_is_told_to(options: dict[str, Any], refused: tuple[int, str]) -> None:
    """Signatures, regions and scope are checked where the test wants it."""
    with ScriptedS3(**options) as server:
        for service in _opened(server):
            assert refusal(service, "PUT", "/b/p/é +&%2F'~", query={"x": "a b"}) == refused


def test_the_small_s3_takes_a_virtual_host_through_a_proxy() -> None:
    """As a proxy it answers for any host, and finds the bucket in its name."""
    with ScriptedS3(domain="s3.test") as server:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": server.endpoint}))
        opener.open(urllib.request.Request("http://ckpts.s3.test/p/x", b"", method="PUT"), timeout=30).close()
        assert server.s3.keys("ckpts") == ["p/x"]


# Proxies


@pytest.mark.parametrize("kind", ["forward_proxy", "https_forward_proxy"])
def test_a_forward_proxy_carries_http_and_https(
    kind: str, request: pytest.FixtureRequest, scripted: ScriptedS3, scripted_https: ScriptedS3, authority: Authority
) -> None:
    """What goes through is in its log, by method, once the connection is closed."""
    proxy: ForwardProxy = request.getfixturevalue(kind)
    assert through(proxy, scripted.endpoint, authority) == 501
    assert through(proxy, scripted_https.endpoint, authority) == 501
    eventually(lambda: proxy.passed(f"GET {urlsplit(scripted.endpoint).netloc}"), "a GET in the log")
    eventually(lambda: proxy.passed(f"CONNECT {urlsplit(scripted_https.endpoint).netloc}"), "a CONNECT in the log")
    assert (len(scripted.requests), len(scripted_https.requests)) == (1, 1)


def through(proxy: ForwardProxy, url: str, authority: Authority) -> int:
    """The status of a GET of `url` by way of the proxy, sent by curl's own implementation."""
    curl = require_program("curl", "curl")
    flags = ["--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "30", "--noproxy", ""]
    trust = ["--cacert", str(authority.ca), "--proxy-cacert", str(authority.ca)]
    return int(subprocess.run([curl, *flags, *trust, "--proxy", proxy.url, url], capture_output=True, check=False).stdout)


def test_the_trap_records_and_closes(trap: Listener) -> None:
    """Who falls into it is recorded with what it said."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": trap.url}))
    with pytest.raises((OSError, http.client.HTTPException)):
        opener.open("http://nowhere.test/", timeout=30)
    assert [head.split(b"\r\n")[0] for head in trap.heads] == [b"GET http://nowhere.test/ HTTP/1.1"]


def test_the_silent_proxy_never_answers(silent_proxy: Listener, loopback_certificate: Certificate) -> None:
    """It takes the connection and keeps it."""
    address = urlsplit(silent_proxy.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=0.2)
    connection.request("GET", "http://nowhere.test/")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    assert len(silent_proxy.heads) == 1
