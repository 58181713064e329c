"""Requests to a Vault or OpenBao server: no proxy but a given one, no redirect, and every answer bounded in size and time.

hvac speaks the protocol over a session of our own; its `Client` is passed by, because that reads VAULT_* and
`~/.vault-token`. Nothing here is safe to use from two threads at once.
"""

from __future__ import annotations

import io
import re
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import hvac.adapters
import requests
import requests.adapters

from publishd.credentials.base import NotNow, repeats
from publishd.credentials.urls import host_and_port
from publishd.errors import NoCredentials

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECT_SECONDS, READ_SECONDS = 3.0, 10.0
_LARGEST_ANSWER = 1 << 20
_PASSING = frozenset({408, 412, 429, 472, 473, 500, 502, 503, 504})
_CAUSES = {
    404: "no such path",
    429: "too many requests",
    472: "a standby",
    473: "a standby",
    503: "sealed, or a standby without a leader",
}


class Refused(Exception):
    """Vault answered with an error. `said` is its own words, `content` the answer's JSON."""

    def __init__(self, step: str, status: int, said: str, content: Any) -> None:
        super().__init__(step, status)
        self.step, self.status, self.said, self.content = step, status, said, content


class _Bounded(requests.adapters.HTTPAdapter):
    """Reads the whole answer within the read timeout, however it trickles, and no more than 1 MiB of it."""

    def send(self, request: Any, *args: Any, **options: Any) -> Any:
        """As the base class, but raises RequestException for an answer too long or too slow."""
        response = super().send(request, *args, **{**options, "stream": True})
        try:
            content = _content(response.raw)
        except requests.RequestException:
            raise
        except Exception as error:  # urllib3's, which requests translates only in its own reading
            raise requests.ConnectionError(type(error).__name__) from None
        finally:
            response.raw.close()
        response.raw = io.BytesIO(content)
        return response


def _content(raw: Any) -> bytes:
    end = time.monotonic() + READ_SECONDS
    content = b""
    while piece := raw.read1(1 << 16, decode_content=True):
        content += piece
        if len(content) > _LARGEST_ANSWER:
            raise requests.exceptions.ContentDecodingError("the answer is far too long")
        if time.monotonic() > end:
            raise requests.ReadTimeout
    return content


class VaultHttp:
    """One server, one namespace, and the token in use. Raises for a person what went wrong in which step."""

    def __init__(self, which: str, address: str, options: Mapping[str, str]) -> None:
        self._which, self._address = which, address
        self._proxied = "proxy" in options
        self.secrets: set[str] = set()
        """What has been sent and must never be repeated, whatever a server echoes."""
        session = requests.Session()
        session.trust_env = False
        session.verify = options.get("ca") or True
        session.cert = (options["cert"], options.get("key") or options["cert"]) if "cert" in options else None
        session.proxies = _proxies(options.get("proxy", ""))
        session.mount("http://", _Bounded())
        session.mount("https://", _Bounded())
        self._session = session
        self._adapter = hvac.adapters.JSONAdapter(
            base_uri=address,
            session=session,
            cert=session.cert,
            verify=session.verify,
            proxies=session.proxies,
            timeout=(CONNECT_SECONDS, READ_SECONDS),
            allow_redirects=False,
            namespace=options.get("namespace"),
        )

    def use(self, token: str) -> None:
        """Send this token from now on; '' for none."""
        self._adapter.token = token
        if token:
            self.secrets.add(token)

    def ask(self, method: str, path: str, step: str, body: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer's JSON object, {} where Vault has nothing to say.

        Raises Refused for an answer that another path or token may change, NotNow for one that may change by itself, and
        NoCredentials for what is not Vault's answer.
        """
        try:
            answer = self._adapter.request(method, f"/v1/{quote(path)}", raise_exception=False, json=body)
        except (requests.RequestException, OSError, ValueError) as error:
            raise self._unreachable(step, error) from None
        if isinstance(answer, dict):
            return answer
        if not isinstance(answer, requests.Response) or answer.status_code == 200:
            raise self.failed(step, "what answers is not Vault: 200 without a JSON object", "check host, port and proxy=")
        if answer.status_code == 204:
            return {}
        if 300 <= answer.status_code < 400:
            to = _origin(answer.headers.get("Location", ""))
            cause = f"{answer.status_code}, a redirect{to and f' to {to}'}, which is not followed with a token in hand"
            raise self.failed(step, cause, "name the active server itself, or one that forwards")
        raise self._refused(step, answer)

    def _refused(self, step: str, answer: requests.Response) -> Refused | NoCredentials:
        try:
            content = answer.json()
        except (ValueError, RecursionError):
            content = None
        said = self._said(content)
        if answer.status_code not in _PASSING:
            return Refused(step, answer.status_code, said, content)
        cause = _CAUSES.get(answer.status_code, "")
        return self.failed(step, explained(answer.status_code, said or cause), "is it sealed? see vault status", NotNow)

    def _said(self, content: Any) -> str:
        errors = content.get("errors") if isinstance(content, dict) else None
        words = " ".join(" ".join(str(error) for error in errors[:3]).split()) if isinstance(errors, list) else ""
        return "" if repeats(words, self.secrets) else words[:300]

    def failed(self, step: str, cause: str, remedy: str = "", kind: type[NoCredentials] = NoCredentials) -> NoCredentials:
        """The error of one step."""
        return kind("no credentials", self._which, f"{step}: {cause}", remedy)

    def _unreachable(self, step: str, error: Exception) -> NoCredentials:
        chain = list(_chain(error))
        if tls := next((part for part in chain if isinstance(part, ssl.SSLError)), None):
            why = getattr(tls, "verify_message", "") or tls.reason or "it failed"
            return self.failed(step, f"TLS: {why}", "check ca=, the name in the server's certificate, and that it speaks TLS")
        if isinstance(error, requests.exceptions.ProxyError):
            return self.failed(step, f"the proxy: {_reason(chain)}", "check proxy=", NotNow)
        if isinstance(error, requests.Timeout):
            seconds = CONNECT_SECONDS if isinstance(error, requests.ConnectTimeout) else READ_SECONDS
            return self.failed(step, f"no answer within {seconds:.0f} s", self._hint, NotNow)
        if isinstance(error, requests.exceptions.ContentDecodingError):
            return self.failed(step, "what answers is not Vault: its answer is far too long, or garbled", self._hint)
        if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
            return self.failed(step, _reason(chain), self._hint, NotNow)
        if "cert" in str(error) or "key" in str(error):
            return self.failed(step, "the client certificate or its key can't be read", "check cert= and key=")
        return self.failed(step, f"the request could not be made ({type(error).__name__})", self._hint, NotNow)

    @property
    def _hint(self) -> str:
        return "check proxy=" if self._proxied else "check host and port; a proxy is used only if proxy= names it"

    def close(self) -> None:
        """No connection is open any more; the next request opens one."""
        self._session.close()


def explained(status: int, said: str = "") -> str:
    """A status and what it means, in the server's words where it has any."""
    words = said or _CAUSES.get(status, "")
    return f"{status}: {words}" if words else str(status)


def _proxies(proxy: str) -> dict[str, str]:
    # requests sends a user name only where there is a password, were it empty.
    proxy = re.sub("//([^@:/]+)@", r"//\1:@", proxy)
    return {"http": proxy, "https": proxy} if proxy else {}


def _origin(location: str) -> str:
    try:
        parts = urlsplit(location)
        return f"{parts.scheme}://{host_and_port(parts)}" if parts.scheme and parts.hostname else ""
    except ValueError:
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those inside it, which urllib3 keeps in `reason`, in its arguments, or as the cause."""
    seen: list[BaseException] = []
    todo = [error]
    while todo:
        part = todo.pop()
        if part in seen:
            continue
        seen.append(part)
        yield part
        inner = [getattr(part, "reason", None), getattr(part, "original_error", None), *part.args]
        todo += [found for found in (*inner, part.__cause__, part.__context__) if isinstance(found, BaseException)]


def _reason(chain: list[BaseException]) -> str:
    for part in chain:
        if isinstance(part, socket.gaierror):
            return "its name is not known"
    for part in chain:
        if isinstance(part, OSError) and part.strerror:
            return part.strerror
    for part in chain:
        if match := re.search(r"Tunnel connection failed: (\d{3})", str(part)):
            return f"it refuses the tunnel: {match[1]}"
    return "the connection broke off"
