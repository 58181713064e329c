"""What the environment says of proxies, endpoints, profiles and certificates leads no command astray; what flags say holds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from commands import environment, eventually, run
from every_source import SOURCES, KeyedServer, OpenSource, open_source
from publishd.credentials import parse_source
from publishd.stores import Kind
from publishd.stores.s3 import Access, open_s3
from publishd.stores.s3_client import S3Settings
from s3_roots import S3Root, SmallRoot
from services.places import REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from services.certificates import Authority, Certificate
    from services.proxies import ForwardProxy, Listener
    from services.scripted import ScriptedS3
    from services.seaweed import SeaweedFS
    from services.vault import Logins, OpenBao

# What a NO_PROXY must not be able to break: an address with a mask, brackets, a star in the middle, empty parts.
NO_PROXY = "127.0.0.1/8,[::1],*.x,,"

RECORDER = """
import os, sys
def record(event, arguments, file=os.environ.get("RECORD_CONNECTIONS")):
    if event == "socket.connect" and file and any(part.endswith(("/publish", "/publishd")) for part in sys.orig_argv):
        with open(file, "a") as log:
            log.write(f"{arguments[1][1]}\\n")
sys.addaudithook(record)
"""


def proxies(url: str, no_proxy: str = NO_PROXY) -> dict[str, str]:
    """Every variable that names a proxy, in both cases."""
    names = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "ws_proxy", "vault_http_proxy", "vault_proxy_addr")
    both = {spelled: url for name in names for spelled in (name, name.upper())}
    return {**both, "no_proxy": no_proxy, "NO_PROXY": no_proxy}


def misleading(url: str, home: Path) -> dict[str, str]:
    """All else that would lead botocore, aiohttp, requests or hvac to this URL, to other keys, or into an error."""
    bad_keys = "aws_access_key_id=AKIDWRONG\naws_secret_access_key=wrong"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws/config").write_text(f"[default]\nendpoint_url={url}\ncredential_process=/bin/touch {home}/ran\ns3=\n  x=y\n")
    (home / ".aws/credentials").write_text(f"[default]\n{bad_keys}\n")
    (home / ".netrc").write_text("".join(f"machine {host} login u password p\n" for host in ("localhost", "127.0.0.1")))
    (home / ".netrc").chmod(0o600)
    (home / ".vault-token").write_text("hvs.of-somebody-else")
    (home / "token").write_text("another-token")
    endpoints = ("URL", "URL_S3", "URL_STS")
    return {
        "HOME": str(home),
        "NETRC": f"{home}/.netrc",
        **{f"AWS_ENDPOINT_{name}": url for name in endpoints},
        "AWS_CONFIG_FILE": f"{home}/.aws/config",
        "AWS_SHARED_CREDENTIALS_FILE": f"{home}/.aws/credentials",
        "AWS_ACCESS_KEY_ID": "AKIDWRONG",
        "AWS_SECRET_ACCESS_KEY": "wrong",
        "AWS_SESSION_TOKEN": "wrong",
        "AWS_PROFILE": "missing",
        "AWS_DEFAULT_PROFILE": "missing",
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/another",
        "AWS_WEB_IDENTITY_TOKEN_FILE": f"{home}/token",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": url,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": url,
        "AWS_CA_BUNDLE": "/nonexistent",
        "AWS_RETRY_MODE": "nonsense",
        "AWS_MAX_ATTEMPTS": "0",
        "AWS_USE_FIPS_ENDPOINT": "true",
        "AWS_USE_DUALSTACK_ENDPOINT": "true",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_supported",
        "AWS_SIGV4A_SIGNING_REGION_SET": "*",
        "BOTO_CONFIG": f"{home}/.aws/config",
        "VAULT_ADDR": url,
        "VAULT_TOKEN": "hvs.of-somebody-else",
        "VAULT_NAMESPACE": "another",
        "VAULT_CACERT": "/nonexistent",
        "VAULT_CAPATH": "/nonexistent",
        "VAULT_CLIENT_CERT": "/nonexistent",
        "VAULT_SKIP_VERIFY": "true",
        "REQUESTS_CA_BUNDLE": "/nonexistent",
        "CURL_CA_BUNDLE": "/nonexistent",
        "SSL_CERT_FILE": "/nonexistent",
        "SSL_CERT_DIR": "/nonexistent",
    }


@pytest.fixture
def hostile(trap: Listener, tmp_path: Path) -> dict[str, str]:
    """An environment in which everything that must not matter leads into the trap, or to an error."""
    return {**proxies(trap.url), **misleading(trap.url, tmp_path / "home")}


@pytest.fixture(params=["http", "https"])
def store(request: pytest.FixtureRequest, loopback_certificate: Certificate) -> Iterator[KeyedServer]:
    """A small S3 that knows its keys, at an http endpoint and at an https one."""
    with KeyedServer(loopback_certificate if request.param == "https" else None) as server:
        yield server


@pytest.fixture(params=SOURCES)
def source(
    request: pytest.FixtureRequest, store: KeyedServer, tmp_path: Path, authority: Authority, loopback_certificate: Certificate
) -> Iterator[OpenSource]:
    """Every source in turn; Vault and STS speak TLS if the store does."""
    certificate = loopback_certificate if store.endpoint.startswith("https:") else None
    with open_source(request.param, store.s3, tmp_path, authority, certificate) as opened:
        yield opened


class Recorded:
    """Commands whose outgoing connections are recorded, by port."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(RECORDER)
        self._log = folder / "connections"
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = {"PYTHONPATH": os.pathsep.join(path), "RECORD_CONNECTIONS": str(self._log)}

    @property
    def ports(self) -> set[int]:
        return {int(line) for line in self._log.read_text().split()} if self._log.exists() else set()


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "recorder")


def port(url: str) -> int:
    found = urlsplit(url).port
    assert found
    return found


def root_of(server: KeyedServer, creds: str, environ: Mapping[str, str], *flags: str) -> SmallRoot:
    """A root on this server, for whoever has these credentials."""
    root = SmallRoot(server, flags=["-creds", creds, "-endpoint", server.endpoint, "-region", REGION, *flags])
    root.environ = dict(environ)
    return root


def every_command(root: S3Root, env: Mapping[str, str]) -> None:
    """Publish, list, resolve, watch, prune and probe, each of which must do its work."""
    save = root.hf(10)
    root.run("publish", f"{root.path}/{save}", "10", env=env).succeeded(b"")
    watch_and_resolve(root, env)
    assert [line["step"] for line in root.run("list", "-json", env=env).succeeded().json] == [10, 20]
    root.run("prune", "-keep", "1", env=env).succeeded(f"{root.path}/{save}\n".encode())
    assert (root.steps, root.saves) == ([20], {"checkpoint-20"})
    root.run("probe", env=env).succeeded()


def watch_and_resolve(root: S3Root, env: Mapping[str, str]) -> None:
    """The two that run on other loops, and use the store in all the ways it is used."""
    save = root.hf(20)
    root.run("watch", "-framework", "hf", "-once", env=env).succeeded(b"")
    root.run("resolve", env=env).succeeded(f"{root.path}/{save}\n".encode())


@pytest.mark.parametrize("work", [every_command, watch_and_resolve], ids=["http", "https"])
@pytest.mark.parametrize("kind", SOURCES)
def test_b47_no_command_with_any_source_is_led_astray(
    work: Callable[[S3Root, Mapping[str, str]], None],
    kind: str,
    hostile: dict[str, str],
    trap: Listener,
    recorded: Recorded,
    authority: Authority,
    loopback_certificate: Certificate,
    tmp_path: Path,
) -> None:
    """Nothing reaches the trap, nothing is connected to but the store and the named source, and the results are right."""
    certificate = loopback_certificate if work is watch_and_resolve else None
    with KeyedServer(certificate) as store, open_source(kind, store.s3, tmp_path, authority, certificate) as source:
        root = root_of(store, source.creds, {}, "-ca", str(authority.ca))
        work(root, environment(**{**hostile, **source.environ, **recorded.environ}))
        assert trap.heads == []
        assert recorded.ports == {port(server.endpoint) for server in (store, source.server) if server}
    assert not (tmp_path / "home/ran").exists()


async def test_b47_the_adapters_need_no_clean_environment(
    store: KeyedServer,
    source: OpenSource,
    hostile: dict[str, str],
    trap: Listener,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process that keeps all of these variables the store and every source go by what they were given alone."""
    for name, value in {**hostile, **source.environ}.items():
        monkeypatch.setenv(name, value)
    settings = S3Settings(endpoint=store.endpoint, region=REGION, ca=str(authority.ca))
    opened = open_s3("s3://bucket/team/p", Access(parse_source(source.creds), {**hostile, **source.environ}, settings))
    await opened.create("pub/x")
    assert [(entry.name, entry.kind) for entry in await opened.list("pub")] == [("x", Kind.FILE)]
    assert await opened.read("pub/x", 10) == b""
    await opened.delete("pub/x")
    await opened.aclose()
    assert trap.heads == []


PLAIN_AIOBOTOCORE = """
import asyncio, sys
from aiobotocore.session import get_session
async def main():
    async with get_session().create_client("s3", region_name="us-east-1", endpoint_url=sys.argv[1] or None) as client:
        await client.list_objects_v2(Bucket="bucket")
asyncio.run(main())
"""
PLAIN_HVAC = """
import hvac, sys
hvac.Client(*filter(None, [sys.argv[1]])).sys.read_health_status(method="GET")
"""


@pytest.mark.parametrize("program", [PLAIN_AIOBOTOCORE, PLAIN_HVAC], ids=["aiobotocore", "hvac"])
@pytest.mark.parametrize("what", ["proxies", "endpoints"])
def test_b47_positive_control_plain_libraries_run_into_the_trap(
    program: str, what: str, hostile: dict[str, str], trap: Listener, scripted: ScriptedS3
) -> None:
    """In the same environment, less the variables that only stop them: so a trap that stays empty means something."""
    stops = {"missing", "nonsense", "/nonexistent", "true", "0"}
    changes: dict[str, str | None] = {name: value for name, value in hostile.items() if value not in stops}
    changes["AWS_MAX_ATTEMPTS"] = "1"
    if what == "endpoints":
        changes |= dict.fromkeys(proxies(""))
    # Requests understands the mask in NO_PROXY, so the address has to be a name.
    endpoint = scripted.endpoint.replace("127.0.0.1", "localhost") if what == "proxies" else ""
    arguments = [sys.executable, "-c", program, endpoint]
    ended = subprocess.run(arguments, env=environment(**changes), capture_output=True, timeout=60, check=False)
    assert trap.heads, ended.stderr
    assert scripted.requests == []


# Explicit proxies


@pytest.fixture
def secret(bao: OpenBao, seaweed: SeaweedFS) -> str:
    """The path of a secret with keys that may do anything."""
    mount = bao.mount(2)
    keys = {"access_key": seaweed.keys.access_key, "secret_key": seaweed.keys.secret_key}
    bao.call("POST", f"{mount}/data/s3", {"data": keys})
    return f"{mount}/s3"


@pytest.mark.parametrize(
    ("stores", "vaults"), [("http", "https"), ("https", "http"), ("", "http"), ("https", "")], ids=lambda proxy: proxy or "none"
)
@pytest.mark.parametrize("tls", [False, True], ids=["http-services", "https-services"])
def test_b47_two_proxies_each_carry_what_they_are_named_for(
    stores: str,
    vaults: str,
    tls: bool,
    seaweed: SeaweedFS,
    bao: OpenBao,
    logins: Logins,
    secret: str,
    forward_proxy: ForwardProxy,
    https_forward_proxy: ForwardProxy,
    recorded: Recorded,
    authority: Authority,
    tmp_path: Path,
    trap: Listener,
) -> None:
    """The store's carries the store alone, Vault's Vault alone, whatever NO_PROXY says; each may be the only one."""
    named = {"http": forward_proxy, "https": https_forward_proxy}
    (tmp_path / "secret_id").write_text(logins.secret_id)
    login = f"auth=approle&role_id={logins.role_id}&secret_id_file={tmp_path}/secret_id&ca={authority.ca}"
    creds = bao.spec(secret, f"{login}{f'&proxy={named[vaults].url}' if vaults else ''}", tls=tls)
    endpoint, address = (seaweed.https_endpoint, bao.https_address) if tls else (seaweed.endpoint, bao.address)
    flags = ["-creds", creds, "-endpoint", endpoint, "-ca", str(authority.ca), *(["-proxy", named[stores].url] if stores else [])]
    root = S3Root(seaweed.place(), flags=flags)
    root.run("resolve", env=environment(**proxies(trap.url, "*"), **recorded.environ)).succeeded(b"")
    connected = {stores: endpoint, vaults: address}
    assert recorded.ports == {port(named[proxy].url if proxy else service) for proxy, service in connected.items()}
    for proxy in filter(None, connected):
        eventually(partial(named[proxy].passed, f":{port(connected[proxy])}"), "a connection through the proxy")
    assert trap.heads == []


def test_b47_an_explicit_proxy_is_used_whatever_no_proxy_says(trap: Listener) -> None:
    """It is asked for a host that has no address; where it were passed by nothing could be listed."""
    with KeyedServer() as store:
        flags = ["-creds", "env", "-endpoint", "http://store.invalid:9000", "-proxy", store.endpoint]
        root = SmallRoot(store, flags=flags)
        watch_and_resolve(root, environment(**{**root.environ, **proxies(trap.url, "*")}))
        assert all(request.target.startswith("http://store.invalid:9000/") for request in store.requests)
    assert trap.heads == []


@pytest.fixture
def dead() -> Iterator[str]:
    """The URL of a port that refuses connections, and is nobody else's."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("whose", ["store", "vault"])
def test_b47_a_dead_proxy_is_an_error_and_never_passed_by(
    whose: str, dead: str, authority: Authority, loopback_certificate: Certificate, recorded: Recorded, tmp_path: Path
) -> None:
    """Neither the store's nor Vault's: exit 1 in bounded time, one line that says proxy, and nobody is asked directly."""
    with ExitStack() as stack:
        store = stack.enter_context(KeyedServer(loopback_certificate))
        source = stack.enter_context(open_source("vault", store.s3, tmp_path, authority, loopback_certificate))
        assert source.server
        flags = ["-proxy", dead] if whose == "store" else []
        creds = source.creds if whose == "store" else f"{source.creds}&proxy={dead}"
        root = root_of(store, creds, {}, "-ca", str(authority.ca), *flags)
        ran = root.run("resolve", env=environment(**recorded.environ))
        ran.failed("the proxy", "see -proxy" if whose == "store" else "check proxy=")
        assert store.requests == []
        assert bool(source.server.requests) is (whose == "store")
        assert recorded.ports == {port(dead)} | ({port(source.server.endpoint)} if whose == "store" else set())


@pytest.mark.parametrize(
    "proxy",
    [
        "http://user:S3CRET@proxy.example:3128",
        "http://S3CRET:@proxy.example",
        "socks5://S3CRET.example:1080",
        "S3CRET.example:3128",
        "http://proxy.example:3128/S3CRET",
        "http://proxy.example/?S3CRET",
        "http://proxy.example:80#S3CRET",
        "http://proxy.example:S3CRET",
        "http://",
        "",
        "http://proxy.example:3128 S3CRET",
        "http://proxy.example\nS3CRET",
    ],
)
@pytest.mark.parametrize("flag", ["-proxy", "-creds"])
def test_b47_a_bad_proxy_is_a_usage_error_and_not_repeated(flag: str, proxy: str) -> None:
    """A password, another kind of proxy, a bare host and port, more than host and port: exit 2, said in one line."""
    flags = ["-proxy", proxy, "-creds", "env"]
    if flag == "-creds":
        flags = ["-creds", f"vault:https://v.example/team/s3?auth=token&proxy={proxy}"]
    ran = run("resolve", "-checkpoint", "s3://bucket/p", *flags).failed(f"bad flag: {flag}", code=2)
    assert "S3CRET" not in ran.err
