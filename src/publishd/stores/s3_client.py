"""Requests to an S3-compatible store: signed with live credentials, through the named proxy or none, bounded and repeated.

What botocore and aiohttp would do on their own is turned off where it loses data or leaks: redirects are not followed,
a dropped PUT is not silently sent again, no proxy, endpoint or file of the environment is used, no checksum trailer makes
an empty body one of 36 bytes. Each of these has its test, since some rest on what these libraries keep private.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentialResolver, AioCredentials
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import ClientError

from publishd.errors import AlreadyExists, NoCredentials, PerhapsOurs, PublishdError
from publishd.stores.s3_errors import UNKNOWN_KEY, Endless, Failure, Redirected, Then, failure, host_of, quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from publishd.credentials import Credentials, LiveCredentials

MAX_CALLS = 32
"""Deletes at once, and as many other requests: a prune never takes all turns from publishing."""

_CONNECT_SECONDS, _READ_SECONDS = 5, 10
_ATTEMPT_SECONDS, _ATTEMPT_SECONDS_WITH_CONTENT = 20.0, 60.0
_ATTEMPTS = 8
_PATIENCE_SECONDS = 30.0
"""No attempt begins later than this after the first."""
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_SETTLING_SECONDS = 15.0
"""For so long a store may not know keys that were just made (IAM is eventually consistent)."""
_CLOSE_SECONDS = 2.0
_LARGEST_ANSWER = 16 << 20
"""Bytes of a listing, an error or a marker that is decoded here; a thousand keys of 1 KB are 2 MiB."""
_DEFAULT_REGION = "us-east-1"
# (name in a file, variable, default, conversion) of botocore's settings that would read ~/.aws or name a profile in it.
_NO_FILES = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach the store; what is empty is not given. `addressing` is auto, path or virtual."""

    proxy: str = ""
    endpoint: str = ""
    region: str = ""
    ca: str = ""
    addressing: str = "auto"


class Client:
    """S3 requests of one root, by the names that botocore gives them; `which` in errors is the caller's to say."""

    def __init__(self, live: LiveCredentials, settings: S3Settings) -> None:
        self._live, self._settings = live, settings
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._turns, self._turns_of_deletes = asyncio.Semaphore(MAX_CALLS), asyncio.Semaphore(MAX_CALLS)
        self.region = ""

    async def call(
        self,
        what: str,
        which: str,
        operation: str,
        read: Callable[[Any], Awaitable[Any]] | None = None,
        **parameters: Any,
    ) -> Any:
        """The answer to the request, after at most 8 attempts that begin within 30 s, each bounded; or what `read` makes of it.

        Raises a StoreError that says `what` could not be done to `which`, and why. PerhapsOurs takes the place of
        AlreadyExists where an attempt before may have been carried out although its answer was lost.
        """
        turns = self._turns_of_deletes if operation == "delete_object" else self._turns

        async def attempt() -> Any:
            async with turns:  # not while it waits for the next one
                return await self._attempt(operation, parameters, read)

        return await self._repeated(what, which, attempt)

    async def _repeated(self, what: str, which: str, attempt: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        last_start = loop.time() + _PATIENCE_SECONDS
        wait, ambiguous, renewed = _FIRST_WAIT, False, False
        for left in range(_ATTEMPTS - 1, -1, -1):
            used = await self._live.get()
            try:
                return await attempt()
            except PublishdError:
                raise
            except Exception as error:  # an answer that makes no sense brings botocore's parsers to any
                found = failure(error, self.region)
                if not isinstance(error, ClientError):  # nothing of the store is in it yet
                    found = found._replace(cause=f"{self.address}: {found.cause}")
            ambiguous = ambiguous or found.then is Then.REPEAT_AMBIGUOUS
            settling = found == UNKNOWN_KEY and used.minted and self._live.age < _SETTLING_SECONDS
            if found.then is Then.RENEW and not renewed and not settling:
                renewed = True
                await self._renew(used, found, what, which)
                continue
            pause = wait * random.uniform(0.5, 1)  # noqa: S311 - it spreads clients out, no more
            worth_it = settling or found.then in (Then.REPEAT, Then.REPEAT_AMBIGUOUS)
            if not left or loop.time() + pause > last_start or not worth_it:
                break
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)
        kind = PerhapsOurs if ambiguous and found.error is AlreadyExists else found.error
        raise kind(what, which, found.cause, found.remedy)

    async def _renew(self, rejected: Credentials, found: Failure, what: str, which: str) -> None:
        try:
            await self._live.renew(rejected)
        except NoCredentials as error:
            raise NoCredentials(what, which, f"{found.cause}; {error}", found.remedy) from None

    async def _attempt(self, operation: str, parameters: Mapping[str, Any], read: Callable[[Any], Awaitable[Any]] | None) -> Any:
        # Behind a proxy that never answers CONNECT neither of aiohttp's time-outs runs.
        async with asyncio.timeout(_ATTEMPT_SECONDS_WITH_CONTENT if read else _ATTEMPT_SECONDS):
            client = await self._connected()
            answer = await getattr(client, operation)(**parameters)
            return await read(answer) if read else answer

    @property
    def address(self) -> str:
        """Scheme, host and port of the endpoint, once there is a connection."""
        return host_of(self._client.meta.endpoint_url) if self._client else host_of(self._settings.endpoint)

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect(await self._live.get())
        return self._client

    async def _connect(self, credentials: Credentials) -> Any:
        settings = self._settings
        self.region = settings.region or credentials.region or _DEFAULT_REGION
        session = AioSession(session_vars=_NO_FILES)
        session.register_component("credential_provider", AioCredentialResolver([_Provider(self._live)]))
        config = _config(settings)
        session.set_default_client_config(config)
        client = session.create_client(
            "s3",
            region_name=self.region,
            endpoint_url=settings.endpoint or credentials.endpoint or None,
            verify=settings.ca or True,
            config=config,
        )
        connected = await self._stack.enter_async_context(client)
        connected.meta.events.register("before-call.s3", _stay_with_this_region)
        return connected

    async def aclose(self) -> None:
        """Close the connections, and whatever the source of credentials holds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._stack.aclose()
        await self._live.aclose()


def _config(settings: S3Settings) -> AioConfig:
    proxies = {"http": settings.proxy, "https": settings.proxy} if settings.proxy else {}
    return AioConfig(
        proxies=proxies,
        proxies_config={"proxy_ca_bundle": settings.ca} if settings.ca and settings.proxy else None,
        signature_version="s3v4",
        s3={"addressing_style": settings.addressing},
        # An empty PUT over https would become a chunked body of 36 bytes, which other stores keep as content.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": 1},
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        max_pool_connections=2 * MAX_CALLS,
        ignore_configured_endpoint_urls=True,
        http_session_cls=StrictSession,
    )


class StrictSession(AIOHTTPSession):  # type: ignore[misc]
    """Sends each request once, to the host it is meant for."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        if session._retry_connection:
            # It would send a PUT again whose connection dropped, and hand on the 412 that the first one caused.
            session._retry_connection = False
            session.trace_configs.append(_distrust())
        return session


def _distrust() -> aiohttp.TraceConfig:
    """Neither follow a redirect nor read an answer without an end.

    Left alone, aiohttp follows with the Authorization header in hand, and a login page's 200 looks like an object made.
    """

    async def refuse(_session: Any, _context: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
        headers = redirect.response.headers
        region = quoted(headers.get("x-amz-bucket-region"), "[a-z0-9-]{1,40}")
        raise Redirected(redirect.response.status, host_of(headers.get("Location", "")), region)

    async def bound(_session: Any, _context: Any, end: aiohttp.TraceRequestEndParams) -> None:
        end.response.content = _Bounded(end.response.content)  # type: ignore[assignment]

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    trace.on_request_end.append(bound)
    trace.freeze()
    return trace


class _Bounded:
    """An answer's content, of which no more than `_LARGEST_ANSWER` is read at once."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self, amount: int = -1) -> bytes:
        """So many bytes at most, or all there are. Raises Endless."""
        if amount >= 0:
            return await self._content.read(amount)
        found = bytearray()
        while piece := await self._content.readany():
            found += piece
            if len(found) > _LARGEST_ANSWER:
                raise Endless
        return bytes(found)


def _stay_with_this_region(context: dict[str, Any], **_: Any) -> None:
    """Mark the request as redirected already: botocore would ask HeadBucket for the region, and send it there."""
    context.setdefault("s3_redirect", {})["redirected"] = True


class _Provider:
    """Botocore's way to credentials."""

    METHOD = CANONICAL_NAME = "publishd"

    def __init__(self, live: LiveCredentials) -> None:
        self._live = live

    async def load(self) -> _Signing:
        return _Signing(self._live)


class _Signing(AioCredentials):  # type: ignore[misc]
    """The credentials that are live when a request is signed."""

    def __init__(self, live: LiveCredentials) -> None:
        super().__init__("", "")
        self._live = live

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        now = await self._live.get()
        return ReadOnlyCredentials(now.access_key, now.secret_key, now.session_token or None)
