"""Who may reach an s3:// root and how: command lines, names, TLS, rights, and what probe finds of it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import repeat
from typing import TYPE_CHECKING

import pytest

from commands import EPOCH, Ran, environment, run
from publishd.cli import COMMANDS
from publishd.errors import UsageError
from publishd.options import parse_options
from publishd.publications import Publication
from s3_roots import S3Root, SmallRoot, at_once, started
from services.scripted import Answer, ScriptedS3, error
from services.seaweed import SCOPED_BUCKET

if TYPE_CHECKING:
    from services.certificates import Authority, Certificate
    from services.exchanges import Behaviour, Request
    from services.seaweed import SeaweedFS

SECRET = "S3CRET"


# Usage. Whatever is refused is refused before anything is sent, and without being repeated.

EVERY_COMMAND = (
    ["resolve"],
    ["list"],
    ["probe"],
    ["prune", "-keep", "1"],
    ["publish", "exec/1.4101.0/checkpoint-5", "5"],
    ["watch", "-framework", "hf", "-once"],
)


def refused(server: ScriptedS3, *arguments: str | bytes, said: str, env: dict[str, str] | None = None) -> None:
    """Assert that the command line is a usage error that says so, that no secret is repeated and nothing was sent."""
    ran = run(*arguments, env=environment(**server.environ) if env is None else env)
    ran.failed(said, code=2)
    assert SECRET not in ran.err
    assert server.connections == 0


def complaint(*argv: str) -> str:
    """What the parser of command lines says of one that it refuses; to ask it alone takes no time."""
    with pytest.raises(UsageError) as caught:
        parse_options(argv, {}, flags=COMMANDS["resolve"].flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("s3://", "must be s3://BUCKET/PREFIX"),
        ("s3:///p", "must be s3://BUCKET/PREFIX"),
        ("s3://key:S3CRET@bucket/p", "must be s3://BUCKET/PREFIX"),
        ("s3://S3CRET@bucket/p", "must be s3://BUCKET/PREFIX"),
        ("s3://bucket:9000/p", "must be s3://BUCKET/PREFIX"),
        ("s3://bucket?S3CRET/p", "must be s3://BUCKET/PREFIX"),
        ("s3://bücket/p", "must be s3://BUCKET/PREFIX"),
        ("s3://bucket//p", "component"),
        ("s3://bucket/p//q", "component"),
        ("s3://bucket/p//", "component"),
        ("s3://bucket/./p", "component"),
        ("s3://bucket/p/../q", "component"),
        ("s3://bucket/p\n", "control character"),
        ("s3://bucket/p\x01", "control character"),
        (b"s3://bucket/caf\xe9", "UTF-8"),
        ("gs://bucket/S3CRET", "must be a folder or s3://BUCKET/PREFIX"),
        ("S3://bucket/p", "must be a folder or s3://BUCKET/PREFIX"),
    ],
)
def test_b44_a_bad_root_is_refused(scripted: ScriptedS3, root: str | bytes, said: str) -> None:
    """What is no bucket and prefix, or what stores read differently, is a usage error that repeats nothing."""
    text = os.fsdecode(root)
    line = complaint("-checkpoint", text, *scripted.flags)
    assert line.startswith("bad flag: -checkpoint: ")
    assert said in line
    assert SECRET not in line
    if SECRET in text or isinstance(root, bytes):
        refused(scripted, "resolve", "-checkpoint", root, *scripted.flags, said=said)


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=lambda command: command[0])
def test_every_command_refuses_a_root_without_credentials(scripted: ScriptedS3, command: list[str]) -> None:
    """No -creds is a usage error, and so are keys that `-creds env` does not find; no other source is asked."""
    name, *rest = command
    refused(scripted, name, "-checkpoint", "s3://bucket/p", *scripted.flags[2:], *rest, said="-creds: it is required")
    env = environment(AWS_ACCESS_KEY_ID="AKID")
    refused(scripted, name, "-checkpoint", "s3://bucket/p", *scripted.flags, *rest, said="AWS_SECRET_ACCESS_KEY", env=env)


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=lambda command: command[0])
def test_no_flag_of_s3_means_anything_on_a_folder(scripted: ScriptedS3, authority: Authority, command: list[str]) -> None:
    """Each of the six is a usage error there, with every command."""
    name, *rest = command
    refused(scripted, name, "-checkpoint", "/tmp", *rest, "-creds", "env", said="-creds: it is for s3:// roots only")
    flags = {
        "creds": "env",
        "proxy": "http://h:1",
        "endpoint": "http://h",
        "region": "r",
        "ca": authority.ca,
        "addressing": "path",
    }
    for flag, value in flags.items():
        assert complaint("-checkpoint", "/tmp", f"-{flag}", str(value)).startswith(
            f"bad flag: -{flag}: it is for s3:// roots only"
        )


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        (
            "-creds",
            [
                "S3CRET",
                "",
                "env:S3CRET",
                "env?key=S3CRET",
                "file",
                "file:",
                "file:x?S3CRET=1",
                "file:x?profile=",
                "aws:AKIA:S3CRET",
                "vault:h/S3CRET",
                "vault:ftp://h/S3CRET?auth=token",
                "vault:https://u:S3CRET@h/p?auth=token",
                "vault:https://h/p?auth=token&token=S3CRET",
                "vault:https://h/p?auth=S3CRET",
                "vault:https://h/p?auth=token&proxy=http://u:S3CRET@h:1",
            ],
        ),
        (
            "-proxy",
            [
                "http://u:S3CRET@h:3128",
                "http://u:@h:3128",
                "HTTPS://u:S3CRET@h",
                "socks5://S3CRET:1",
                "h:3128",
                "",
                "http://h/S3CRET",
                "http://h:1/?S3CRET",
                "http://h:1#S3CRET",
                "http://h:0",
                "http://S3CRET h",
                "http://h:S3CRET",
            ],
        ),
        (
            "-endpoint",
            ["http://u:S3CRET@h", "http://S3CRET@h", "ftp://S3CRET", "h:9000", "http://h/?k=S3CRET", "http://h:x", "http://", ""],
        ),
        ("-region", ["S3CRET!", "eu west", "", "eu_west", "é"]),
        ("-ca", ["/no/S3CRET", "/etc/passwd", "/tmp", ""]),
        ("-addressing", ["S3CRET", "Path", ""]),
    ],
)
def test_b47_a_bad_value_is_refused_without_being_repeated(scripted: ScriptedS3, flag: str, values: list[str]) -> None:
    """Rule 20: whatever it is, it may be a mistyped secret; the message names the flag and what it must be."""
    rest = ["-checkpoint", "s3://bucket/p", *scripted.flags]
    for spelling in (*([flag, value] for value in values), [f"-{flag}={values[0]}"]):
        line = complaint(*rest, *spelling)
        assert line.startswith(f"bad flag: {flag}: "), line
        assert SECRET not in line
    refused(scripted, "resolve", *rest, flag, values[0], said=f"bad flag: {flag}: ")


def test_a_bucket_may_have_a_name_of_one_letter(small: SmallRoot) -> None:
    """B44: which names a bucket may have is the store's to say."""
    root = SmallRoot(small.server, "b", "p")
    root.run("publish", root.hf(5), "5").succeeded()
    root.run("resolve").succeeded(b"s3://b/p/exec/1.4101.0/checkpoint-5\n")


# Names

ODD = "sp ace+=@&;%2F%~é'\"<>#?:,!$*()[]{}|^`"


@pytest.mark.parametrize(("prefix", "attempt"), [(f"team/{ODD}", "1.4101.0"), ("team/p", f"a{ODD}"), ("é/ü", "日本 ü")])
@pytest.mark.parametrize("service", ["seaweed", "small"])
def test_b46_odd_characters_make_the_round_trip(request: pytest.FixtureRequest, service: str, prefix: str, attempt: str) -> None:
    """Published, resolved and pruned under the same keys, by requests whose signatures are checked."""
    if service == "small":
        server = request.getfixturevalue("scripted")
        server.s3.secrets = dict([server.keys])
        root: S3Root = SmallRoot(server, prefix=prefix, attempt=attempt)
    else:
        weed = request.getfixturevalue("seaweed")
        root = S3Root(weed.place()._replace(bucket=weed.new_bucket(), prefix=prefix), attempt=attempt)
    saves = [root.hf(5), root.hf(6)]
    root.place.put(f"{saves[0]}/{ODD}/{ODD}")
    root.run("watch", "-framework", "hf", "-once", env=root.env(DISPATCH_ATTEMPT=attempt)).succeeded(b"")
    assert root.pub == [Publication(EPOCH, step, f"exec/{attempt}/checkpoint-{step}").name for step in (5, 6)]
    root.run("resolve", "-verify").succeeded(f"s3://{root.place.bucket}/{prefix}/{saves[1]}\n".encode())
    root.run("prune", "-keep", "1").succeeded(f"{root.path}/{saves[0]}\n".encode())
    assert root.saves == {"checkpoint-6"}


def test_b46_a_control_character_in_a_key_breaks_no_listing(small: SmallRoot) -> None:
    """Listings ask for encoded keys, so that one which no XML can hold is listed, escaped in messages, and deleted."""
    save = small.hf(5)
    small.place.put(f"{save}/a\x01b\nc")
    small.publish(save, 5)
    small.published(6)
    small.place.put("pub/a\x01b")
    small.run("resolve").failed("pub/a\\x01b")
    small.place.delete("pub/a\x01b")
    small.run("prune", "-keep", "1").succeeded()
    assert small.saves == {"checkpoint-6"}
    assert all(request.query["encoding-type"] == "url" for request in small.server.requests if "list-type" in request.query)


def test_b46_a_control_character_in_the_attempt_is_refused(small: SmallRoot) -> None:
    """It would have to stand in the answer of resolve."""
    small.run("watch", "-framework", "hf", "-attempt", "a\x01b").failed("-attempt", code=2)
    small.run("watch", "-framework", "hf", env=small.env(DISPATCH_ATTEMPT="caf\udce9")).failed("UTF-8", code=2)
    assert not small.server.requests


# TLS


@pytest.fixture
def https(scripted_https: ScriptedS3) -> SmallRoot:
    """A root at an https endpoint whose certificate is of a private CA."""
    return SmallRoot(scripted_https)


def test_b67_a_private_ca_is_named_by_a_flag(seaweed: SeaweedFS) -> None:
    """With -ca a real server is spoken to over TLS."""
    root = S3Root(seaweed.place(), flags=["-creds", "env", "-endpoint", seaweed.https_endpoint, "-ca", str(seaweed.ca)])
    root.run("publish", root.hf(5), "5").succeeded()
    assert root.resolved() == f"{root.execution}/checkpoint-5"


def test_b67_nothing_else_adds_a_ca(https: SmallRoot, authority: Authority) -> None:
    """The failure names host and reason; no variable changes it; nothing is ever sent without TLS."""
    ca = str(authority.ca)
    names = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    host = https.server.endpoint.removeprefix("https://")
    for env in (https.env(), https.env(**dict.fromkeys(names, ca), SSL_CERT_DIR=str(authority.ca.parent))):
        https.run("resolve", env=env).failed(host, "TLS: unable to get local issuer certificate", "-ca")
    assert not https.server.requests


def test_b67_a_certificate_for_another_host_is_refused(authority: Authority) -> None:
    """The failure names the host and says that the certificate is not for it."""
    with ScriptedS3(authority.certificate("elsewhere.example")) as server:
        root = SmallRoot(server).published(5)
        root.run("resolve", "-ca", str(authority.ca)).failed(server.endpoint, "TLS: Hostname mismatch", "'localhost'")
        assert not server.requests


def test_b67_an_expired_certificate_is_refused(authority: Authority) -> None:
    """The failure says so."""
    with ScriptedS3(authority.certificate("localhost", days=-1)) as server:
        SmallRoot(server).run("resolve", "-ca", str(authority.ca)).failed(server.endpoint, "TLS: certificate has expired")
        assert not server.requests


def test_b67_an_http_server_at_an_https_endpoint_is_said_to_be_none(small: SmallRoot) -> None:
    """Nothing falls back to plain http."""
    small.flags[small.flags.index(small.server.endpoint)] = small.server.endpoint.replace("http:", "https:")
    small.run("resolve").failed("TLS: ", "is it an https endpoint")
    assert not small.server.requests


@pytest.mark.parametrize("addressing", ["auto", "path", "virtual"])
def test_b58_a_bucket_with_dots_is_never_part_of_a_host_under_tls(
    loopback_certificate: Certificate, authority: Authority, addressing: str
) -> None:
    """A wildcard certificate stands for one label, so such a bucket is in the path, whatever is asked for."""
    with ScriptedS3(loopback_certificate, domain="localhost") as server:
        root = SmallRoot(server, "team.ckpt").published(5)
        ran = root.run("resolve", "-ca", str(authority.ca), "-addressing", addressing)
        ran.succeeded(f"{root.path}/exec/1.4101.0/checkpoint-5\n".encode())
        assert {request.bucket for request in server.requests} == {"team.ckpt"}
        assert {request.headers["Host"] for request in server.requests} == {server.endpoint.removeprefix("https://")}


@pytest.mark.parametrize(("addressing", "host"), [("auto", "s3.test"), ("path", "s3.test"), ("virtual", "bucket.s3.test")])
def test_addressing_says_where_the_bucket_stands(addressing: str, host: str) -> None:
    """In the path, or before the host of the endpoint; a proxy stands in for names that nobody knows."""
    with ScriptedS3(domain="s3.test") as server:
        root = SmallRoot(server, flags=["-creds", "env", "-endpoint", "http://s3.test", "-proxy", server.endpoint])
        root.run("publish", root.hf(5), "5", "-addressing", addressing).succeeded()
        root.run("resolve", "-addressing", addressing).succeeded(f"{root.path}/exec/1.4101.0/checkpoint-5\n".encode())
        assert {request.headers["Host"] for request in server.requests} == {host}


# Rights


@pytest.fixture(params=["seaweed", "small"])
def scoped(request: pytest.FixtureRequest) -> S3Root:
    """A root whose credentials are good for its prefix alone."""
    if request.param == "small":
        server = request.getfixturevalue("scripted")
        server.s3.scope = "team/p/"
        return SmallRoot(server)
    weed = request.getfixturevalue("seaweed")
    return S3Root(weed.place(SCOPED_BUCKET), identity=weed.scoped)


def test_b59_rights_below_the_prefix_are_enough_for_every_command(scoped: S3Root) -> None:
    """Nothing outside the prefix is asked for, above all not whether the bucket is there."""
    scoped.run("probe").succeeded()
    assert scoped.place.keys() == []
    scoped.run("resolve").succeeded(b"")
    scoped.run("publish", scoped.hf(5), "5").succeeded()
    scoped.hf(6)
    scoped.place.put(f"{scoped.execution}/checkpoint-7/model.safetensors")
    scoped.run("watch", "-framework", "hf", "-once").succeeded()
    scoped.run("resolve", "-verify").succeeded(f"{scoped.path}/{scoped.execution}/checkpoint-6\n".encode())
    assert len(scoped.run("list").succeeded().out.splitlines()) == 2
    scoped.run("prune", "-keep", "1").succeeded(f"{scoped.path}/{scoped.execution}/checkpoint-5\n".encode())
    assert (scoped.steps, scoped.saves, scoped.records) == ([6], {"checkpoint-6", "checkpoint-7"}, [])
    if isinstance(scoped, SmallRoot):
        assert all(request.key.startswith("team/p/") for request in scoped.server.requests)
        assert {request.method for request in scoped.server.requests} == {"GET", "PUT", "DELETE"}
        assert all(request.query.keys() <= LISTING for request in scoped.server.requests)


LISTING = {"list-type", "encoding-type", "prefix", "delimiter", "continuation-token", "max-keys"}


def test_b59_what_is_not_there_may_be_denied(scoped: S3Root) -> None:
    """Without ListBucket for the whole bucket AWS answers 403 to a GET of a missing key: that is `not complete yet`."""
    if isinstance(scoped, SmallRoot):
        scoped.server.script("GET", "*/trainer_state.json", repeat(_denied_unless_there))
    scoped.place.put(f"{scoped.execution}/checkpoint-7/model.safetensors")
    scoped.hf(6)
    ran = scoped.run("watch", "-framework", "hf", "-once").succeeded()
    assert "checkpoint-7: not complete: no trainer_state.json yet" in ran.err
    assert "denie" not in ran.err
    assert scoped.steps == [6]
    name = scoped.publish(f"{scoped.execution}/checkpoint-7", 7)
    ran = scoped.run("resolve", "-verify").succeeded(f"{scoped.path}/{scoped.execution}/checkpoint-6\n".encode())
    ran.said_one_line("checkpoint-7: no trainer_state.json yet")
    assert name in scoped.pub


def _denied_unless_there(request: Request, behave: Behaviour) -> Answer:
    answer = behave(request)
    return error(403, "AccessDenied") if answer.status == 404 else answer


@pytest.mark.parametrize("service", ["seaweed", "small"])
def test_outside_the_rights_every_command_is_denied(request: pytest.FixtureRequest, service: str) -> None:
    """Rule 6: a 403 is an error, not `nothing yet`, and the message says what to check."""
    if service == "small":
        server = request.getfixturevalue("scripted")
        server.s3.scope = "elsewhere/"
        root: S3Root = SmallRoot(server)
    else:
        weed = request.getfixturevalue("seaweed")
        root = S3Root(weed.place(), identity=weed.scoped)
    root.published(5, 6)
    commands = (["resolve"], ["resolve", "-verify"], ["list"], ["prune", "-keep", "1"], ["publish", root.hf(7), "7"])
    before = root.place.keys()
    for ran in at_once([started(root, *command) for command in commands]):
        ran.failed("denies access", "below the root's prefix", root.path)
    assert root.place.keys() == before


@pytest.mark.parametrize(("who", "said"), [("wrong_secret", "signature"), ("unknown", "does not know the access key")])
def test_wrong_keys_are_told_apart(seaweed: SeaweedFS, who: str, said: str) -> None:
    """Which of the two is wrong is said, and no key is repeated."""
    keys = getattr(seaweed, who)
    root = S3Root(seaweed.place(), identity=keys)
    for command in (["resolve"], ["publish", root.hf(5), "5"]):
        ran = root.unchanged_by(*command).failed(said)
        assert keys.access_key not in ran.err
        assert keys.secret_key not in ran.err


def test_one_who_may_only_read_resolves_and_writes_nothing(seaweed: SeaweedFS) -> None:
    """What only looks works; publish and prune say that they may not write."""
    root = S3Root(seaweed.place(), identity=seaweed.reader).published(5, 6)
    assert root.resolved() == f"{root.execution}/checkpoint-6"
    assert len(root.unchanged_by("list").succeeded().out.splitlines()) == 2
    root.hf(7)
    root.unchanged_by("publish", f"{root.execution}/checkpoint-7", "7").failed("cannot create", "denies access")
    root.unchanged_by("prune", "-keep", "1").failed("denies access")


# Probe

CHECKS = [
    "reachable",
    "entries",
    "records",
    "exclusive create",
    "race",
    "listing",
    "delete",
    "name limit",
    "object store",
    "proxy",
    "clock",
]


def probed(ran: Ran) -> dict[str, str]:
    """Each check's verdict, in order."""
    return {line["check"]: line["verdict"] for line in ran.json}


@pytest.mark.parametrize("service", ["seaweed", "moto", "small"])
def test_probe_of_a_good_store_is_all_ok(request: pytest.FixtureRequest, service: str) -> None:
    """A line for each check, in words and in JSON, and nothing is left behind."""
    if service == "small":
        root: S3Root = SmallRoot(request.getfixturevalue("scripted")).published(5)
    else:
        root = S3Root(request.getfixturevalue(service).place()).published(5)
    ran = root.unchanged_by("probe", "-json").succeeded()
    assert probed(ran) == dict.fromkeys(CHECKS, "ok"), ran
    assert ran.err == ""
    lines = root.unchanged_by("probe").succeeded().out.decode().splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"ok    {check}" for check in CHECKS]
    assert any(root.place.service.endpoint in line and "us-east-1" in line for line in lines)


@pytest.mark.parametrize(("who", "said"), [("wrong_secret", "signature"), ("unknown", "access key")])
def test_probe_with_wrong_keys(seaweed: SeaweedFS, who: str, said: str) -> None:
    """Nothing can be read, so nothing else is tried."""
    root = S3Root(seaweed.place(), identity=getattr(seaweed, who))
    ran = root.unchanged_by("probe", "-json")
    assert (ran.code, probed(ran)) == (1, {"reachable": "FAIL"})
    assert said in ran.json[0]["detail"]
    assert getattr(seaweed, who).secret_key not in ran.out.decode() + ran.err


def test_probe_of_a_missing_bucket(seaweed: SeaweedFS) -> None:
    """It says that there is none, and makes none."""
    root = S3Root(seaweed.place()._replace(bucket="no-such-bucket"))
    ran = root.run("probe", "-json")
    assert (ran.code, probed(ran)) == (1, {"reachable": "FAIL"})
    assert "no such bucket" in ran.json[0]["detail"]


def test_probe_by_one_who_may_only_read(seaweed: SeaweedFS) -> None:
    """What can be looked at is fine; creating is denied, and a check that needs it is left out."""
    root = S3Root(seaweed.place(), identity=seaweed.reader).published(5)
    ran = root.unchanged_by("probe", "-json")
    assert ran.code == 1
    found = probed(ran)
    assert found["exclusive create"] == "FAIL"
    assert [check for check in found if found[check] == "FAIL"] == ["exclusive create"]
    assert "denies" in next(line["detail"] for line in ran.json if line["verdict"] == "FAIL")


def test_probe_of_a_store_that_overwrites(small: SmallRoot) -> None:
    """A store that ignores the condition fails loudly, and what was created is removed."""

    def unconditionally(request: Request, behave: Behaviour) -> Answer:
        del request.headers["If-None-Match"]
        return behave(request)

    small.server.script("PUT", "*", repeat(unconditionally))
    ran = small.unchanged_by("probe")
    assert ran.code == 1
    assert b"FAIL  exclusive create: a second create of the same name succeeded: this store overwrites silently" in ran.out
    assert "can't be used as it is" in ran.err


def test_probe_of_a_store_that_overwrites_in_a_race(small: SmallRoot) -> None:
    """One that refuses the second create, but lets several win at once, fails too (SeaweedFS before 4.17)."""

    def late(request: Request, behave: Behaviour) -> Answer:
        there = (small.place.bucket, request.key) in small.server.s3.objects
        time.sleep(0.3)
        if not there:
            del request.headers["If-None-Match"]
        return behave(request)

    small.server.script("PUT", "*", repeat(late))
    ran = small.unchanged_by("probe", "-json")
    assert (ran.code, probed(ran)["race"]) == (1, "FAIL")


@pytest.mark.parametrize("answer", [error(501, "NotImplemented"), error(400, "NotImplemented")])
def test_probe_of_a_store_that_cannot_create_exclusively(small: SmallRoot, answer: Answer) -> None:
    """It says that the store lacks the operation; nothing is created without the condition."""
    small.server.script("PUT", "*", repeat(answer))
    ran = small.unchanged_by("probe", "-json")
    assert (ran.code, probed(ran)["exclusive create"]) == (1, "FAIL")
    assert "lacks" in next(line["detail"] for line in ran.json if line["verdict"] == "FAIL")
    assert all(request.headers["If-None-Match"] == "*" for request in small.server.seen("PUT"))


def test_probe_names_what_it_could_not_remove(small: SmallRoot) -> None:
    """Where deleting is denied the check fails, and the leftovers are named."""
    small.server.script("DELETE", "*", repeat(error(403, "AccessDenied")))
    ran = small.run("probe", "-json")
    found = probed(ran)
    assert (ran.code, found["cleanup"]) == (1, "FAIL")
    left = small.place.keys()
    detail = next(line["detail"] for line in ran.json if line["check"] == "cleanup")
    assert left
    assert all(key.startswith("probe-") for key in left)
    assert any(key in detail for key in left)
    assert ("denies" in detail, f"{len(left) - 1} other" in detail) == (True, len(left) > 1), (detail, left)


def test_probe_sees_a_page_that_is_no_listing(small: SmallRoot) -> None:
    """A login page with status 200 is no object store."""
    page = Answer(200, b"<html><body>log in</body></html>", {"Content-Type": "text/html"})
    small.server.script("*", "*", repeat(page))
    ran = small.run("probe", "-json")
    assert (ran.code, probed(ran)["reachable"]) == (1, "FAIL")
    assert "no complete listing" in ran.json[0]["detail"]


@pytest.mark.parametrize(("minutes", "verdict"), [(0, "ok"), (-5, "warn"), (10, "warn"), (20, "FAIL")])
def test_b41_probe_tells_the_clocks_difference(small: SmallRoot, minutes: int, verdict: str) -> None:
    """By the store's Date header."""

    def dated(request: Request, behave: Behaviour) -> Answer:
        date = format_datetime(datetime.now(UTC) + timedelta(minutes=minutes), usegmt=True)
        answer = behave(request)
        return replace(answer, headers={**answer.headers, "Date": date})

    small.server.script("*", "*", repeat(dated))
    ran = small.unchanged_by("probe", "-json")
    assert (probed(ran)["clock"], ran.code) == (verdict, int(verdict == "FAIL")), ran


def test_b41_a_clock_that_is_off_is_said_to_be_off(small: SmallRoot) -> None:
    """By how many minutes and in which direction; not `bad credentials`."""
    small.server.s3.secrets = dict([small.server.keys])
    small.server.s3.clock = timedelta(minutes=-42)
    small.run("resolve").failed("clock is 42 minutes ahead of the store's")
    assert len(small.server.requests) == 1
