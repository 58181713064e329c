"""Credentials from Vault: against a real OpenBao, and against a scripted one for what goes wrong."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from publishd.credentials import Credentials, LiveCredentials, NotNow, open_source, parse_source
from publishd.credentials.base import renewal
from publishd.credentials.vault import VaultSource
from publishd.credentials.vault_secrets import Place, places
from publishd.errors import NoCredentials
from services.exchanges import Answer, Fate
from services.scripted import PASS, Scripted
from services.sources import Clock, fetched, refused, settled
from services.vault import NAMESPACE, ROLE, SmallVault, answer, keys, refusal

if TYPE_CHECKING:
    from pathlib import Path

    from services.certificates import Authority
    from services.proxies import ForwardProxy
    from services.vault import Logins, OpenBao

FIELDS = {"access_key": "AKIAFROMVAULT01", "secret_key": "secret/of+vault="}


@pytest.fixture
def token(bao: OpenBao, logins: Logins) -> dict[str, str]:
    """An environment with a token that may read every secret."""
    return {"VAULT_TOKEN": bao.token()}


@pytest.fixture
def secret(bao: OpenBao) -> str:
    """A secret in a fresh KV v1, as `vault kv get` names it."""
    mount = bao.mount(1)
    bao.call("POST", f"{mount}/s3", FIELDS)
    return f"{mount}/s3"


@pytest.fixture
def approle(logins: Logins, tmp_path: Path) -> str:
    """The query of a `-creds` that logs in by approle."""
    (tmp_path / "secret-id").write_text(f"{logins.secret_id}\n")
    return f"auth=approle&role_id={logins.role_id}&secret_id_file={tmp_path}/secret-id"


def small(server: Scripted, tmp_path: Path, path: str = "aws/creds/trainer", more: str = "") -> str:
    """A `-creds` for a scripted Vault."""
    (tmp_path / "jwt").write_text("eyJ.the-jwt.of-this-pod")
    return f"vault:{server.endpoint}/{path}?auth=kubernetes&role={ROLE}&jwt_file={tmp_path}/jwt{more}"


# Engines


@pytest.mark.parametrize(
    ("version", "inside", "at", "asked"),
    [
        (1, "", "s3", "s3"),
        (1, "", "data/s3", "data/s3"),
        (2, "", "data/s3", "s3"),
        (2, "", "data/s3", "data/s3"),
        (2, "", "data/data/x", "data/x"),
        (2, "/test", "data/s3", "s3"),
        (1, "/test", "deep/s3", "deep/s3"),
        (2, "", "data/a b%+é", "a%20b%25+%C3%A9"),
    ],
)
async def test_b61_a_secret_is_found_as_a_person_writes_it(
    bao: OpenBao, token: dict[str, str], version: int, inside: str, at: str, asked: str
) -> None:
    """KV v1 and v2, with and without data/, in a mount with a slash: each is told apart by asking the mount."""
    mount = bao.mount(version, f"m{time.monotonic_ns()}{inside}" if inside else "")
    bao.call("POST", f"{mount}/{at}", {"data": FIELDS} if version == 2 else FIELDS)
    found = await fetched(bao.spec(f"{mount}/{asked}", "auth=token"), token)
    assert found == Credentials(FIELDS["access_key"], FIELDS["secret_key"], renew_after=300)


async def test_b61_of_two_secrets_the_one_that_vault_kv_get_means_is_read(bao: OpenBao, token: dict[str, str]) -> None:
    """Where both `x` and `data/x` exist, `data/x` is the second."""
    mount = bao.mount(2)
    for name in ("x", "data/x"):
        bao.call("POST", f"{mount}/data/{name}", {"data": {**FIELDS, "region": name.replace("/", "-")}})
    assert (await fetched(bao.spec(f"{mount}/data/x", "auth=token"), token)).region == "data-x"
    assert (await fetched(bao.spec(f"{mount}/x", "auth=token"), token)).region == "x"


async def test_b61_where_the_mount_may_not_be_asked_both_ways_are_tried(bao: OpenBao, token: dict[str, str]) -> None:
    """A policy that allows one path and nothing else suffices; a path that it denies is said to be denied."""
    bao.mount(2, "narrow")
    bao.call("POST", "narrow/data/s3", {"data": FIELDS})
    for path in ("narrow/s3", "narrow/data/s3"):
        assert (await fetched(bao.spec(path, "auth=token"), token)).access_key == FIELDS["access_key"]
    await refused(bao.spec("narrow/other", "auth=token"), token, "vault read narrow/other: 403: ", "policy")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"access_key": "AKIAFROMVAULT01"}, "it has no secret_key"),
        ({"user": "x"}, "it has no access_key"),
        ({**FIELDS, "secret_key": 7}, "secret_key is not text"),
        ({**FIELDS, "secret_key": {"a": "b"}}, "secret_key is not text"),
        ({**FIELDS, "access_key": "AKIA\nFROM"}, "access_key has a blank, a line break"),
        ({**FIELDS, "endpoint": "ftp://s3.example"}, "its endpoint must begin with http:// or https://"),
        ({**FIELDS, "endpoint": "https://u:S3CRET@s3.example"}, "its endpoint must not have a user name"),
        ({**FIELDS, "region": "us east"}, "region has a blank"),
    ],
)
async def test_b61_a_secret_of_the_wrong_shape_is_explained(
    bao: OpenBao, token: dict[str, str], secret: str, content: dict[str, Any], said: str
) -> None:
    """The line names the field, and never what is in it."""
    bao.call("POST", secret, content)
    error = await refused(bao.spec(secret, "auth=token"), token, said)
    assert not [value for value in ("S3CRET", "FROM", "secret/of") if value in str(error)]


async def test_b61_a_deleted_version_and_a_missing_secret_are_told_apart(bao: OpenBao, token: dict[str, str]) -> None:
    """Both are 404 to Vault; a person has to do different things about them."""
    mount = bao.mount(2)
    bao.call("POST", f"{mount}/data/s3", {"data": FIELDS})
    bao.call("DELETE", f"{mount}/data/s3")
    await refused(bao.spec(f"{mount}/s3", "auth=token"), token, "is deleted", "undelete")
    await refused(bao.spec(f"{mount}/s4", "auth=token"), token, "404: no such path", "mount")
    await refused(bao.spec(mount, "auth=token"), token, "is a mount")


@pytest.mark.parametrize(
    "names",
    [
        ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        ("access_key", "secret_key", "session_token"),
        ("access_key", "secret_key", "security_token"),
    ],
)
async def test_fields_may_have_the_names_that_aws_gives_them(
    bao: OpenBao, token: dict[str, str], secret: str, names: tuple[str, ...]
) -> None:
    """The optional ones, endpoint and region, are taken too."""
    values = {**dict(zip(names, ("AKIA", "s", "t"), strict=True)), "endpoint": "HTTPS://S3.example:9000/", "region": "eu-1"}
    bao.call("POST", secret, values)
    found = await fetched(bao.spec(secret, "auth=token"), token)
    assert (*found.keys, found.endpoint, found.region) == ("AKIA", "s", "t", "https://s3.example:9000", "eu-1")


def test_places_without_an_answer_about_the_mount_end_with_the_path_as_written() -> None:
    """Any part of the path may be the mount of a KV v2; the AWS engine and KV v1 are read last, and alike."""
    found = [place.path for place in places("my/test/s3", None)]
    assert found == ["my/data/test/s3", "my/test/data/s3", "my/test/s3"]
    assert places("aws/sts/r", {"path": "aws/", "type": "aws"}) == [Place("aws/sts/r", "aws")]


# Logging in


async def test_every_login_method_gives_the_secret(
    bao: OpenBao, logins: Logins, authority: Authority, secret: str, approle: str, tmp_path: Path
) -> None:
    """Token by variable and by file, kubernetes, jwt, approle, and cert over TLS with a private CA."""
    (tmp_path / "token").write_text(f"{bao.token()}\n")
    (tmp_path / "jwt").write_text(logins.jwt)
    (tmp_path / "kubernetes").write_text(logins.kubernetes_jwt)
    cert, key = logins.certificate
    for auth in (
        "auth=token",
        f"auth=token&token_file={tmp_path}/token",
        f"auth=kubernetes&role={ROLE}&jwt_file={tmp_path}/kubernetes",
        f"auth=jwt&role={ROLE}&jwt_file={tmp_path}/jwt&auth_mount=jwt",
        approle,
        f"auth=cert&cert={cert}&key={key}&role={ROLE}&ca={authority.ca}",
    ):
        spec = bao.spec(secret, auth, tls="cert=" in auth)
        assert (await fetched(spec, {"VAULT_TOKEN": bao.token()})).secret_key == FIELDS["secret_key"]


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ("auth=token", ("403: ", "the token")),
        ("auth=kubernetes&role=other&jwt_file={jwt}", ("vault login (kubernetes): 400: ", "role=")),
        ("auth=kubernetes&role=trainer&jwt_file={jwt}", ("vault login (kubernetes): ", "role=")),
        ("auth=jwt&role=trainer&jwt_file={jwt}", ("vault login (jwt): 400: ", "audience", "clock")),
        ("auth=approle&role_id=other&secret_id_file={jwt}", ("vault login (approle): 400: ", "secret_id_file=")),
        ("auth=approle&role_id=other&secret_id_file={jwt}&auth_mount=none", ("vault login (approle): ", "auth_mount=")),
        ("auth=jwt&role=trainer&jwt_file=/none", ("vault login (jwt): /none: No such file", "jwt_file=")),
        ("auth=jwt&role=trainer&jwt_file=/dev/null", ("/dev/null: it is not a regular file", "jwt_file=")),
        ("auth=cert&cert=/none", ("vault login (cert): ", "cert=")),
    ],
)
async def test_a_failed_login_names_its_method_and_what_to_check(
    bao: OpenBao, logins: Logins, tmp_path: Path, auth: str, said: tuple[str, ...]
) -> None:
    """Neither token nor JWT is in the line, whatever Vault says about them."""
    (tmp_path / "jwt").write_text("eyJhbGciOiJSUzI1NiJ9.S3CRETS3CRET.S3CRET")
    spec = bao.spec("team/s3", auth.format(jwt=tmp_path / "jwt"))
    error = await refused(spec, {"VAULT_TOKEN": "hvs.S3CRET"}, *said)
    assert "S3CRET" not in str(error)


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "é"])
async def test_a_token_file_without_a_token_is_explained(bao: OpenBao, tmp_path: Path, content: str) -> None:
    """It may be half written; it is read again next time."""
    (tmp_path / "token").write_text(content)
    await refused(bao.spec("team/s3", f"auth=token&token_file={tmp_path}/token"), {}, "it holds no token", "token_file=")


async def test_b60_the_namespace_is_sent_with_every_request(bao: OpenBao, logins: Logins, tmp_path: Path) -> None:
    """A real namespace: with it login and read succeed, without it the login is refused."""
    bao.call("POST", "kv/s3", FIELDS, namespace=NAMESPACE)
    (tmp_path / "id").write_text(logins.namespaced_secret_id)
    spec = bao.spec("kv/s3", f"auth=approle&role_id={logins.namespaced_role_id}&secret_id_file={tmp_path}/id")
    assert (await fetched(f"{spec}&namespace={NAMESPACE}")).access_key == FIELDS["access_key"]
    await refused(spec, {}, "vault login (approle): 400: ", "namespace=")


async def test_b60_login_mount_read_renewal_and_revocation_bear_the_namespace(tmp_path: Path) -> None:
    """A Vault that refuses whatever lacks the header sees it on all five."""
    vault, clock = SmallVault(namespace="ml/team", token_lease=100, lease=10), Clock()
    vault.renewable, vault._clock = True, clock
    with Scripted(vault) as server:
        await refused(small(server, tmp_path), {}, "vault login (kubernetes): 400: missing client token", "namespace=")
        source = VaultSource(parse_source(small(server, tmp_path, more="&namespace=ml/team")), clock=clock)
        await source.fetch()
        clock.now += 95
        await source.fetch()
        await source.aclose()
    assert (vault.logins, vault.renewals, vault.tokens) == (1, 1, {})


async def test_a_token_is_revoked_on_closing_only_if_a_login_gave_it(
    bao: OpenBao, token: dict[str, str], secret: str, approle: str
) -> None:
    """A token given to us is somebody else's."""
    source = open_source(parse_source(bao.spec(secret, approle)), {})
    await source.fetch()
    ours = source._idle._token.text  # type: ignore[attr-defined]
    assert bao.alive(ours)
    await source.aclose()
    assert not bao.alive(ours)
    await fetched(bao.spec(secret, "auth=token"), token)
    assert bao.alive(token["VAULT_TOKEN"])


async def test_a_token_that_vault_no_longer_knows_costs_one_login(
    bao: OpenBao, logins: Logins, secret: str, approle: str, tmp_path: Path
) -> None:
    """The secret id is read again for it: what it was at the first login no longer counts."""
    source = open_source(parse_source(bao.spec(secret, approle)), {})
    await source.fetch()
    first = source._idle._token.text  # type: ignore[attr-defined]
    bao.call("POST", "auth/token/revoke", {"token": first})
    fresh = bao.call("POST", f"auth/approle/role/{ROLE}/secret-id", {})["data"]["secret_id"]
    (tmp_path / "secret-id").write_text(fresh)
    assert (await source.fetch()).access_key == FIELDS["access_key"]
    assert source._idle._token.text != first  # type: ignore[attr-defined]
    await source.aclose()


async def test_a_denied_read_costs_at_most_one_more_login(tmp_path: Path) -> None:
    """Once the fresh token is denied, too, it is an error, at once."""
    with Scripted(SmallVault()) as server:
        source = open_source(parse_source(small(server, tmp_path)), {})
        await source.fetch()
        server.script("GET", "aws/creds/*", [refusal(403, "permission denied")] * 9)
        with pytest.raises(NoCredentials, match="vault read aws/creds/trainer: 403: permission denied"):
            await source.fetch()
        assert len(server.seen("POST", "auth/kubernetes/login")) == 2
        await source.aclose()


async def test_a_denied_read_with_a_fresh_token_costs_no_other_login(small_vault: Scripted, tmp_path: Path) -> None:
    """What a login just gave is not made better by another one."""
    small_vault.script("GET", "aws/creds/*", [refusal(403, "permission denied")] * 9)
    await refused(small(small_vault, tmp_path), {}, "403: permission denied")
    assert len(small_vault.seen("POST", "auth/kubernetes/login")) == 1


async def test_a_token_file_is_read_again_when_it_changes(bao: OpenBao, logins: Logins, secret: str, tmp_path: Path) -> None:
    """An agent beside us writes it; a given token that is dead costs no second read."""
    path = tmp_path / "token"
    path.write_text(bao.token())
    source = open_source(parse_source(bao.spec(secret, f"auth=token&token_file={path}")), {})
    await source.fetch()
    bao.call("POST", "auth/token/revoke", {"token": path.read_text()})
    with pytest.raises(NoCredentials, match="403"):
        await source.fetch()
    path.write_text(bao.token())
    await source.fetch()
    await source.aclose()


async def test_a_given_token_is_renewed_while_it_is_used(bao: OpenBao, logins: Logins, secret: str) -> None:
    """A watch may outlive a periodic token many times over; one that can't be renewed is used as it is."""
    for options in ({"period": "1h", "ttl": None}, {"renewable": False}):
        given = bao.token(**options)
        source = open_source(parse_source(bao.spec(secret, "auth=token")), {"VAULT_TOKEN": given})
        for _ in range(3):
            assert (await source.fetch()).access_key == FIELDS["access_key"]
        assert source._idle._token.renewable is ("period" in options)  # type: ignore[attr-defined]
        await source.aclose()


# TLS and proxies


async def test_b67_a_private_ca_is_given_by_ca_and_by_nothing_else(
    bao: OpenBao, token: dict[str, str], authority: Authority, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the line says TLS, why, and ca=; variables that curl and Vault's own client read change nothing."""
    spec = bao.spec(secret, "auth=token", tls=True)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "VAULT_CACERT"):
        monkeypatch.setenv(name, str(authority.ca))
    await refused(spec, token, "TLS: unable to get local issuer certificate", "ca=")
    assert (await fetched(f"{spec}&ca={authority.ca}", token)).access_key == FIELDS["access_key"]


async def test_b67_a_certificate_for_another_name_or_no_tls_at_all_is_explained(authority: Authority, bao: OpenBao) -> None:
    """Nothing is sent to a server that can't prove its name."""
    with Scripted(SmallVault(), authority.certificate("elsewhere.example")) as server:
        spec = f"vault:{server.endpoint}/team/s3?auth=token&ca={authority.ca}"
        await refused(spec, {"VAULT_TOKEN": "hvs.S3CRET"}, "TLS: Hostname mismatch", "localhost")
        assert server.requests == []
    spec = f"vault:{bao.address.replace('http:', 'https:')}/team/s3?auth=token"
    await refused(spec, {"VAULT_TOKEN": "hvs.S3CRET"}, "TLS: ")


async def test_the_proxy_of_the_source_carries_http_and_https(
    bao: OpenBao, token: dict[str, str], authority: Authority, secret: str, forward_proxy: ForwardProxy
) -> None:
    """A dead one is an error, never a reason to connect directly."""
    for tls in (False, True):
        spec = bao.spec(secret, f"auth=token&ca={authority.ca}", tls=tls)
        assert (await fetched(f"{spec}&proxy={forward_proxy.url}", token)).access_key == FIELDS["access_key"]
        await refused(f"{spec}&proxy=http://127.0.0.1:9", token, "the proxy: Connection refused", "proxy=")


async def test_the_user_name_of_a_proxy_is_sent(small_vault: Scripted, tmp_path: Path) -> None:
    """Requests by itself drops a user name without a password."""
    spec = small(small_vault, tmp_path, more=f"&proxy=http://node@{small_vault.endpoint[7:]}")
    await fetched(spec.replace(small_vault.endpoint, "http://vault.example:8200", 1))
    assert all(request.headers["Proxy-Authorization"] == "Basic bm9kZTo=" for request in small_vault.requests)


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("http://vault.example:8200", True),
        ("http://127.0.0.1:8200", False),
        ("http://[::1]:8200", False),
        ("http://localhost", False),
        ("https://vault.example", False),
    ],
)
def test_plain_http_is_warned_of_unless_loopback(caplog: pytest.LogCaptureFixture, address: str, warned: bool) -> None:
    """Once, when the source is opened."""
    open_source(parse_source(f"vault:{address}/team/s3?auth=token"), {"VAULT_TOKEN": "t"})
    assert [("http:// shows" in message) for message in caplog.messages] == [True] * warned


# What goes wrong


@pytest.mark.parametrize("at", ["auth/kubernetes/login", "sys/internal/ui/mounts/*", "aws/creds/*"])
async def test_b62_a_redirect_is_an_error_and_nothing_is_sent_on(small_vault: Scripted, tmp_path: Path, at: str) -> None:
    """Of the Location only scheme and host are said: its query may hold anything."""
    with Scripted(SmallVault()) as other:
        location = {"Location": f"{other.endpoint}/v1/x?token=S3CRET"}
        small_vault.script("*", at, [Answer(307, headers=location)] * 5)
        error = await refused(small(small_vault, tmp_path), {}, "307", f"to {other.endpoint},", "not followed")
        assert "S3CRET" not in str(error)
        assert other.requests == []


async def test_b62_sealed_and_standby_are_waited_out(small_vault: Scripted, tmp_path: Path) -> None:
    """503 twice, then keys; a source that stays sealed says so."""
    small_vault.script("POST", "auth/kubernetes/login", [refusal(503, "Vault is sealed")] * 2)
    clock = Clock()
    live = LiveCredentials(open_source(parse_source(small(small_vault, tmp_path)), {}), clock=clock, sleep=clock.sleep)
    assert (await live.get()).access_key.startswith("AKIAMINTED")
    await live.aclose()
    small_vault.script("POST", "*", [refusal(503, "Vault is sealed")] * 9)
    error = await refused(small(small_vault, tmp_path), {}, "vault login (kubernetes): 503: Vault is sealed", "vault status")
    assert isinstance(error, NotNow)


@pytest.mark.parametrize(
    ("step", "said", "passing"),
    [
        (refusal(429, "request path rate limited"), "429: request path rate limited", True),
        (refusal(500, "internal error"), "500: internal error", True),
        (Answer(502, b"<html>bad gateway"), "502", True),
        (refusal(400, "S3CRET eyJ.the-jwt.of-this-pod is bad"), "400", False),
        (refusal(404), "404: no such path", False),
        (Answer(200, b"<html>log in here"), "not Vault", False),
        (Answer(200, b"[1]"), "not Vault", False),
        (Answer(204), "the answer has no token", False),
        (answer(auth=None), "the answer has no token", False),
        (answer(auth={"client_token": ""}), "the answer has no token", False),
        (answer(auth={"client_token": 7}), "the answer has no token", False),
        (Answer(200, b"x" * (2 << 20)), "far too long", False),
        (Answer(200, b'{"auth": {', cut=4, headers={"Content-Length": "10"}), "the connection broke off", True),
        (Answer(200, b"{}", headers={"Content-Encoding": "gzip"}), "vault login (kubernetes)", True),
        (Fate.DROP, "the connection broke off", True),
        (Answer(403, b"[" * 100_000), "403", False),
        (Answer(400, b'{"errors": "text"}'), "400", False),
        (Answer(400, b'{"errors": [{"a": "line\\nbreak"}]}'), "400", False),
    ],
)
async def test_an_answer_that_makes_no_sense_is_explained(
    small_vault: Scripted, tmp_path: Path, step: Any, said: str, passing: bool
) -> None:
    """One line that names the step; what was sent is not in it even if the server repeats it."""
    small_vault.script("POST", "auth/kubernetes/login", [step])
    error = await refused(small(small_vault, tmp_path), {}, "vault login (kubernetes): ", said)
    assert isinstance(error, NotNow) is passing
    assert "the-jwt" not in str(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (answer(data=None), "it has no fields"),
        (answer(data=[]), "it has no fields"),
        (answer(data={"data": None, "metadata": {"deletion_time": "x"}}), "is deleted"),
        (answer(data={"data": None, "metadata": {}}), "is deleted"),
        (answer(data={"data": 7, "metadata": {"version": 1}}), "it has no fields"),
        (answer(data={"data": {}, "metadata": {"version": 1}}), "it has no access_key"),
    ],
)
async def test_b61_a_secret_without_content_is_explained(
    small_vault: Scripted, tmp_path: Path, content: Answer, said: str
) -> None:
    """A deleted version may also come as 200 with `data` null."""
    small_vault.script("GET", "sys/*", [PASS]).script("GET", "team/*", [Answer(404), content])
    await refused(small(small_vault, tmp_path, "team/s3"), {}, "vault read: ", said)


@pytest.mark.parametrize(
    ("address", "said"),
    [("http://127.0.0.1:9", "Connection refused"), ("http://vault.invalid:8200", "its name is not known")],
)
async def test_a_server_that_is_not_there_is_named(tmp_path: Path, address: str, said: str) -> None:
    """With what to check: a proxy is used only if proxy= names it."""
    spec = f"vault:{address}/team/s3?auth=token"
    error = await refused(spec, {"VAULT_TOKEN": "t"}, f"vault:{address}/team/s3", said, "proxy=")
    assert isinstance(error, NotNow)


async def test_a_silent_vault_is_given_up_on_and_holds_nothing_up(
    small_vault: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds though the thread still waits; whoever is cancelled returns at once; the next try has its own thread."""
    monkeypatch.setattr("publishd.credentials.vault._FETCH_SECONDS", 0.3)
    small_vault.queue.append(Fate.SILENCE)
    source = open_source(parse_source(small(small_vault, tmp_path)), {})
    began = time.monotonic()
    with pytest.raises(NotNow, match=r"vault login \(kubernetes\): no answer"):
        await source.fetch()
    monkeypatch.setattr("publishd.credentials.vault._FETCH_SECONDS", 60)
    small_vault.queue.append(Fate.SILENCE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(source.fetch(), 0.3)
    await source.aclose()
    assert time.monotonic() - began < 5
    assert (await source.fetch()).minted
    await source.aclose()


async def test_an_answer_that_trickles_is_cut_short(
    small_vault: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte comes in time, the whole never would."""
    monkeypatch.setattr("publishd.credentials.vault_http.READ_SECONDS", 0.3)
    small_vault.queue.append(Answer(200, b"x" * 1000, pause=0.05))
    await refused(small(small_vault, tmp_path), {}, "vault login (kubernetes): no answer within 0 s")


async def test_a_revocation_that_hangs_costs_two_seconds_at_most(
    small_vault: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing raises nothing for the network's sake."""
    monkeypatch.setattr("publishd.credentials.vault._CLOSE_SECONDS", 0.2)
    source = open_source(parse_source(small(small_vault, tmp_path)), {})
    await source.fetch()
    small_vault.queue.append(Fate.SILENCE)
    await source.aclose()
    assert small_vault.seen("POST", "auth/token/revoke-self")


# Minted keys, and how often


async def test_the_aws_engine_mints_keys_that_live_as_long_as_lease_and_token(tmp_path: Path) -> None:
    """`creds` and `sts` alike; what a token made ends with the token; a role without leases tells the lifetime as a field."""
    for path in ("aws/creds/trainer", "aws/sts/trainer"):
        with Scripted(SmallVault(lease=1000, token_lease=4000)) as server:
            found = await fetched(small(server, tmp_path, path))
            assert (found.minted, found.valid_for) == (True, 1000)
            assert found.renew_after == renewal(1000)
            assert found.session_token.startswith("minted-session")
    with Scripted(SmallVault(lease=1000, token_lease=500)) as server:
        assert 450 < (await fetched(small(server, tmp_path))).valid_for <= 500
    with Scripted(SmallVault()) as server:
        server.script("GET", "sys/*", [PASS]).script("GET", "aws/creds/*", [answer(data={**keys(), "ttl": 700})])
        assert (await fetched(small(server, tmp_path))).valid_for == 700


async def test_b57_a_store_that_does_not_know_minted_keys_yet_costs_no_lease(small_vault: Scripted, tmp_path: Path) -> None:
    """Asking again gives the same keys; only `renew` asks for others, once, and then waits."""
    clock = Clock()
    live = LiveCredentials(open_source(parse_source(small(small_vault, tmp_path)), {}), clock=clock, sleep=clock.sleep)
    first = await live.get()
    for _ in range(8):
        clock.now += 1
        assert await live.get() is first
    assert small_vault.behaviour.minted == 1  # type: ignore[attr-defined]
    second = await live.renew(first)
    for _ in range(3):
        with pytest.raises(NoCredentials, match="rejects fresh ones"):
            await live.renew(second)
    assert small_vault.behaviour.minted == 2  # type: ignore[attr-defined]
    await live.aclose()


@pytest.mark.parametrize("renewable", [False, True])
async def test_an_hour_with_keys_of_five_seconds_is_one_login_per_lifetime(tmp_path: Path, renewable: bool) -> None:
    """Time compressed: asked twenty times a second, it logs in no more often than the share of a lifetime allows."""
    clock = Clock()
    vault = SmallVault(token_lease=50, lease=5, clock=clock)
    vault.renewable = renewable
    with Scripted(vault) as server:
        live = LiveCredentials(VaultSource(parse_source(small(server, tmp_path)), clock=clock), clock=clock, sleep=clock.sleep)
        seconds = 600
        while clock.now < seconds:
            found = await live.get()
            assert found.minted
            await settled(live)
            clock.now += 0.25
        await live.aclose()
    assert vault.minted <= seconds / renewal(5) + 1
    assert vault.logins == 1 if renewable else seconds / 50 <= vault.logins <= seconds / renewal(50) + 1


def test_hvac_is_only_used_where_it_reads_no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Vault's own variables, and a token left in the home folder, are nothing to publishd."""
    from publishd.credentials.vault_http import VaultHttp

    (tmp_path / ".vault-token").write_text("hvs.left-behind")
    for name, value in {"HOME": str(tmp_path), "VAULT_TOKEN": "hvs.x", "VAULT_ADDR": "http://h", "VAULT_NAMESPACE": "n"}.items():
        monkeypatch.setenv(name, value)
    adapter = VaultHttp("vault", "https://vault.example", {})._adapter
    assert (adapter.token, adapter.namespace, adapter.base_uri) == (None, None, "https://vault.example")
