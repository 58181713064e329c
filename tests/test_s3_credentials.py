"""Credentials over the life of whole commands: what is shown when they fail, and what becomes of them as time passes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

import pytest

from commands import Ran, Watch, eventually
from every_source import JWT, SOURCES, KeyedServer, OpenSource, open_source
from s3_roots import SmallRoot
from services.exchanges import Answer, Fate, error
from services.places import REGION
from services.scripted import PASS
from services.vault import SmallVault, answer, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.certificates import Authority
    from services.exchanges import Behaviour, Request, Step
    from services.scripted import Scripted

DEBUG = {"PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1"}


@pytest.fixture
def store() -> Iterator[KeyedServer]:
    with KeyedServer() as server:
        yield server


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, store: KeyedServer, tmp_path: Path, authority: Authority) -> Iterator[OpenSource]:
    """Every source in turn."""
    with open_source(request.param, store.s3, tmp_path, authority) as opened:
        yield opened


def root_of(store: KeyedServer, source: OpenSource) -> SmallRoot:
    """A root on this store, for whoever has the credentials of this source."""
    root = SmallRoot(store, flags=["-creds", source.creds, "-endpoint", store.endpoint, "-region", REGION])
    root.environ = source.environ
    return root


# What is shown


def words_of(request: Request) -> str:
    """All that a request brought."""
    return " ".join([*map(str, request.headers.values()), unquote_plus(request.body.decode())])


def echo_of_store(code: str) -> Callable[[Request, Behaviour], Answer]:
    """An error that repeats the request, as S3 does with what it signed, and more than S3 does."""

    def step(request: Request, _: Behaviour) -> Answer:
        said = words_of(request)
        more = {"AWSAccessKeyId": said, "StringToSign": said, "CanonicalRequest": said, "Token-0": said, "RequestId": said}
        body = error(403, code, None, **more).body.replace(f"<Message>{code}".encode(), f"<Message>{said}".encode())
        return Answer(403, body, {"Content-Type": "application/xml", "x-amz-request-id": said.replace("\n", " ")})

    return step


def echo_of_source(request: Request, _: Behaviour) -> Answer:
    """An error of Vault, STS, or a metadata service that repeats the request."""
    said = words_of(request).replace('"', "'")
    if request.headers.get("Content-Type", "").startswith("application/x-www-form"):
        body = f"<ErrorResponse><Error><Code>AccessDenied</Code><Message>{said}</Message></Error></ErrorResponse>"
    else:
        body = f'{{"errors": ["{said}"], "code": "AccessDenied", "message": "{said}"}}'
    return Answer(403, body.encode(), {"X-Said": said})


def shows_nothing(ran: Ran, source: OpenSource) -> None:
    """No byte of any secret in what a command wrote, nor anything that a library or Python's debugging complained of."""
    shown = f"{ran.out!r} {ran.err}"
    for secret in (*source.secrets, "AWS4-HMAC-SHA256"):
        assert secret not in shown, ran
    for complaint in ("Warning", "Traceback", "never retrieved", "Unclosed", "was destroyed"):
        assert complaint not in shown, ran


def without_timings(ran: Ran) -> Ran:
    """Less what asyncio's debugging says of how long a step took."""
    return Ran(ran.code, ran.out, re.sub("^.*: Executing <.*\n", "", ran.err, flags=re.M).encode())


def test_r20_a_command_that_succeeds_shows_no_secret(store: KeyedServer, source: OpenSource) -> None:
    """Not even with Python's and asyncio's debugging on, which find nothing to complain of, either."""
    root = root_of(store, source)
    env = root.env(**DEBUG)
    save = root.hf(10)
    shows_nothing(root.run("watch", "-framework", "hf", "-once", env=env).succeeded(), source)
    shows_nothing(root.run("resolve", env=env).succeeded(f"{root.path}/{save}\n".encode()), source)
    shows_nothing(root.run("probe", env=env).succeeded(), source)


def test_r20_a_store_that_repeats_the_request_is_not_repeated(store: KeyedServer, source: OpenSource) -> None:
    """Who denies access may say what it was sent: the line says that access is denied."""
    store.script("*", "*", itertools.repeat(echo_of_store("AccessDenied")))
    root = root_of(store, source)
    ran = root.run("resolve", env=root.env(**DEBUG))
    without_timings(ran).failed("cannot list: ", "the store denies access")
    shows_nothing(ran, source)


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "env-secret-S3CRET"])
def test_r20_whatever_code_comes_with_it(store: KeyedServer, tmp_path: Path, authority: Authority, code: str) -> None:
    """Also where other credentials are looked for, and where the code itself is a secret."""
    store.script("*", "*", itertools.repeat(echo_of_store(code)))
    with open_source("env", store.s3, tmp_path, authority) as source:
        root = root_of(store, source)
        ran = root.run("resolve", env=root.env(**DEBUG))
        without_timings(ran).failed("cannot list: ")
        shows_nothing(ran, source)


@pytest.mark.parametrize("source", ["web-identity", "instance", "container", "vault"], indirect=True)
def test_r20_a_source_that_repeats_the_request_is_not_repeated(store: KeyedServer, source: OpenSource) -> None:
    """At its first request, and at its last before the keys come, if there are several."""
    root = root_of(store, source)
    root.run("resolve").succeeded()
    asked = [request for request in server_of(source).requests if "revoke" not in request.path]
    for position in {0, len(asked) - 1}:
        server_of(source).queue.clear()
        server_of(source).queue += [*[PASS] * position, *[echo_of_source] * 9]
        ran = root.run("resolve", env=root.env(**DEBUG))
        without_timings(ran).failed("no credentials: ")
        shows_nothing(ran, source)


def run_with_a_bug(root: SmallRoot, bug: str) -> Ran:
    """Resolve by the program itself, after this code has broken it."""
    code = f"{bug}\nimport sys\nfrom publishd.__main__ import main\nsys.argv = ['publishd', *sys.argv[1:]]\nmain()"
    arguments = [sys.executable, "-c", code, "resolve", "-checkpoint", root.path, *root.flags]
    ended = subprocess.run(arguments, env=root.env(**DEBUG), capture_output=True, timeout=60, check=False)
    return Ran(ended.returncode, ended.stdout, ended.stderr)


BUGS = {
    "in the command": "import publishd.publications as m; m.read = None",
    "at a failure": "import publishd.stores.s3_client as m; m.failure = None",
    "at a request": "import publishd.stores.s3_client as m; m.Client._attempt = lambda *a: 1 / 0",
    "when signing": "import publishd.stores.s3_client as m; m.ReadOnlyCredentials = None",
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
@pytest.mark.parametrize("source", ["env", "vault"], indirect=True)
def test_r20_the_traceback_of_a_bug_shows_no_secret(store: KeyedServer, source: OpenSource, bug: str) -> None:
    """Also where it comes up while a failure is dealt with whose own text repeats the request."""
    store.script("*", "*", itertools.repeat(echo_of_store("AccessDenied")))
    ran = run_with_a_bug(root_of(store, source), bug)
    assert (ran.code, ran.out) == (1, b""), ran
    assert "Traceback" in ran.err or "cannot list: " in ran.err, (
        ran
    )  # a request's last line takes what it does not know for trouble
    for secret in (*source.secrets, "AWS4-HMAC-SHA256"):
        assert secret not in ran.err, ran


def test_r20_no_process_has_a_secret_on_its_command_line(store: KeyedServer, tmp_path: Path, authority: Authority) -> None:
    """Neither the watch nor the child that decodes a marker of 65 MiB."""
    with open_source("vault", store.s3, tmp_path, authority) as source:
        root = root_of(store, source)
        save = root.hf(10)
        root.place.put(f"{save}/trainer_state.json", b'{"global_step": 10, "log": "%s"}' % (b"x" * (65 << 20)))
        seen: dict[int, str] = {}
        with Watch(root) as watch:
            eventually(lambda: seen.update(command_lines(watch.process.pid)) or root.steps, "the publication", 60)
            shows_nothing(watch.stop().succeeded(), source)
        assert len(seen) > 1
        for secret in source.secrets:
            assert all(secret not in line for line in seen.values()), seen


def command_lines(pid: int) -> dict[int, str]:
    """The command lines of a process and of its children at this moment."""
    found = {}
    for each in (pid, *children(pid)):
        try:
            found[each] = Path(f"/proc/{each}/cmdline").read_text("utf-8", "replace")
        except OSError:
            pass  # it has just ended
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:
            pass  # the thread has just ended
    return found


# Each failure is one line


@pytest.mark.parametrize(
    ("kind", "steps", "said"),
    [
        ("web-identity", [Answer(403, b"<html>")], ["STS refuses: 403", "AWS_ROLE_ARN", "clock"]),
        ("web-identity", [Answer(302, headers={"Location": "http://x/S3CRET"})], ["302", "redirect"]),
        ("instance", [Answer(401)], ["token", "401", "is this an EC2 instance, with a role?"]),
        ("instance", [PASS, Answer(404)], ["role", "404", "is this an EC2 instance, with a role?"]),
        ("instance", [PASS, PASS, Answer(200, b'{"Code": "Failed"}')], ["it says: Failed"]),
        ("container", [Answer(401)], ["401", "AWS_CONTAINER_CREDENTIALS_FULL_URI"]),
        ("container", [Answer(200, b"<html>")], ["it is not JSON"]),
        ("vault", [refusal(403, "permission denied")], ["vault login (kubernetes)", "403", "role=", "auth_mount=", "namespace="]),
        ("vault", [refusal(400, f"bad {JWT}")], ["vault login (kubernetes): 400", "role="]),
        (
            "vault",
            [Answer(307, headers={"Location": "http://x/?S3CRET"})],
            ["307", "redirect to http://x", "with a token in hand"],
        ),
        ("vault", [PASS, *[refusal(403)] * 9], ["vault read aws/creds/trainer: 403", "the policy"]),
        ("vault", [PASS, PASS, refusal(404)], ["vault read aws/creds/trainer: 404: no such path", "mount"]),
        ("vault", [PASS, PASS, answer(data={"secret_key": "S3CRET"})], ["it has no access_key"]),
        ("vault", [PASS, PASS, Answer(200, b"<html>S3CRET")], ["what answers is not Vault"]),
    ],
)
def test_a_source_that_fails_is_named_with_what_to_check(
    store: KeyedServer, tmp_path: Path, authority: Authority, kind: str, steps: list[Any], said: list[str]
) -> None:
    """Exit 1, nothing on stdout, one line; the store is never asked."""
    with open_source(kind, store.s3, tmp_path, authority) as source:
        server_of(source).queue += steps
        root = root_of(store, source)
        ran = root.run("resolve").failed(f"publishd resolve: no credentials: {source.creds.partition('?')[0]}: ", *said)
        shows_nothing(ran, source)
        assert "S3CRET" not in ran.err
    assert store.requests == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"AWS_SECRET_ACCESS_KEY": "wrong-S3CRET"},
            ["the store finds the signature wrong", "is the secret key the access key's?"],
        ),
        ({"AWS_ACCESS_KEY_ID": "AKIDUNKNOWN"}, ["the store does not know the access key", "see -creds"]),
        ({"AWS_SESSION_TOKEN": "wrong-S3CRET"}, ["the session token has expired or is not valid", "see -creds"]),
    ],
)
def test_keys_that_the_store_rejects_are_said_to_be_so(
    store: KeyedServer, tmp_path: Path, authority: Authority, change: dict[str, str], said: list[str]
) -> None:
    """Exit 1, one line, and two requests at most: asking again with the same keys would not help."""
    with open_source("env", store.s3, tmp_path, authority) as source:
        root = root_of(store, source)
        root.environ = {**source.environ, **change}
        shows_nothing(root.run("resolve").failed("cannot list: ", "env: ", *said), source)
    assert len(store.requests) <= 2


@pytest.mark.parametrize(
    ("kind", "remove", "said"),
    [
        ("env", "AWS_SECRET_ACCESS_KEY", "missing variable: AWS_SECRET_ACCESS_KEY"),
        ("web-identity", "AWS_ROLE_ARN", "missing variable: AWS_ROLE_ARN"),
        ("web-identity", "AWS_WEB_IDENTITY_TOKEN_FILE", "missing variable: AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("container", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "missing variable: AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    ],
)
def test_what_is_missing_is_known_at_once(
    store: KeyedServer, tmp_path: Path, authority: Authority, kind: str, remove: str, said: str
) -> None:
    """Exit 2, and nobody was asked for anything."""
    with open_source(kind, store.s3, tmp_path, authority) as source:
        root = root_of(store, source)
        root.run("resolve", env=root.env(**{remove: None})).failed(said, code=2)
        assert store.requests == []
        assert not source.server or source.server.requests == []


SEALED = refusal(503, "Vault is sealed")


BUSY: list[tuple[str, Step, list[str]]] = [
    ("vault", SEALED, ["vault login (kubernetes): 503: Vault is sealed", "is it sealed? see vault status"]),
    ("vault", refusal(429), ["vault login (kubernetes): 429: too many requests"]),
    ("vault", Answer(473), ["vault login (kubernetes): 473: a standby"]),
    ("vault", Fate.DROP, ["vault login (kubernetes): ", "check host and port"]),
    ("web-identity", Answer(500), ["STS", "500", "AWS_ENDPOINT_URL_STS"]),
    ("container", Answer(503), ["503", "AWS_CONTAINER_CREDENTIALS_FULL_URI"]),
]
SILENT: list[tuple[str, Step, list[str]]] = [
    ("vault", Fate.SILENCE, ["vault login (kubernetes): no answer within 10 s", "check host", "proxy="]),
    ("web-identity", Fate.SILENCE, ["STS", "no answer within 10 s", "AWS_ENDPOINT_URL_STS"]),
    ("instance", Fate.SILENCE, ["token: ", "no answer within 2 s", "its metadata hop limit"]),
]


@pytest.mark.parametrize("cases", [BUSY, SILENT], ids=["busy", "silent"])
def test_a_source_that_may_come_back_is_waited_for_a_while(
    cases: list[tuple[str, Step, list[str]]], tmp_path: Path, authority: Authority
) -> None:
    """Some 15 s, with few requests; then the one line says what it answered last, or that it did not, and what to check."""
    with ExitStack() as stack:
        store = stack.enter_context(KeyedServer())
        sources = []
        for number, (kind, step, _) in enumerate(cases):
            (tmp_path / str(number)).mkdir()
            sources.append(stack.enter_context(open_source(kind, store.s3, tmp_path / str(number), authority)))
            server_of(sources[-1]).script("*", "*", itertools.repeat(step))
        began = time.monotonic()
        with ThreadPoolExecutor() as threads:
            ended = list(threads.map(lambda source: root_of(store, source).run("resolve"), sources))
        assert time.monotonic() - began < 40
        for ran, source, (_, _, said) in zip(ended, sources, cases, strict=True):
            ran.failed(f"no credentials: {source.creds.partition('?')[0]}: ", *said)
            assert 1 < len(server_of(source).requests) < 10
        assert store.requests == []


def server_of(source: OpenSource) -> Scripted:
    """Whom the source asks."""
    assert source.server
    return source.server


# As time passes


@pytest.mark.parametrize("kind", ["vault", "web-identity"])
def test_a_watch_outlives_its_credentials_many_times_over(kind: str, tmp_path: Path, authority: Authority) -> None:
    """Sets of 3 s, and a Vault token of 3 s: one login per lifetime, and no request that the store refuses."""
    lifetime, seconds = 3, 16
    with ExitStack() as stack:
        store = stack.enter_context(KeyedServer(lifetime=lifetime + 1))
        source = stack.enter_context(open_source(kind, store.s3, tmp_path, authority, lifetime=lifetime))
        root, began = root_of(store, source), time.monotonic()
        with Watch(root) as watch:
            while time.monotonic() < began + seconds:
                watch.scanned()
                time.sleep(0.3)
            shows_nothing(watch.stop().succeeded(), source)
        lifetimes = (time.monotonic() - began) / (0.9 * lifetime) + 1
        logins = server_of(source).seen("POST", "auth/*/login") if kind == "vault" else server_of(source).requests
        assert seconds / lifetime - 1 < len(logins) <= lifetimes
        assert len(store.s3.known) - 1 <= lifetimes
    assert store.s3.refusals == 0


def test_rotated_keys_cost_one_fresh_read_each(store: KeyedServer, tmp_path: Path, authority: Authority) -> None:
    """A secret is rewritten and its old keys no longer count: the watch reads it once more, and publishing goes on."""
    store.s3.lifetime = 3600
    with open_source("vault", store.s3, tmp_path, authority) as source:
        vault = SmallVault()
        vault.mounts["kv"] = {"path": "kv/", "type": "kv", "options": {"version": "2"}}
        server_of(source).behaviour = vault
        source.creds = source.creds.replace("/aws/creds/trainer", "/kv/team/s3")
        rotate(vault, store, 0)
        with Watch(root_of(store, source)) as watch:
            watch.scanned()
            for number in (1, 2, 3):
                rotate(vault, store, number)
                watch.scanned()
                assert len(server_of(source).seen("GET", "kv/data/team/s3")) == number + 1
            watch.scanned()
            shows_nothing(watch.stop().succeeded(), source)
        assert vault.logins == 1
        assert len(server_of(source).seen("GET", "kv/data/team/s3")) == 4


def rotate(vault: SmallVault, store: KeyedServer, number: int) -> None:
    """Other keys in the secret, and the ones before no longer known to the store."""
    keys = {"access_key": f"AKIDROTATED{number}", "secret_key": f"minted-secret-key-{number}"}
    store.s3.add(*keys.values())
    vault.secrets["kv/data/team/s3"] = {"data": {"data": keys, "metadata": {"version": number + 1}}}
    if number:
        store.s3.forget(f"AKIDROTATED{number - 1}")


@pytest.mark.parametrize("kind", ["web-identity", "container", "vault"])
def test_expired_token_at_the_final_scan_is_survived(store: KeyedServer, tmp_path: Path, authority: Authority, kind: str) -> None:
    """The only scan that sees the save begins with keys that have expired before their time: they are fetched anew."""
    with open_source(kind, store.s3, tmp_path, authority) as source:
        root = root_of(store, source)
        root.hf(1)
        with Watch(root, "hf", "-drain", "8s", interval="1h") as watch:
            watch.says("published: ")
            root.hf(2)
            store.s3.expire()
            shows_nothing(watch.stop().succeeded(), source)
        assert root.steps == [1, 2]


DOWN: dict[str, Step] = {"sealed": SEALED, "silent": Fate.SILENCE, "hanging up": Fate.DROP}


@pytest.mark.parametrize("how", DOWN)
def test_a_source_that_is_down_at_the_final_scan_costs_a_bounded_wait(
    store: KeyedServer, tmp_path: Path, authority: Authority, how: str
) -> None:
    """Exit 1 within about the drain; the save that was seen is named."""
    with open_source("vault", store.s3, tmp_path, authority) as source:
        ran, seconds = last_scan_without(store, source, DOWN[how])
    assert "not published: s3://bucket/team/p/exec/1.4101.0/checkpoint-2: " in ran.err, ran
    assert seconds < 4 + 6
    shows_nothing(ran, source)


def test_a_source_that_is_down_at_the_final_scan_is_said_to_be_so(
    store: KeyedServer, tmp_path: Path, authority: Authority
) -> None:
    """That time ran out is not the whole truth, and a longer -drain is not the remedy."""
    with open_source("vault", store.s3, tmp_path, authority) as source:
        ran, _ = last_scan_without(store, source, SEALED)
    assert f"{source.creds.partition('?')[0]}: vault read: 503: Vault is sealed" in ran.err, ran


def last_scan_without(store: KeyedServer, source: OpenSource, step: Step) -> tuple[Ran, float]:
    """A watch that ends while its credentials have run out and this is all that the source answers; for how long it ended."""
    root = root_of(store, source)
    root.hf(1)
    with Watch(root, "hf", "-drain", "4s", interval="1h") as watch:
        watch.says("published: ")
        root.hf(2)
        server_of(source).script("*", "*", itertools.repeat(step))
        store.script("GET", "*/checkpoint-2/trainer_state.json", [expiring(store)])
        began = time.monotonic()
        ran = watch.stop()
        ended = time.monotonic()
    assert (ran.code, ran.out, root.steps) == (1, b"", [1]), ran
    return ran, ended - began


def expiring(store: KeyedServer) -> Callable[[Request, Behaviour], Answer]:
    """From this request on no set lives that was given out before."""

    def step(request: Request, behave: Behaviour) -> Answer:
        store.s3.expire()
        return behave(request)

    return step


def test_a_source_that_is_down_for_a_while_costs_no_save_and_no_storm(tmp_path: Path, authority: Authority) -> None:
    """Its sets run out in the meantime; once it is back, what was made is published, and that it works is said."""
    lifetime, outage = 3, 22.0
    with ExitStack() as stack:
        store = stack.enter_context(KeyedServer(lifetime=lifetime + 1))
        source = stack.enter_context(open_source("vault", store.s3, tmp_path, authority, lifetime=lifetime))
        root = root_of(store, source)
        with Watch(root) as watch:
            watch.scanned()
            end, behave = time.monotonic() + outage, server_of(source).behaviour
            server_of(source).behaviour = lambda request: SEALED if time.monotonic() < end else behave(request)
            before = len(server_of(source).requests)
            watch.says("credentials could not be renewed, the old ones are still used")
            watch.says("(trying again at every scan)", seconds=60)
            root.hf(900)
            eventually(lambda: 900 in root.steps, "the save that was made meanwhile", 60)
            during = [request for request in server_of(source).requests[before:] if request.time < end]
            watch.says("credentials are renewed again").says("can be seen again")
            ran = watch.stop().succeeded()
        shows_nothing(ran, source)
        assert ran.err.count("503: Vault is sealed") == 2
        assert len(during) < 20
    assert store.s3.refusals == 0
