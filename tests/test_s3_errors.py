"""What one failed attempt at an S3 store means: whether to try again, which error it is, and in which words."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ParamValidationError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)

from publishd.errors import AlreadyExists, Denied, NoCredentials, NoSpace, NotFound, NotSupported, StoreError, Unavailable
from publishd.stores.s3_errors import Redirected, Then, clock_difference, failure, host_of, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

FAIL, REPEAT, AMBIGUOUS, RENEW = Then.FAIL, Then.REPEAT, Then.REPEAT_AMBIGUOUS, Then.RENEW
SECRET = "s3cr3t-of-the-request"
URL = f"https://s3.example/bucket?X-Amz-Signature={SECRET}"


def answered(status: int, code: str | None = None, headers: Mapping[str, str] | None = None, **said: Any) -> ClientError:
    """An error as botocore makes it of an answer, which says a secret wherever an answer can."""
    told = {"Message": SECRET, "StringToSign": SECRET, **said} | ({"Code": code} if code is not None else {})
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {"x-amz-request-id": SECRET, **(headers or {})}, "RequestId": SECRET}
    return ClientError({"Error": told, "ResponseMetadata": metadata}, "PutObject")


@pytest.mark.parametrize(
    ("status", "code", "then", "error", "says"),
    [
        (412, "PreconditionFailed", FAIL, AlreadyExists, "it exists"),
        (412, None, FAIL, AlreadyExists, "it exists"),
        (409, "ConditionalRequestConflict", REPEAT, Unavailable, "409, ConditionalRequestConflict"),
        (409, "OperationAborted", REPEAT, Unavailable, "409, OperationAborted"),
        (409, None, REPEAT, Unavailable, "409"),
        (400, "OperationAborted", REPEAT, Unavailable, "something else"),
        (500, "InternalError", AMBIGUOUS, Unavailable, "500, InternalError"),
        (502, None, AMBIGUOUS, Unavailable, "502"),
        (503, "SlowDown", AMBIGUOUS, Unavailable, "503, SlowDown"),
        (503, "ServiceUnavailable", AMBIGUOUS, Unavailable, "503"),
        (504, None, AMBIGUOUS, Unavailable, "504"),
        (429, "TooManyRequests", AMBIGUOUS, Unavailable, "429"),
        (400, "SlowDown", AMBIGUOUS, Unavailable, "SlowDown"),
        (400, "Throttling", AMBIGUOUS, Unavailable, "Throttling"),
        (200, "InternalError", AMBIGUOUS, Unavailable, "InternalError"),
        (400, "RequestTimeout", AMBIGUOUS, Unavailable, "in vain"),
        (501, None, FAIL, NotSupported, "lacks"),
        (501, "NotImplemented", FAIL, NotSupported, "lacks"),
        (400, "NotImplemented", FAIL, NotSupported, "lacks"),
        (400, "ExpiredToken", RENEW, NoCredentials, "expired"),
        (403, "ExpiredToken", RENEW, NoCredentials, "expired"),
        (400, "InvalidToken", RENEW, NoCredentials, "not valid"),
        (400, "TokenRefreshRequired", RENEW, NoCredentials, "expired"),
        (403, "InvalidAccessKeyId", RENEW, NoCredentials, "does not know the access key"),
        (403, "InvalidClientTokenId", RENEW, NoCredentials, "does not know the access key"),
        (403, "SignatureDoesNotMatch", RENEW, NoCredentials, "signature wrong"),
        (403, "AccessDenied", FAIL, Denied, "denies access"),
        (403, None, FAIL, Denied, "denies access"),
        (403, "AllAccessDisabled", FAIL, Denied, "denies access"),
        (404, "NoSuchBucket", FAIL, Unavailable, "no such bucket"),
        (404, "NoSuchKey", FAIL, NotFound, "no such object"),
        (507, None, FAIL, NoSpace, "full"),
        (403, "QuotaExceeded", FAIL, NoSpace, "quota"),
        (507, "XMinioStorageFull", FAIL, NoSpace, "full"),
        (400, "KeyTooLongError", FAIL, Unavailable, "too long"),
        (407, None, FAIL, Unavailable, "proxy"),
        (403, "RequestTimeTooSkewed", FAIL, Unavailable, "clock"),
        (301, "PermanentRedirect", FAIL, Unavailable, "another region than us-east-1"),
        (400, "AuthorizationHeaderMalformed", FAIL, Unavailable, "another region than us-east-1"),
        (400, "InvalidRequest", FAIL, Unavailable, "400, InvalidRequest"),
        (401, None, FAIL, Unavailable, "401"),
        (405, "MethodNotAllowed", FAIL, Unavailable, "405, MethodNotAllowed"),
        (418, None, FAIL, Unavailable, "418"),
    ],
)
def test_answers(status: int, code: str | None, then: Then, error: type[StoreError], says: str) -> None:
    """Every answer has its meaning, by its code before its status, and what it says besides is not repeated."""
    found = failure(answered(status, code), "us-east-1")
    assert (found.then, found.error) == (then, error)
    assert says in found.cause
    assert SECRET not in f"{found.cause} {found.remedy}"


@pytest.mark.parametrize("code", [None, "", "404", "Not Found", "x" * 100])
def test_a_404_of_nobody_known_says_nothing_of_an_object(code: str | None) -> None:
    """Without a store's own code it may come from any web server or proxy: it does not mean that there is no object."""
    found = failure(answered(404, code), "us-east-1")
    assert (found.then, found.error) == (FAIL, Unavailable)
    assert "404" in found.cause
    assert "-endpoint" in found.remedy


@pytest.mark.parametrize(
    "code", [SECRET * 9, f"No {SECRET}", f"<{SECRET}>", "x\x1b[31m", "é", "1", "", 5, ["a"], {"b": "c"}, None]
)
@pytest.mark.parametrize("status", [200, 400, 403, 500])
def test_codes_that_are_none(code: Any, status: int) -> None:
    """What has not the form of a code is not repeated and decides nothing."""
    found = failure(answered(status, code), "us-east-1")
    assert issubclass(found.error, StoreError)
    assert not re.search(f"{SECRET}|\x1b|é", f"{found.cause} {found.remedy}")


@pytest.mark.parametrize("response", [{}, {"Error": {}}, {"ResponseMetadata": {}}, {"Error": {"Code": "SlowDown"}}])
def test_answers_of_which_little_is_known(response: dict[str, Any]) -> None:
    """Whatever botocore leaves out, there is an error with words."""
    found = failure(ClientError(response, "PutObject"), "us-east-1")
    assert found.error is Unavailable
    assert found.cause


@pytest.mark.parametrize(
    ("headers", "region", "says"),
    [
        ({"x-amz-bucket-region": "eu-west-1"}, None, "in region eu-west-1, not us-east-1"),
        ({}, "eu-central-1", "in region eu-central-1, not us-east-1"),
        ({"x-amz-bucket-region": "eu-west-1"}, "us-west-2", "in region eu-west-1, not us-east-1"),
        ({"x-amz-bucket-region": "us-east-1"}, None, "another region than us-east-1, or another address"),
        ({"x-amz-bucket-region": f"{SECRET}.example/"}, None, "another region than us-east-1, or another address"),
        ({}, f"@{SECRET}", "another region than us-east-1, or another address"),
        ({}, ["eu-west-1"], "another region than us-east-1, or another address"),
        ({}, None, "another region than us-east-1, or another address"),
    ],
)
def test_another_region(headers: Mapping[str, str], region: object, says: str) -> None:
    """A region is named if it has the form of one and is another."""
    found = failure(answered(400, "AuthorizationHeaderMalformed", headers, Region=region), "us-east-1")
    assert says in found.cause
    assert found.remedy == (f"set -region {says.split()[2].rstrip(',')}" if says.startswith("in") else found.remedy)
    assert SECRET not in f"{found.cause} {found.remedy}"


@pytest.mark.parametrize(
    ("minutes", "says"),
    [(20, "20 minutes behind the store's"), (-45, "45 minutes ahead of the store's"), (None, "differ too much")],
)
def test_the_clock(minutes: int | None, says: str) -> None:
    """How far this node's clock is off is said in minutes where the answer has a date."""
    headers = {} if minutes is None else {"date": formatdate(time.time() + 60 * minutes, usegmt=True)}
    found = failure(answered(403, "RequestTimeTooSkewed", headers), "us-east-1")
    assert says in found.cause
    assert "clock" in found.cause


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 01 Jan 99999 00:00:00 GMT", "Mon, 32 Jan 2029 00:00:00 GMT", "1e999"])
def test_dates_that_are_none(date: str) -> None:
    """A date that nobody can read is no date."""
    assert clock_difference({"date": date}) is None


def test_the_difference_of_clocks() -> None:
    """It is positive where this node is ahead."""
    ahead = clock_difference({"date": formatdate(time.time() - 100, usegmt=True)})
    assert ahead is not None
    assert 99 < ahead < 130


# Failures without an answer

KEY = ConnectionKey("s3.example", 443, True, True, None, None, None, None)


def unconnected(error: OSError) -> EndpointConnectionError:
    return EndpointConnectionError(endpoint_url=URL, error=aiohttp.ClientConnectorError(KEY, error))


def proxy(error: Exception) -> ProxyConnectionError:
    return ProxyConnectionError(proxy_url=f"http://user:{SECRET}@proxy:1", error=error)


def refusing(status: int) -> ProxyConnectionError:
    request: Any = SimpleNamespace(real_url=URL)
    return proxy(aiohttp.ClientHttpProxyError(request, (), status=status, message=SECRET))


def no_http() -> aiohttp.ClientResponseError:
    request: Any = SimpleNamespace(real_url=URL)
    return aiohttp.ClientResponseError(request, (), message=SECRET)


def untrusted(text: str) -> SSLError:
    reason = ssl.SSLCertVerificationError(1, SECRET)
    reason.verify_message = text
    return SSLError(endpoint_url=URL, error=aiohttp.ClientConnectorCertificateError(KEY, reason))


def no_tls(reason: str) -> SSLError:
    error = ssl.SSLError(1, SECRET)
    error.reason = reason
    return SSLError(endpoint_url=URL, error=aiohttp.ClientConnectorSSLError(KEY, error))


def combined() -> OSError:
    return OSError(errno.ECONNREFUSED, f"Multiple exceptions: {SECRET}")


TRANSPORT: dict[str, tuple[Exception, Then, str]] = {
    "outer time-out": (TimeoutError(), AMBIGUOUS, "no answer in time"),
    "time-out of reading": (
        ReadTimeoutError(endpoint_url=URL, error=aiohttp.ServerTimeoutError()),
        AMBIGUOUS,
        "no answer in time",
    ),
    "time-out while a body is read": (aiohttp.SocketTimeoutError(SECRET), AMBIGUOUS, "no answer in time"),
    "time-out of connecting": (ConnectTimeoutError(endpoint_url=URL, error=TimeoutError()), REPEAT, "no connection in time"),
    "closed": (
        ConnectionClosedError(endpoint_url=URL, error=aiohttp.ServerDisconnectedError()),
        AMBIGUOUS,
        "closed in the middle",
    ),
    "cut": (aiohttp.ClientPayloadError(SECRET), AMBIGUOUS, "the connection"),
    "reset": (ConnectionResetError(errno.ECONNRESET, SECRET), AMBIGUOUS, "the connection"),
    "refused": (unconnected(ConnectionRefusedError(errno.ECONNREFUSED, SECRET)), REPEAT, "Connection refused"),
    "refused by several": (unconnected(combined()), REPEAT, "Connection refused"),
    "unreachable": (unconnected(OSError(errno.ENETUNREACH, SECRET)), REPEAT, os.strerror(errno.ENETUNREACH)),
    "no host": (
        unconnected(socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
        REPEAT,
        "Name or service not known",
    ),
    "proxy refused": (
        proxy(aiohttp.ClientProxyConnectionError(KEY, ConnectionRefusedError(errno.ECONNREFUSED, SECRET))),
        REPEAT,
        "no connection to the proxy: Connection refused",
    ),
    "proxy 407": (refusing(407), FAIL, "the proxy refuses the connection (status 407)"),
    "proxy 403": (refusing(403), FAIL, "the proxy refuses the connection (status 403)"),
    "proxy 503": (refusing(503), REPEAT, "the proxy refuses the connection (status 503)"),
    "certificate": (untrusted("self-signed certificate"), FAIL, "TLS: self-signed certificate"),
    "host name": (untrusted("Hostname mismatch, certificate is not valid for 'x'."), FAIL, "certificate is not valid for 'x'"),
    "no TLS": (no_tls("WRONG_VERSION_NUMBER"), FAIL, "TLS: WRONG_VERSION_NUMBER"),
    "redirect": (HTTPClientError(error=Redirected(302, "https://login.example", "")), FAIL, "redirect to https://login.example"),
    "redirect to nowhere": (HTTPClientError(error=Redirected(302, "", "")), FAIL, "a redirect (status 302)"),
    "redirect by region": (HTTPClientError(error=Redirected(301, "", "eu-west-1")), FAIL, "in region eu-west-1"),
    "parameters": (ParamValidationError(report=SECRET), FAIL, "the request can't be made"),
    "no HTTP": (HTTPClientError(error=no_http()), AMBIGUOUS, "ClientResponseError"),
    "anything else": (HTTPClientError(error=KeyError(SECRET)), AMBIGUOUS, "KeyError"),
    "a bug of a library": (TypeError(SECRET), AMBIGUOUS, "TypeError"),
}


@pytest.mark.parametrize(("error", "then", "says"), TRANSPORT.values(), ids=TRANSPORT)
def test_failures_without_an_answer(error: Exception, then: Then, says: str) -> None:
    """Each says what failed, and whether it may have been done; URLs and texts of libraries are not repeated."""
    found = failure(error, "us-east-1")
    assert (found.then, found.error) == (then, Unavailable)
    assert says in found.cause
    assert SECRET not in f"{found.cause} {found.remedy}"


@pytest.mark.parametrize("name", [name for name in TRANSPORT if name not in ("redirect by region", "parameters")])
def test_each_says_what_to_check(name: str) -> None:
    """A failure on the way names the flags that say the way."""
    assert re.search("-endpoint|-proxy|https|-ca|proxy", failure(TRANSPORT[name][0], "us-east-1").remedy)


# What is quoted


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://s3.example", "https://s3.example"),
        ("http://127.0.0.1:9000/bucket?x=y#z", "http://127.0.0.1:9000"),
        (f"https://user:{SECRET}@s3.example:1/", "https://s3.example:1"),
        ("http://[::1]:80/", "http://[::1]:80"),
        ("//s3.example/x", ""),
        ("/relative", ""),
        ("", ""),
        ("https://s3.example:99999/", ""),
        ("https://s3.\x1b[31m.example/", ""),
        ("https://[broken/", ""),
        ("https://s 3/", ""),
        (f"{'a' * 3000}://s3.example/", ""),
        ("javascript://s3.example/", ""),
        (f"https://{'a' * 300}.example/", ""),
    ],
)
def test_of_a_url_only_the_host_is_said(url: str, host: str) -> None:
    """Scheme, host and port, or nothing where that is no address of a server."""
    assert host_of(url) == host


@pytest.mark.parametrize(
    ("text", "kept"), [("ab", "ab"), ("a\n", ""), ("a" * 9, ""), ("é", ""), (None, ""), (5, ""), (["a"], "")]
)
def test_only_what_has_the_form_is_quoted(text: object, kept: str) -> None:
    """Anything else that a server says is nothing."""
    assert quoted(text, "[a-z]{1,8}") == kept
