"""What an S3 request's failure means: the one place that turns botocore's errors, and the store's codes, into ours.

Codes are those of the S3 API ("Error responses" in its reference) and of the stores that copy it. Of what a server says
only codes, names of regions and its clock are repeated, each held to a strict form: an answer may echo a secret.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    IncompleteReadError,
    ProxyConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from publishd.errors import (
    AlreadyExists,
    Denied,
    NoCredentials,
    NoSpace,
    NotFound,
    NotSupported,
    StoreError,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Then(Enum):
    """What to do after a failure."""

    FAIL = "trying again would not help"
    REPEAT = "nothing was done; try again"
    REPEAT_AMBIGUOUS = "it may have been done all the same; try again"
    RENEW = "the credentials are expired or not known; try again with others"


class Failure(NamedTuple):
    """One failed attempt, in a person's words."""

    then: Then
    error: type[StoreError]
    cause: str
    remedy: str = ""


UNKNOWN_KEY = Failure(Then.RENEW, NoCredentials, "the store does not know the access key", "see -creds")
"""Of keys that were just made: the store may know them in a while (IAM is eventually consistent)."""

_EXPIRED = Failure(Then.RENEW, NoCredentials, "the session token has expired or is not valid", "see -creds")
_SIGNATURE = Failure(
    Then.RENEW,
    NoCredentials,
    "the store finds the signature wrong",
    "is the secret key the access key's? does a proxy change requests?",
)
_DENIED = Failure(Then.FAIL, Denied, "the store denies access", "do the credentials allow it below the root's prefix?")
_DENIED_BY_NOBODY = _DENIED._replace(
    remedy="do the credentials allow it below the root's prefix? or does a proxy say so? see -proxy"
)
_WHO = "is it an S3 store that answers? see -endpoint and -proxy"
_NO_BUCKET = Failure(Then.FAIL, Unavailable, "there is no such bucket", "see its name, -endpoint and -region")
_NOT_SUPPORTED = Failure(Then.FAIL, NotSupported, "the store lacks this operation", "publishd probe tells what it lacks")
_FULL = Failure(Then.FAIL, NoSpace, "the store is full, or a quota is used up")
_TOO_LONG = Failure(Then.FAIL, Unavailable, "the store finds the key too long", "use shorter names")

_BY_CODE = {
    "InvalidAccessKeyId": UNKNOWN_KEY,
    "InvalidClientTokenId": UNKNOWN_KEY,
    "UnrecognizedClientException": UNKNOWN_KEY,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "SignatureDoesNotMatch": _SIGNATURE,
    "NoSuchBucket": _NO_BUCKET,
    "NoSuchKey": Failure(Then.FAIL, NotFound, "there is no such object"),
    "PreconditionFailed": Failure(Then.FAIL, AlreadyExists, "it exists"),
    "AccessDenied": _DENIED,
    "NotImplemented": _NOT_SUPPORTED,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "KeyTooLongError": _TOO_LONG,
    "XMinioInvalidObjectName": _TOO_LONG,
    "RequestTimeout": Failure(Then.REPEAT_AMBIGUOUS, Unavailable, "the store waited for the request in vain"),
}
_BY_STATUS = {
    403: _DENIED_BY_NOBODY,
    # Without a store's own code it may be any web server's: it says nothing of an object.
    404: Failure(Then.FAIL, Unavailable, "there is no such path (status 404)", _WHO),
    407: Failure(Then.FAIL, Unavailable, "the proxy wants to know who asks (status 407)", "see -proxy"),
    412: _BY_CODE["PreconditionFailed"],
    501: _NOT_SUPPORTED,
    507: _FULL,
}
_REGION_CODES = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException", "TemporaryRedirect"}
_REDIRECTS = range(300, 400)


class Redirected(Exception):
    """A redirect was answered, and is not followed."""

    def __init__(self, status: int, host: str, region: str) -> None:
        super().__init__(f"redirect {status}")
        self.status, self.host, self.region = status, host, region


class Endless(Exception):
    """An answer is far longer than any of a store's."""


def failure(error: Exception, signed_for: str) -> Failure:
    """What this failed attempt means; `signed_for` is the region it was signed for. What is unknown is Unavailable."""
    if isinstance(error, ClientError):
        return _answered(error.response, signed_for)
    if isinstance(error, TimeoutError):
        return _no_answer("no answer in time")
    inner = getattr(error, "kwargs", {}).get("error", error)
    if isinstance(inner, Redirected):
        return _redirected(inner, signed_for)
    for kind, explain in _TRANSPORT.items():
        if isinstance(error, kind):
            return explain(inner)
    if isinstance(error, BotoCoreError) and inner is error:
        return Failure(Then.FAIL, Unavailable, f"the request can't be made ({type(error).__name__})")
    if isinstance(inner, Endless):
        return Failure(Then.FAIL, Unavailable, "the answer has no end", _WHO)
    if isinstance(inner, OSError | aiohttp.ClientPayloadError | aiohttp.ClientConnectionError):
        return _no_answer(f"the connection failed ({type(inner).__name__})")
    return _no_answer(f"the answer makes no sense ({type(inner).__name__})")


def _answered(response: Mapping[str, Any], signed_for: str) -> Failure:
    """A failure that the store (or somebody on the way to it) has answered."""
    metadata = response.get("ResponseMetadata", {})
    status, headers = metadata.get("HTTPStatusCode", 0), metadata.get("HTTPHeaders", {})
    code = quoted(response.get("Error", {}).get("Code"), "[A-Za-z][A-Za-z0-9.]{1,60}")
    if code in _REGION_CODES or status in _REDIRECTS:
        region = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
        return _wrong_region(quoted(region, "[a-z0-9-]{1,40}"), signed_for)
    if code == "RequestTimeTooSkewed":
        return _skewed(headers)
    known = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if known and status != 200:
        return known
    answer = f"status {status}{code and f', {code}'}"
    if status == 409 or code == "OperationAborted":
        return Failure(Then.REPEAT, Unavailable, f"something else is being done to the same key ({answer})")
    if status >= 500 or status == 429 or code in ("SlowDown", "Throttling", "InternalError"):
        return Failure(Then.REPEAT_AMBIGUOUS, Unavailable, f"the store can't serve it now ({answer})", "" if code else _WHO)
    if status == 200:
        return Failure(Then.FAIL, Unavailable, f"the store began to answer and then failed ({code or 'no code'})")
    return Failure(Then.FAIL, Unavailable, f"the store refuses it ({answer})", _WHO)


def _wrong_region(region: str, signed_for: str) -> Failure:
    if region and region != signed_for:
        return Failure(Then.FAIL, Unavailable, f"the bucket is in region {region}, not {signed_for}", f"set -region {region}")
    cause = f"the store wants another region than {signed_for}, or another address"
    return Failure(Then.FAIL, Unavailable, cause, "see -region, -endpoint and -addressing")


def _redirected(redirect: Redirected, signed_for: str) -> Failure:
    if redirect.region:
        return _wrong_region(redirect.region, signed_for)
    where = f" to {redirect.host}" if redirect.host else ""
    cause = f"the answer is a redirect{where} (status {redirect.status}), which is not followed"
    return Failure(Then.FAIL, Unavailable, cause, "see -endpoint and -region; does a proxy ask for a login?")


def _skewed(headers: Mapping[str, str]) -> Failure:
    ahead = clock_difference(headers)
    cause = "this node's clock and the store's differ too much"
    if ahead is not None:
        cause = f"this node's clock is {abs(ahead) / 60:.0f} minutes {'ahead of' if ahead > 0 else 'behind'} the store's"
    return Failure(Then.FAIL, Unavailable, cause, "set the node's clock")


def clock_difference(headers: Mapping[str, str]) -> float | None:
    """Seconds by which this node's clock is ahead of the server's, from the answer's Date header (RFC 9110, 6.6.1)."""
    try:
        return time.time() - parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


def quoted(text: object, form: str) -> str:
    """What a server said, if it has this form; else nothing."""
    return text if isinstance(text, str) and re.fullmatch(form, text, re.ASCII) else ""


def host_of(url: str) -> str:
    """Scheme, host and port of an http(s) URL, without user name, path and query; '' for anything else."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not quoted(host, r"[A-Za-z0-9_.:-]{1,253}"):
        return ""
    return f"{parts.scheme}://{f'[{host}]' if host and ':' in host else host}{f':{port}' if port else ''}"


# Failures without an answer


def _no_answer(cause: str) -> Failure:
    return Failure(Then.REPEAT_AMBIGUOUS, Unavailable, cause, "see -endpoint and -proxy, and this node's network")


def _closed() -> Failure:
    return _no_answer("the connection was closed in the middle")._replace(remedy="see -endpoint and -proxy; is it http or https?")


def _unconnected(inner: Exception) -> Failure:
    return _no_answer(f"no connection: {_system_error(inner)}")._replace(then=Then.REPEAT)


def _system_error(inner: Exception) -> str:
    """In the system's words, not the library's, which quote what was asked for."""
    reason = getattr(inner, "os_error", inner)
    if isinstance(reason, socket.gaierror):
        return quoted(reason.strerror, "[A-Za-z ]{1,60}") or "its name is not known"
    number = getattr(reason, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(reason).__name__


def _untrusted(inner: Exception) -> Failure:
    reason = getattr(inner, "certificate_error", None) or getattr(inner, "os_error", None) or inner
    if isinstance(reason, ssl.SSLCertVerificationError):
        text = reason.verify_message.rstrip(".") or "its certificate can't be verified"
        remedy = "a private CA is named with -ca; for a bucket with dots in its name use -addressing path"
        return Failure(Then.FAIL, Unavailable, f"TLS: {text}", remedy)
    text = getattr(reason, "reason", None) or type(reason).__name__
    return Failure(Then.FAIL, Unavailable, f"TLS: {text}", "is it an https endpoint, and an https proxy?")


def _by_proxy(inner: Exception) -> Failure:
    status = getattr(inner, "status", None)
    if isinstance(status, int):
        then = Then.REPEAT if status >= 500 else Then.FAIL
        return Failure(then, Unavailable, f"the proxy refuses the connection (status {status})", "see -proxy")
    return Failure(Then.REPEAT, Unavailable, f"no connection to the proxy: {_system_error(inner)}", "see -proxy")


_TRANSPORT: dict[type[Exception], Callable[[Exception], Failure]] = {
    SSLError: _untrusted,
    ProxyConnectionError: _by_proxy,
    ConnectTimeoutError: lambda _: Failure(Then.REPEAT, Unavailable, "no connection in time", "see -endpoint and -proxy"),
    ReadTimeoutError: lambda _: _no_answer("no answer in time"),
    ConnectionClosedError: lambda _: _closed(),
    IncompleteReadError: lambda _: _closed(),
    ResponseStreamingError: lambda _: _closed(),
    EndpointConnectionError: _unconnected,
}
