"""The -creds grammar, the sources on this node and of AWS, and how a set of credentials is kept valid."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import traceback
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from publishd.credentials import Credentials, LiveCredentials, NotNow, Source, open_source, parse_source
from publishd.credentials.base import renewal
from publishd.credentials.urls import parse_endpoint, parse_proxy
from publishd.errors import NoCredentials, UsageError
from services.aws import SmallContainer, SmallMetadata, SmallSts, role_credentials, sts_error
from services.exchanges import Answer, Fate
from services.scripted import PASS, Scripted
from services.sources import Clock, fetched, refused, settled
from services.vault import SmallVault

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from services.certificates import Authority, Certificate
    from services.exchanges import Behaviour, Request, Step
    from services.proxies import ForwardProxy, Listener

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAENVIRONMENT1", "AWS_SECRET_ACCESS_KEY": "S3CRET/of+env="}

# The grammar


@pytest.mark.parametrize(
    ("text", "which"),
    [
        ("env", "env"),
        ("web-identity", "web-identity"),
        ("instance", "instance"),
        ("container", "container"),
        ("file:/etc/keys", "file:/etc/keys"),
        ("file:keys?profile=team%20a", "file:keys"),
        ("vault:https://v.example:8200/team/s3?auth=token", "vault:https://v.example:8200/team/s3"),
        ("vault:HTTP://V.example/my/test/s3/?auth=token&token_file=/t", "vault:http://v.example/my/test/s3"),
        ("vault:https://[::1]:8200/s3?auth=kubernetes&role=r", "vault:https://[::1]:8200/s3"),
        ("vault:https://v/a/b?auth=jwt&jwt_file=/j&auth_mount=auth/gitlab/", "vault:https://v/a/b"),
        ("vault:https://v/a/b?auth=approle&role_id=r&secret_id_file=/s&namespace=ml/team", "vault:https://v/a/b"),
        ("vault:https://v/a/b?auth=cert&cert=/c&key=/k&role=r&ca=/ca&proxy=http://u@p:3128", "vault:https://v/a/b"),
    ],
)
def test_a_source_is_called_without_its_query(text: str, which: str) -> None:
    """What messages call it has neither roles nor paths of secrets in it."""
    assert parse_source(text).which == which


def test_values_are_percent_decoded_and_a_plus_is_a_plus() -> None:
    """A path may have any character; `+` is none of a form's blanks."""
    spec = parse_source("vault:https://v/a/b?auth=token&token_file=/x+y%20%26%3d%C3%A9")
    assert spec.options["token_file"] == "/x+y &=é"
    assert parse_source("vault:https://v/a/b?auth=jwt&jwt_file=/j&auth_mount=auth/my/jwt/").options["auth_mount"] == "my/jwt"


BASE = "vault:https://v.example/team/s3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be env, file:PATH"),
        ("ENV", "must be env"),
        ("env:", "must be env"),
        ("vault", "must be env"),
        ("file:", "path"),
        ("file:/x?", "profile=NAME"),
        ("file:/x?profile=", "profile=NAME"),
        ("file:/x?profile=a&profile=b", "profile=NAME"),
        ("file:/x?other=a", "profile=NAME"),
        ("file:/x\n", "control characters"),
        ("vault:v.example/team/s3?auth=token", "http:// or https://"),
        ("vault:ftp://v.example/team/s3?auth=token", "http:// or https://"),
        ("vault:https:///team/s3?auth=token", "valid host"),
        ("vault:https://v:x/team/s3?auth=token", "valid host and port"),
        ("vault:https://v:99999/team/s3?auth=token", "valid host and port"),
        ("vault:https://v:0/team/s3?auth=token", "valid host and port"),
        ("vault:https://v:/team/s3?auth=token", "valid host and port"),
        ("vault:https://[::1/team/s3?auth=token", "valid host and port"),
        ("vault:https://v?auth=token", "must have the secret's path"),
        ("vault:https://v/?auth=token", "must have the secret's path"),
        ("vault:https://v/a//b?auth=token", "must have the secret's path"),
        ("vault:https://v/a/%2e%2e/b?auth=token", "must have the secret's path"),
        ("vault:https://v/v1/team/s3?auth=token", "without v1/"),
        ("vault:https://v/a%zz?auth=token", "percent-encoding"),
        ("vault:https://v/a%ff?auth=token", "UTF-8"),
        ("vault:https://v/a%0a?auth=token", "control characters"),
        ("vault:https://u:S3CRET@v/a?auth=token", "user name"),
        ("vault:https://S3CRET@v/a?auth=token", "user name"),
        ("vault:https://v/a?auth=token#S3CRET", "'#'"),
        (BASE, "auth=token|kubernetes|jwt|approle|cert"),
        (f"{BASE}?", "unknown key"),
        (f"{BASE}?auth=userpass", "must have auth="),
        (f"{BASE}?auth=token&token=S3CRET", "unknown key"),
        (f"{BASE}?auth=token&S3CRET", "unknown key"),
        (f"{BASE}?auth=token&auth=token", "auth= twice"),
        (f"{BASE}?auth=token&", "unknown key"),
        (f"{BASE}?auth=token&Namespace=x", "unknown key"),
        (f"{BASE}?auth=token&namespace=", "empty namespace="),
        (f"{BASE}?auth=token&namespace=a%20b", "namespace= must not"),
        (f"{BASE}?auth=token&role=r", "auth=token has no role="),
        (f"{BASE}?auth=token&auth_mount=r", "auth=token has no auth_mount="),
        (f"{BASE}?auth=kubernetes", "auth=kubernetes needs role="),
        (f"{BASE}?auth=kubernetes&role=r&role_id=S3CRET", "auth=kubernetes has no role_id="),
        (f"{BASE}?auth=jwt&role=r", "auth=jwt needs jwt_file="),
        (f"{BASE}?auth=approle&role_id=r", "auth=approle needs secret_id_file="),
        (f"{BASE}?auth=approle", "needs role_id= and secret_id_file="),
        (f"{BASE}?auth=cert&key=/k", "auth=cert needs cert="),
        (f"{BASE}?auth=kubernetes&role=r&auth_mount=../sys", "auth_mount="),
        (f"{BASE}?auth=kubernetes&role=r&auth_mount=/", "auth_mount="),
        (f"{BASE}?auth=token&proxy=http://u:S3CRET@p:1", "its proxy= must not have a password"),
        (f"{BASE}?auth=token&proxy=http%3A%2F%2Fu%3AS3CRET%40p", "its proxy= must not have a password"),
        (f"{BASE}?auth=token&proxy=p:3128", "its proxy= must begin with http://"),
        (f"{BASE}?auth=token&proxy=socks5://p:3128", "its proxy= must begin with http://"),
        (f"{BASE}?auth=token&ca=/a%00b", "control characters"),
    ],
)
def test_a_bad_source_is_explained_and_not_repeated(text: str, said: str) -> None:
    """The sentence says what is wanted; whatever secret was mistyped there is not in it."""
    with pytest.raises(ValueError) as caught:
        parse_source(text)
    assert type(caught.value) is ValueError
    assert said in str(caught.value)
    assert "S3CRET" not in str(caught.value)


PIECES = [
    "vault:",
    "https://",
    "HTTP://",
    "file:",
    "env",
    "v.example",
    ":8200",
    "/team/s3",
    "?",
    "&",
    "auth=",
    "token",
    "jwt",
    "=",
    "#",
    "@",
    ":",
    "%",
    "%2",
    "%ff",
    "[::1]",
    "[",
    "proxy=",
    "ca=/x",
    "namespace=",
    "\n",
    "�",
    "é",
    "role=",
    "//",
    "..",
    "℀",
]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)))
@example("vault:https://ex℀mple/a?auth=token")
@example("vault:https://[v1.x]/a?auth=token")
def test_any_text_is_a_source_or_a_value_error(text: str) -> None:
    """Nothing else is raised, not even one of its subclasses, which would quote what they could not decode."""
    try:
        spec = parse_source(text)
    except ValueError as error:
        kind = type(error)
    else:
        kind = ValueError
        assert parse_source(text) == spec
        assert not re.search("[\x00-\x1f\x7f-\x9f]", spec.which)
    assert kind is ValueError


@given(st.text("abcXYZ019-_.~!$'()*,;", min_size=8, max_size=20))
def test_no_part_of_a_mistyped_source_is_in_its_error(secret: str) -> None:
    """Wherever the secret stands."""
    for text in (
        secret,
        f"env {secret}",
        f"file:/x?{secret}",
        f"vault:{secret}",
        f"vault:https://v/a?{secret}={secret}",
        f"vault:https://u:{secret}@v/a",
        f"vault:https://v/{secret}",
        f"vault:https://v/a?auth={secret}",
        f"vault:https://v/a?auth=token&role={secret}",
        f"vault:https://v/a?auth=token&proxy=http://u:{secret}@p",
    ):
        with pytest.raises(ValueError) as caught:
            parse_source(text)
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("HTTP://Proxy.example:3128", "http://proxy.example:3128"),
        ("https://proxy.example/", "https://proxy.example"),
        ("http://node@proxy.example:3128", "http://node@proxy.example:3128"),
        ("http://[::1]:3128", "http://[::1]:3128"),
    ],
)
def test_a_proxy_is_a_scheme_a_host_and_a_port(text: str, parsed: str) -> None:
    """In lower case: botocore takes HTTP:// for a host of that name."""
    assert parse_proxy(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "proxy:3128",
        "socks5://p:1",
        "http://",
        "http://u:S3CRET@p:1",
        "http://u:@p",
        "http://p:1/x",
        "http://p?S3CRET",
        "http://p#x",
        "",
        "http://p:0",
        "http://p:",
        "http://p :1",
        "http://p\n",
        "http://p/?",
        "http://é",
        "http://a,b",
        "http://[x]",
    ],
)
def test_any_other_proxy_is_refused_without_being_repeated(text: str) -> None:
    """Above all one with a password."""
    with pytest.raises(ValueError) as caught:
        parse_proxy(text)
    assert "S3CRET" not in str(caught.value)


def test_an_endpoint_may_have_a_path_and_nothing_more() -> None:
    """A trailing slash is no part of it."""
    assert parse_endpoint("HTTPS://S3.Example:9000/Store/") == "https://s3.example:9000/Store"
    for text in ("s3.example", "http://u@s3.example", "http://u:S3CRET@h", "http://h/?x", "http://h/#x", "http://h/ "):
        with pytest.raises(ValueError) as caught:
            parse_endpoint(text)
        assert "S3CRET" not in str(caught.value)


# What can be known at once


@pytest.mark.parametrize(
    ("spec", "environ", "said"),
    [
        ("env", {}, "missing variable: AWS_ACCESS_KEY_ID"),
        ("env", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "x"}, "missing variable: AWS_ACCESS_KEY_ID"),
        ("env", {"AWS_ACCESS_KEY_ID": "x"}, "missing variable: AWS_SECRET_ACCESS_KEY"),
        ("env", {**KEYS, "AWS_SECRET_ACCESS_KEY": "S3CRET\n"}, "bad variable: AWS_SECRET_ACCESS_KEY: it has a blank"),
        ("env", {**KEYS, "AWS_SESSION_TOKEN": "S3CRET é"}, "bad variable: AWS_SESSION_TOKEN"),
        (f"{BASE}?auth=token", {}, "missing variable: VAULT_TOKEN"),
        (f"{BASE}?auth=token", {"VAULT_TOKEN": "S3CRET x"}, "bad variable: VAULT_TOKEN"),
        (f"{BASE}?auth=token&ca=/none", {"VAULT_TOKEN": "x"}, "bad flag: -creds: its ca file cannot be read: No such"),
        (f"{BASE}?auth=token&ca=/etc/passwd", {"VAULT_TOKEN": "x"}, "bad flag: -creds: its ca file has no certificate in PEM"),
        ("web-identity", {}, "missing variable: AWS_ROLE_ARN"),
        ("web-identity", {"AWS_ROLE_ARN": "a"}, "missing variable: AWS_WEB_IDENTITY_TOKEN_FILE"),
        (
            "web-identity",
            {"AWS_ROLE_ARN": "a", "AWS_WEB_IDENTITY_TOKEN_FILE": "f", "AWS_ENDPOINT_URL_STS": "http://u:S3CRET@h"},
            "bad variable: AWS_ENDPOINT_URL_STS: it must not have a user name",
        ),
        (
            "web-identity",
            {"AWS_ROLE_ARN": "a", "AWS_WEB_IDENTITY_TOKEN_FILE": "f", "AWS_REGION": "h/S3CRET"},
            "STS has none of that form",
        ),
        ("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "169.254.169.254"}, "bad variable: AWS_EC2_METADATA_SERVICE_ENDPOINT"),
        ("container", {}, "missing variable: AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        ("container", {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "@h/"}, "bad variable: AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        ("container", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://h.example/"}, "may not be sent the token"),
        ("container", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1@h.example/"}, "it must not have a user name"),
        ("container", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "h"}, "it must begin with http://"),
        (
            "container",
            {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "https://h", "AWS_CONTAINER_AUTHORIZATION_TOKEN": "S3CRET\r\nX: y"},
            "bad variable: AWS_CONTAINER_AUTHORIZATION_TOKEN",
        ),
    ],
)
def test_what_the_environment_lacks_is_a_usage_error(spec: str, environ: dict[str, str], said: str) -> None:
    """Before anything is connected to; no value is repeated."""
    with pytest.raises(UsageError) as caught:
        open_source(parse_source(spec), environ)
    assert said in str(caught.value)
    assert "S3CRET" not in str(caught.value)


def test_only_the_given_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process itself has is not looked at."""
    for name, value in {**KEYS, "VAULT_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    for spec in ("env", f"{BASE}?auth=token"):
        with pytest.raises(UsageError):
            open_source(parse_source(spec), {})


def test_a_ca_that_cannot_be_loaded_is_said_to_be_the_flags() -> None:
    """`-ca` and `ca=` are different things to mend."""
    environ = {"AWS_ROLE_ARN": "a", "AWS_WEB_IDENTITY_TOKEN_FILE": "f"}
    with pytest.raises(UsageError, match="bad flag: -ca: its ca file cannot be read: No such"):
        open_source(parse_source("web-identity"), environ, ca="/none")


def test_credentials_show_four_characters_at_most() -> None:
    """In whatever way they are printed; of a short key, which is none of AWS's, nothing."""
    found = Credentials("AKIAENVIRONMENT1", "S3CRET", "S3CRET")
    for shown in (repr(found), str(found), f"{found}", f"{[found]}"):
        assert "AKIA" in shown
        assert "AKIAE" not in shown
        assert "S3CRET" not in shown
    assert "admin" not in repr(Credentials("admin", "S3CRET"))


# env and file


async def test_env_is_what_publishd_was_started_with() -> None:
    """It never changes, and so there is nothing to renew."""
    assert await fetched("env", KEYS) == Credentials(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
    assert (await fetched("env", {**KEYS, "AWS_SESSION_TOKEN": "t"})).session_token == "t"


FILE = """
[default]
aws_access_key_id = AKIADEFAULT
aws_secret_access_key = S3CRET%of+default=
; a comment
[team a]
AWS_ACCESS_KEY_ID=AKIATEAM
aws_secret_access_key=S3CRET2
aws_session_token=token
region = eu-1
"""


async def test_a_shared_credentials_file_is_read_by_profile(tmp_path: Path) -> None:
    """`~/` is the user's home, as in a shell."""
    (tmp_path / "keys").write_text(FILE)
    for path in (f"{tmp_path}/keys", "~/keys"):
        found = await fetched(f"file:{path}", {"HOME": str(tmp_path), "AWS_PROFILE": "other"})
        assert found.keys == ("AKIADEFAULT", "S3CRET%of+default=", "")
    assert (await fetched(f"file:{tmp_path}/keys?profile=team%20a")).keys == ("AKIATEAM", "S3CRET2", "token")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "it has no profile 'default'"),
        ("[other]\naws_access_key_id=S3CRET", "it has no profile 'default'"),
        ("[default]\naws_access_key_id=S3CRET", "profile 'default': it has no aws_secret_access_key"),
        ("[default]\naws_access_key_id=S3CRET\naws_secret_access_key=", "profile 'default': it has no aws_secret_access_key"),
        ("[default]\naws_secret_access_key=S3CRET", "profile 'default': it has no aws_access_key_id"),
        ("[default]\naws_access_key_id=a\naws_secret_access_key=S3CRET b", "aws_secret_access_key has a blank"),
        ("S3CRET", "it is not an INI file"),
        ("[default]\nS3CRET", "it is not an INI file"),
        ("[default]\n=S3CRET", "it is not an INI file"),
        ("[default", "it is not an INI file"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"x" * (2 << 20), "it is larger than"),
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "Is a directory"),
    ],
)
async def test_a_file_without_the_keys_is_explained(tmp_path: Path, content: Any, said: str) -> None:
    """File and profile are named, the content is not; a FIFO does not hang it."""
    path = tmp_path / "keys"
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = await refused(f"file:{path}", {}, said, "profile=NAME")
    assert not isinstance(error, NotNow)
    assert "S3CRET" not in str(error)


async def test_a_rotated_file_is_noticed_and_a_half_written_one_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The old set is used while there is no other, and the new one within seconds; both are said once."""
    path, clock = tmp_path / "keys", Clock()
    path.write_text(FILE)
    live = LiveCredentials(open_source(parse_source(f"file:{path}"), {}), clock=clock, sleep=clock.sleep)
    old = await live.get()
    path.write_text(FILE[:30])
    for _ in range(20):
        clock.now += 6
        assert (await live.get()).keys == old.keys
        await settled(live)
    path.write_text(FILE.replace("AKIADEFAULT", "AKIAROTATED"))
    clock.now += 60
    await live.get()
    await settled(live)
    assert (await live.get()).access_key == "AKIAROTATED"
    assert [record.levelname for record in caplog.records if record.name.startswith("publishd")] == ["WARNING"]
    await live.aclose()


# STS


@pytest.fixture
def web_identity(tmp_path: Path) -> Callable[[Scripted], dict[str, str]]:
    """The environment of a pod whose STS is this server."""
    (tmp_path / "token").write_text("eyJ.of-this-pod\n")

    def environ(server: Scripted) -> dict[str, str]:
        return {
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/trainer",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
            "AWS_ENDPOINT_URL_STS": server.endpoint,
        }

    return environ


async def test_web_identity_assumes_the_role_with_the_token_as_it_is_now(web_identity: Any, tmp_path: Path) -> None:
    """The token's file is read again at each call; the keys are minted and live as long as STS says."""
    sts = SmallSts("eyJ.of-this-pod")
    with Scripted(sts) as server:
        source = open_source(parse_source("web-identity"), web_identity(server))
        first = await source.fetch()
        assert (first.minted, first.session_token) == (True, "sts-session-1")
        assert 3590 < first.valid_for <= 3600
        (tmp_path / "token").write_text("eyJ.rotated")
        sts.token = "eyJ.rotated"
        assert (await source.fetch()).access_key != first.access_key
        await source.aclose()
        assert b"RoleSessionName=publishd" in server.requests[0].body


@pytest.mark.parametrize(
    ("environ", "region", "endpoint"),
    [
        ({}, "", "https://sts.amazonaws.com"),
        ({"AWS_REGION": "eu-west-1"}, "", "https://sts.eu-west-1.amazonaws.com"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "us-gov-east-1", "https://sts.us-gov-east-1.amazonaws.com"),
        ({}, "cn-north-1", "https://sts.cn-north-1.amazonaws.com.cn"),
        ({"AWS_ENDPOINT_URL_STS": "HTTP://Sts.example/x/"}, "eu-west-1", "http://sts.example/x"),
    ],
)
def test_sts_is_the_regions_own(environ: dict[str, str], region: str, endpoint: str) -> None:
    """A variable that names an endpoint comes first, then -region, then the variables of the SDKs."""
    given = {"AWS_ROLE_ARN": "a", "AWS_WEB_IDENTITY_TOKEN_FILE": "f", **environ}
    assert open_source(parse_source("web-identity"), given, region=region)._endpoint == endpoint  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step", "said", "passing"),
    [
        (sts_error(403, "AccessDenied", "Not authorized"), "STS refuses: 403: AccessDenied Not authorized", False),
        (sts_error(400, "ExpiredTokenException", "Token expired: eyJ.of-this-pod"), "STS refuses: 400", False),
        (sts_error(400, "IDPCommunicationError", "try again"), "IDPCommunicationError", True),
        (sts_error(400, "ThrottlingException", "Rate exceeded"), "Throttling", True),
        (Answer(503, b"busy"), "503", True),
        (Answer(307, headers={"Location": "http://127.0.0.1:9/?S3CRET"}), "307, a redirect, which is not followed", False),
        (Answer(200, b"<html>log in</html>"), "is not STS: it has no Expiration", False),
        (Answer(200, b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>'), "is not STS: it has a document type", False),
        (Answer(200, b"{}"), "is not STS: it is not XML", False),
        (Answer(200, b"x" * (2 << 20)), "far too long", False),
        (Answer(200, b"xx", cut=1), "broke off", True),
        (Fate.DROP, "broke off", True),
    ],
)
async def test_what_sts_answers_wrongly_is_explained(web_identity: Any, step: Any, said: str, passing: bool) -> None:
    """The token is not in the line, even if STS repeats it."""
    with Scripted(SmallSts("eyJ.of-this-pod")) as server:
        server.queue.append(step)
        error = await refused("web-identity", web_identity(server), said)
        assert len(server.requests) == 1
    assert isinstance(error, NotNow) is passing
    assert "of-this-pod" not in str(error)
    assert "S3CRET" not in str(error)


async def test_sts_goes_through_the_stores_proxy_and_trusts_its_ca(
    web_identity: Any,
    authority: Authority,
    loopback_certificate: Certificate,
    forward_proxy: ForwardProxy,
    silent_proxy: Listener,
) -> None:
    """By http and by https; a dead proxy is an error, and one that never answers CONNECT is given up on."""
    ca = str(authority.ca)
    for certificate in (None, loopback_certificate):
        with Scripted(SmallSts("eyJ.of-this-pod"), certificate) as server:
            environ = web_identity(server)
            assert (await fetched("web-identity", environ, proxy=forward_proxy.url, ca=ca)).minted
            await refused(
                "web-identity", environ, "the proxy can't be reached: Connection refused", proxy="http://127.0.0.1:9", ca=ca
            )
            if certificate:
                await refused("web-identity", environ, "TLS: unable to get local issuer certificate", "-ca")
                source = open_source(parse_source("web-identity"), environ, proxy=silent_proxy.url, ca=ca)
                source._seconds = 0.3  # type: ignore[attr-defined]
                with pytest.raises(NotNow, match="no answer within"):
                    await source.fetch()


async def test_a_missing_web_identity_token_names_file_and_variable(web_identity: Any, tmp_path: Path) -> None:
    """So does an empty one."""
    (tmp_path / "token").write_text("")
    with Scripted(SmallSts("x")) as server:
        await refused("web-identity", web_identity(server), f"{tmp_path}/token: it holds no token", "AWS_WEB_IDENTITY_TOKEN_FILE")
        (tmp_path / "token").unlink()
        await refused("web-identity", web_identity(server), "No such file", "AWS_WEB_IDENTITY_TOKEN_FILE")


# Instance and container


@pytest.mark.parametrize("version", [1, 2])
async def test_instance_asks_with_a_token_where_there_are_tokens(version: int) -> None:
    """Version 1 is asked only where version 2 is unknown."""
    with Scripted(SmallMetadata(version)) as server:
        found = await fetched("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint})
        assert found.keys == ("ASIAROLE00000001", "role-secret-1", "role-session-1")
        assert 3590 < found.valid_for <= 3600
        assert server.requests[0].method == "PUT"


async def test_b70_metadata_that_never_answers_the_put_fails_in_seconds() -> None:
    """The line names the source and the hop limit, which is what stops the answer inside a container."""
    with Scripted(SmallMetadata()) as server:
        server.queue.append(Fate.SILENCE)
        environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint}
        async with asyncio.timeout(8):
            error = await refused("instance", environ, "instance: token: ", "no answer within 2 s", "hop limit")
        assert isinstance(error, NotNow)
        assert [request.method for request in server.requests] == ["PUT"]


async def test_metadata_that_is_not_there_is_said_in_the_systems_words() -> None:
    """Nothing listens: that passes, or this is no EC2 instance."""
    environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}
    assert isinstance(await refused("instance", environ, "http://127.0.0.1:9: Connection refused (is this"), NotNow)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([Answer(400)], "token: "),
        ([Answer(200, b"two\nlines")], "is not instance metadata"),
        ([Answer(200, b"<html>log in</html> ")], "is not instance metadata"),
        ([Answer(302, headers={"Location": "http://127.0.0.1:9/"})], "302, a redirect, which is not followed"),
        ([Answer(404), Answer(404)], "role: "),
        ([Answer(404), Answer(200, b"<html>")], "names no role"),
        ([Answer(404), Answer(200, b"../../user-data")], "names no role"),
        ([Answer(404), Answer(200, b"r"), Answer(200, b"[]")], "it is no object"),
        ([Answer(404), Answer(200, b"r"), Answer(200, b"{")], "it is not JSON"),
        ([Answer(404), Answer(200, b"r"), Answer(200, b"{}")], "it has no AccessKeyId"),
        ([Answer(404), Answer(200, b"r"), Answer(200, b'{"Code": "Failed", "Message": "no"}')], "it says: Failed no"),
        (
            [Answer(404), Answer(200, b"r"), Answer(200, b'{"AccessKeyId":"a","SecretAccessKey":"b","Expiration":7}')],
            "not a time",
        ),
    ],
)
async def test_what_metadata_answers_wrongly_is_explained(steps: list[Answer], said: str) -> None:
    """Each is one line with the remedy."""
    with Scripted(SmallMetadata()) as server:
        server.queue += steps
        await refused("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint}, said, "hop limit")


async def test_container_presents_the_token_of_the_variable_or_of_the_file(tmp_path: Path) -> None:
    """The file comes first, as in the SDKs, and is read again each time."""
    behaviour = SmallContainer("of-this-pod")
    (tmp_path / "token").write_text("of-this-pod")
    with Scripted(behaviour) as server:
        environ = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.endpoint}/v1?id=1"}
        assert (await fetched("container", {**environ, "AWS_CONTAINER_AUTHORIZATION_TOKEN": "of-this-pod"})).access_key
        environ |= {"AWS_CONTAINER_AUTHORIZATION_TOKEN": "x", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": f"{tmp_path}/token"}
        source = open_source(parse_source("container"), environ)
        await source.fetch()
        behaviour.token = "rotated"
        with pytest.raises(NoCredentials, match="401: AccessDenied no such token"):
            await source.fetch()
        (tmp_path / "token").write_text("rotated")
        assert (await source.fetch()).session_token == "role-session-3"
        assert server.requests[0].target == "/v1?id=1"


def test_a_relative_container_uri_is_of_the_agents_own_address() -> None:
    """Whatever stands in it stays a path."""
    source = open_source(parse_source("container"), {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/1"})
    assert source._url == "http://169.254.170.2/v2/credentials/1"  # type: ignore[attr-defined]


async def test_lifetimes_are_told_by_the_servers_clock(web_identity: Any) -> None:
    """Ours may be hours off: what counts is the time from the answer's Date to the end that it names."""
    with Scripted(SmallMetadata(lifetime=-7200)) as server:
        date = {"Date": "Mon, 01 Jan 2024 00:00:00 GMT"}
        content = str({**role_credentials(), "Expiration": "2024-01-01T01:00:00Z"}).replace("'", '"').encode()
        server.queue += [Answer(404), Answer(200, b"trainer"), Answer(200, content, date)]
        found = await fetched("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint})
    assert (found.valid_for, found.renew_after) == (3600, renewal(3600))


# Kept valid


class Scripts:
    """A source that does what a list says, then gives sets without end; `times` is when it was asked."""

    which = "scripted"

    def __init__(self, clock: Clock, lifetime: float = inf, steps: list[Any] | None = None, **fields: Any) -> None:
        self._clock, self._lifetime, self._fields = clock, lifetime, fields
        self.steps, self.times, self.closed = steps or [], [], False
        self.times = list[float]()

    async def fetch(self) -> Credentials:
        self.times.append(self._clock.now)
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif isinstance(step, Exception):
            raise step
        elif isinstance(step, Credentials):
            return step
        renew = renewal(self._lifetime) if self._lifetime < inf else 300.0
        return Credentials(f"KEY{len(self.times)}", "S3CRET", renew_after=renew, valid_for=self._lifetime, **self._fields)

    async def aclose(self) -> None:
        self.closed = True


def passing(text: str = "down") -> NotNow:
    return NotNow("no credentials", "scripted", text, "mend it")


def lasting(text: str = "denied") -> NoCredentials:
    return NoCredentials("no credentials", "scripted", text)


def live(source: Source, clock: Clock) -> LiveCredentials:
    return LiveCredentials(source, clock=clock, sleep=clock.sleep)


async def test_a_thousand_askers_share_one_fetch_that_none_can_cancel() -> None:
    """One fetch at a time; who is cancelled leaves it running for the others."""
    clock, gate = Clock(), asyncio.Event()
    source = Scripts(clock, steps=[gate])
    kept = live(source, clock)
    first = asyncio.create_task(kept.get())
    await asyncio.sleep(0)
    others = [asyncio.create_task(kept.get()) for _ in range(1000)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    gate.set()
    assert {found.access_key for found in await asyncio.gather(*others)} == {"KEY1"}
    assert len(source.times) == 1


@pytest.mark.parametrize("lifetime", [5, 60, 3600, 43200])
async def test_at_most_one_fetch_per_lifetime(lifetime: float) -> None:
    """Time compressed: between two fetches at least the share passes, and no set is handed out that has expired."""
    clock = Clock()
    source = Scripts(clock, lifetime)
    kept = live(source, clock)
    while clock.now < 20 * lifetime:
        found = await kept.get()
        assert clock.now < source.times[int(found.access_key[3:]) - 1] + lifetime
        await settled(kept)
        clock.now += lifetime / 50
    assert all(later - earlier >= renewal(lifetime) for earlier, later in pairwise(source.times))
    assert len(source.times) >= 20
    await kept.aclose()


def test_renewal_is_in_the_last_tenth_and_at_most_a_quarter_of_an_hour_early() -> None:
    """Of 5 s, an hour, 12 hours."""
    assert [round(renewal(lifetime), 3) for lifetime in (5, 3600, 43200)] == [4.5, 3240, 42300]


async def test_a_due_renewal_goes_on_behind_whoever_asks() -> None:
    """The old set is answered at once, though the source hangs."""
    clock, gate = Clock(), asyncio.Event()
    source = Scripts(clock, 100)
    kept = live(source, clock)
    await kept.get()
    source.steps = [gate]
    clock.now = 95
    assert [(await kept.get()).access_key for _ in range(50)] == ["KEY1"] * 50
    await asyncio.sleep(0)
    assert len(source.times) == 2
    gate.set()
    await settled(kept)
    assert (await kept.get()).access_key == "KEY2"


async def test_a_failing_renewal_is_said_once_and_tried_with_growing_waits(caplog: pytest.LogCaptureFixture) -> None:
    """No storm and no traceback; that it works again is said once, too."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    source = Scripts(clock, 36_000)
    kept = live(source, clock)
    await kept.get()
    source.steps = [passing() for _ in range(8)]
    clock.now = renewal(36_000) + 1
    while source.steps or (await kept.get()).access_key == "KEY1":
        await kept.get()
        await settled(kept)
        clock.now += 0.5
    waits = [later - earlier for earlier, later in pairwise(source.times[1:])]
    assert all(later > earlier for earlier, later in pairwise(waits[:6]))
    assert 45 < waits[-1] <= 60.5
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert all(record.exc_info is None for record in caplog.records)
    assert "down" in caplog.messages[0]


async def test_the_last_tries_come_before_the_end() -> None:
    """Waits shrink with what is left of the old set, so that a source that comes back is noticed before that expires."""
    clock = Clock()
    source = Scripts(clock, 100)
    kept = live(source, clock)
    await kept.get()
    source.steps = [passing() for _ in range(100)]
    clock.now = 91.0
    while clock.now < 99.9:
        await kept.get()
        await settled(kept)
        clock.now += 0.1
    assert max(source.times) > 97
    assert len(source.times) < 12


async def test_without_a_valid_set_a_passing_failure_is_waited_out() -> None:
    """With growing waits, for 15 s at most."""
    clock = Clock()
    source = Scripts(clock, steps=[passing(), passing(), passing()])
    assert (await live(source, clock).get()).access_key == "KEY4"
    assert len(clock.slept) == 3
    assert sorted(clock.slept) == clock.slept
    source = Scripts(clock := Clock(), steps=[passing() for _ in range(100)])
    with pytest.raises(NotNow, match="down"):
        await live(source, clock).get()
    assert 8 < clock.now <= 15


async def test_a_lasting_failure_is_raised_at_once_and_remembered() -> None:
    """Until the next try is due everybody gets the same answer without a question; the waits grow to a minute."""
    clock = Clock()
    source = Scripts(clock, steps=[lasting() for _ in range(30)])
    kept = live(source, clock)
    errors = set()
    while clock.now < 600:
        with pytest.raises(NoCredentials, match="denied") as caught:
            await kept.get()
        errors.add(id(caught.value))
        clock.now += 0.25
    assert clock.slept == []
    assert 12 < len(source.times) < 20
    assert 45 < source.times[-1] - source.times[-2] <= 61


async def test_an_expired_set_is_not_handed_out_though_the_source_is_down() -> None:
    """It is waited for, and then an error."""
    clock = Clock()
    source = Scripts(clock, 10)
    kept = live(source, clock)
    await kept.get()
    source.steps = [passing() for _ in range(100)]
    clock.now = 11
    with pytest.raises(NotNow):
        await kept.get()
    clock.now += 60
    source.steps = []
    assert (await kept.get()).access_key.startswith("KEY")


async def test_a_source_that_gives_expired_sets_is_not_believed() -> None:
    """Nor asked in a storm: old metadata, or a clock that is wrong."""
    clock = Clock()
    source = Scripts(clock, steps=[Credentials("KEY", "s", renew_after=-2, valid_for=-1) for _ in range(100)])
    with pytest.raises(NotNow, match="have expired"):
        await live(source, clock).get()
    assert len(source.times) < 8


async def test_a_source_that_gives_the_same_set_until_its_end_is_not_asked_in_a_storm() -> None:
    """Instance metadata has no other set until shortly before the end."""
    clock = Clock()
    source = Scripts(clock, 1000)
    kept = live(source, clock)
    first = await kept.get()
    while clock.now < 999:
        source.steps = [replace(first, renew_after=renewal(1000 - clock.now), valid_for=1000 - clock.now)]
        await kept.get()
        await settled(kept)
        clock.now += 0.1
    assert len(source.times) < 15


async def test_a_bug_or_a_foreign_error_is_no_credentials_and_shows_nothing() -> None:
    """Its text may hold a secret; its type is enough to find it."""
    clock = Clock()
    source = Scripts(clock, steps=[RuntimeError("S3CRET") for _ in range(100)])
    with pytest.raises(NoCredentials) as caught:
        await live(source, clock).get()
    assert "unexpected RuntimeError" in str(caught.value)
    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))


async def test_a_source_that_hangs_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources bound themselves; this is what holds if one does not."""
    monkeypatch.setattr("publishd.credentials.live._PATIENCE", 0.05)
    monkeypatch.setattr("publishd.credentials.live._FIRST_WAIT", 0.05)
    clock = Clock()
    with pytest.raises(NotNow, match="did not answer in time"):
        await live(Scripts(clock, steps=[asyncio.Event() for _ in range(9)]), clock).get()


# Rejected by the store


async def test_a_rejected_set_is_replaced_once_for_all_who_had_it() -> None:
    """32 requests fail together; one fetch serves them all."""
    clock = Clock()
    source = Scripts(clock)
    kept = live(source, clock)
    old = await kept.get()
    found = await asyncio.gather(*(kept.renew(old) for _ in range(32)))
    assert {fresh.access_key for fresh in found} == {"KEY2"}
    assert (await kept.renew(old)).access_key == "KEY2"
    assert len(source.times) == 2


async def test_replacements_that_are_rejected_again_wait_longer_and_longer() -> None:
    """5 s doubling to 300 s, with errors at once in between: a store that rejects everything costs no login storm."""
    clock = Clock()
    source = Scripts(clock)
    kept = live(source, clock)
    while clock.now < 3600:
        with suppress(NoCredentials):
            await kept.renew(await kept.get())
        clock.now += 1
    waits = [later - earlier for earlier, later in pairwise(source.times[1:])]
    assert 4 <= waits[0] <= 6
    assert all(later >= earlier * 1.3 for earlier, later in pairwise(waits[:5]))
    assert 230 <= waits[-1] <= 301


async def test_a_set_that_had_worked_is_replaced_without_a_wait() -> None:
    """Static keys rotated every minute are noticed by the store's refusal each time."""
    clock = Clock()
    source = Scripts(clock)
    kept = live(source, clock)
    for minute in range(1, 20):
        clock.now += 60
        assert (await kept.renew(await kept.get())).access_key == f"KEY{minute + 1}"
    assert len(source.times) == 20


async def test_the_same_keys_again_are_no_replacement() -> None:
    """The source has no others: that is what the line says; a rotation is found once it has happened."""
    clock = Clock()
    static = Credentials("KEY", "S3CRET")
    source = Scripts(clock, steps=[static, static, static])
    kept = live(source, clock)
    await kept.get()
    with pytest.raises(NoCredentials, match="the source has no others"):
        await kept.renew(static)
    with pytest.raises(NoCredentials, match="rejects fresh ones"):
        await kept.renew(static)
    assert len(source.times) == 2
    clock.now += 6
    with pytest.raises(NoCredentials, match="the source has no others"):
        await kept.renew(static)
    clock.now += 11
    assert (await kept.renew(static)).access_key == "KEY4"


async def test_a_replacement_waits_for_a_source_that_is_down() -> None:
    """ExpiredToken while Vault is restarted: it is survived, or an error in bounded time."""
    clock = Clock()
    source = Scripts(clock, steps=[None, passing(), passing()])
    kept = live(source, clock)
    assert (await kept.renew(await kept.get())).access_key == "KEY4"
    source.steps = [passing() for _ in range(100)]
    clock.now += 3600
    with pytest.raises(NoCredentials, match="down"):
        await kept.renew(await kept.get())


async def test_a_source_that_is_down_is_not_mistaken_for_a_store_that_rejects() -> None:
    """All 32 who were rejected are told that the source is down, and its return is noticed at the next try."""
    clock = Clock()
    source = Scripts(clock)
    kept = live(source, clock)
    old = await kept.get()
    source.steps, clock.now = [lasting("sealed")], 60
    for error in await asyncio.gather(*(kept.renew(old) for _ in range(32)), return_exceptions=True):
        assert "sealed" in str(error)
    assert len(source.times) == 2
    clock.now += 1.5
    assert (await kept.renew(old)).access_key == "KEY3"


async def test_sets_that_expire_before_they_arrive_are_an_error() -> None:
    """A source slower than its sets live is said to be so, and is not asked for ever."""
    clock = Clock()
    source = Scripts(clock, 5)
    fetch = source.fetch

    async def slowly() -> Credentials:
        found = await fetch()
        clock.now += 6
        return found

    source.fetch = slowly  # type: ignore[method-assign]
    with pytest.raises(NotNow, match="expire before they arrive"):
        await live(source, clock).get()
    assert len(source.times) == 3


async def test_an_outcome_that_nobody_waits_for_is_nobodys_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The only asker is cancelled, then the fetch fails."""
    clock, gate = Clock(), asyncio.Event()
    source = Scripts(clock, steps=[gate])
    source._lifetime = 0
    kept = live(source, clock)
    asking = asyncio.create_task(kept.get())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    source.steps = [lasting()]
    gate.set()
    await settled(kept)
    del kept, source, asking
    gc.collect()
    assert caplog.records == []


async def test_b57_minted_keys_are_given_time_before_they_count_as_having_worked() -> None:
    """Rejected after 10 s of trying, and so is their replacement: the next is waited for, though they were not brand-new."""
    clock = Clock()
    source = Scripts(clock, 3600, minted=True)
    kept = live(source, clock)
    while clock.now < 300:
        clock.now += 10
        with suppress(NoCredentials):
            await kept.renew(await kept.get())
    assert len(source.times) < 9


async def test_a_rejection_during_a_renewal_joins_it() -> None:
    """What is being fetched already is not fetched twice."""
    clock, gate = Clock(), asyncio.Event()
    source = Scripts(clock, 100)
    kept = live(source, clock)
    old = await kept.get()
    source.steps, clock.now = [gate], 95
    await kept.get()
    asking = asyncio.create_task(kept.renew(old))
    await asyncio.sleep(0)
    gate.set()
    assert (await asking).access_key == "KEY2"
    assert len(source.times) == 2


async def test_closing_ends_a_fetch_and_releases_the_source() -> None:
    """Whoever still waits is told."""
    clock = Clock()
    source = Scripts(clock, steps=[asyncio.Event()])
    kept = live(source, clock)
    asking = asyncio.create_task(kept.get())
    await asyncio.sleep(0.01)
    await kept.aclose()
    assert source.closed
    with pytest.raises(NoCredentials):
        await asking


# Rules 19 and 20


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, trap: Listener) -> Listener:
    """An environment full of proxies, in both cases, that nothing may use; the trap knows who did."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, trap.url)
        monkeypatch.setenv(name.upper(), trap.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "169.254.169.0/33,[::1],*.x,,")
    return trap


async def test_r19_no_source_uses_a_proxy_of_the_environment(
    hostile: Listener, web_identity: Any, authority: Authority, loopback_certificate: Certificate, tmp_path: Path
) -> None:
    """By http and by https: Vault, STS, instance metadata and container credentials are reached directly."""
    (tmp_path / "jwt").write_text("eyJ.jwt")
    for certificate, scheme in ((None, "http"), (loopback_certificate, "https")):
        with Scripted(SmallVault(), certificate) as vault:
            assert vault.endpoint.startswith(f"{scheme}:")
            query = f"auth=kubernetes&role=r&jwt_file={tmp_path}/jwt&ca={authority.ca}"
            await fetched(f"vault:{vault.endpoint}/aws/creds/trainer?{query}")
        with Scripted(SmallSts("eyJ.of-this-pod"), certificate) as sts:
            await fetched("web-identity", web_identity(sts), ca=str(authority.ca))
    with Scripted(SmallMetadata()) as metadata:
        await fetched("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint})
    with Scripted(SmallContainer()) as container:
        await fetched("container", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": container.endpoint})
    assert hostile.heads == []


async def test_r19_positive_control_the_plain_libraries_do_use_it(hostile: Listener, small_vault: Scripted) -> None:
    """Hvac and aiobotocore by themselves run into the trap, so a trap that stays empty means something."""
    import aiobotocore.utils
    import hvac
    import requests

    def plain() -> None:
        client = hvac.Client(url=small_vault.endpoint, token="t")
        with pytest.raises(requests.exceptions.RequestException):
            client.sys.read_health_status(method="GET")
        client.adapter.close()

    await asyncio.to_thread(plain)
    assert len(hostile.heads) == 1
    fetcher = aiobotocore.utils.AioInstanceMetadataFetcher(base_url="http://127.0.0.1:9/", env={})
    await fetcher.retrieve_iam_role_credentials()
    assert len(hostile.heads) > 1


async def test_r20_no_secret_reaches_a_log_a_repr_or_a_traceback(
    web_identity: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every logger at DEBUG, ours and the libraries', over what works and what fails at each request in turn."""
    for name in ("", "botocore", "aiobotocore", "urllib3", "hvac", "aiohttp", "requests", "asyncio", "publishd"):
        caplog.set_level(logging.DEBUG, name)
    (tmp_path / "jwt").write_text("eyJ.jwt-S3CRET")
    (tmp_path / "token").write_text("eyJ.sts-S3CRET")
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=a\naws_secret_access_key=S3CRET x\nS3CRET")
    container = {"AWS_CONTAINER_AUTHORIZATION_TOKEN": "S3CRET-of-container"}
    shown = [await _shown(f"file:{tmp_path}/keys", {}), await _shown("env", KEYS)]
    for behaviour in (SmallVault(), SmallSts("eyJ.sts-S3CRET"), SmallMetadata(), SmallContainer("S3CRET-of-container")):
        with Scripted(behaviour) as server:
            spec, environ = {
                SmallVault: (f"vault:{server.endpoint}/aws/creds/t?auth=kubernetes&role=r&jwt_file={tmp_path}/jwt", {}),
                SmallSts: ("web-identity", web_identity(server)),
                SmallMetadata: ("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint}),
                SmallContainer: ("container", {**container, "AWS_CONTAINER_CREDENTIALS_FULL_URI": server.endpoint}),
            }[type(behaviour)]
            shown.append(await _shown(spec, environ))
            for position, step in product(range(len(server.requests)), _FAULTS):
                server.queue.clear()
                server.queue += [*[PASS] * position, step]
                shown.append(await _shown(spec, environ))
    everything = "\n".join([*shown, caplog.text, *(f"{record.__dict__}" for record in caplog.records)])
    for secret in ("jwt-S3CRET", "sts-S3CRET", "S3CRET-of-container", "S3CRET x", KEYS["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in everything
    for kind in ("client-token", "minted-secret", "minted-session", "sts-secret", "sts-session", "role-secret", "role-session"):
        assert kind not in everything
    assert SmallMetadata.token not in everything


def _echo(request: Request, _: Behaviour) -> Answer:
    """An error that repeats what it was sent, as a badly made server does."""
    headers = [request.headers.get(name, "") for name in ("X-Vault-Token", "Authorization", "X-aws-ec2-metadata-token")]
    said = " ".join(filter(None, [*headers, unquote_plus(request.body.decode())[-200:]]))
    return Answer(403, json.dumps({"errors": [said], "code": "Denied", "message": said}).encode())


_FAULTS: tuple[Step, ...] = (
    Fate.DROP,
    _echo,
    Answer(200, b"sts-S3CRET"),
    Answer(200, b'{"jwt-S3CRET": 1}'),
    Answer(307, headers={"Location": "http://127.0.0.1:9/?sts-S3CRET"}),
)


async def _shown(spec: str, environ: dict[str, str]) -> str:
    """All that one fetch shows of itself."""
    source = open_source(parse_source(spec), environ)
    try:
        return f"{await source.fetch()!r} {source!r} {parse_source(spec)!r}"
    except NoCredentials as error:
        return "".join(traceback.format_exception(error)) + repr(error)
    finally:
        await source.aclose()
