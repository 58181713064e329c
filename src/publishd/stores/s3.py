"""A checkpoint root in an S3-compatible object store: `s3://BUCKET/PREFIX`.

There are no folders, only keys: a folder is what keys have in common. An object appears whole or not at all, and every
listing shows what stands there at once. What is deleted is deleted singly: several at a time want a Content-MD5 that
botocore no longer sends (DeleteObjects).
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from botocore.exceptions import BotoCoreError

from publishd.credentials import LiveCredentials, open_source
from publishd.errors import (
    Denied,
    NotFound,
    NotPublished,
    StoreError,
    TooLarge,
    Unavailable,
    UsageError,
)
from publishd.stores import PRUNE, PUB, Entry, Finding, Kind, Verdict, in_parallel
from publishd.stores.s3_client import MAX_CALLS, Client, S3Settings
from publishd.stores.s3_errors import clock_difference

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncGenerator, Collection, Mapping

    from publishd.credentials import SourceSpec

_KEY_LIMIT = 1024
"""Bytes of a key (Amazon S3 user guide, Naming Amazon S3 objects)."""
_NAME_LIMIT = 255
"""Bytes of one component: SeaweedFS and MinIO keep keys as paths in a file system. No store can be asked for it."""
_IDLE_PAGES = 100
"""Pages in a row that bring nothing new: a few are usual where many versions are hidden, an endless row is not."""
_PIECE = 1 << 20
_PIECE_SECONDS = 20.0
_CLOCK_WARNING_SECONDS, _CLOCK_LIMIT_SECONDS = 60, 900


@dataclass(frozen=True, slots=True)
class Access:
    """What an S3 root needs beside its name. `environ` is the environment that the source of credentials may read."""

    source: SourceSpec
    environ: Mapping[str, str] = field(repr=False)
    settings: S3Settings


def open_s3(root: str, access: Access | None) -> S3Store:
    """The store of an `s3://` root. Raises UsageError for one without access, or with access that can't be used."""
    try:
        bucket, prefix = split_root(root)
    except ValueError as error:
        raise UsageError("bad flag", "-checkpoint", str(error)) from None
    if access is None:
        raise UsageError("missing flag", "-creds", "it is required for an s3:// root", "see --help")
    settings = access.settings
    region = settings.region or access.environ.get("AWS_REGION", "") or access.environ.get("AWS_DEFAULT_REGION", "")
    source = open_source(access.source, access.environ, proxy=settings.proxy, ca=settings.ca, region=region)
    return S3Store(bucket, prefix, LiveCredentials(source), settings)


def split_root(root: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://BUCKET/PREFIX`, the prefix as written, without a trailing slash; '' for the whole bucket.

    Raises ValueError for anything else, and for a prefix with an empty, `.` or `..` component: stores differ in what
    they make of those.
    """
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    if not re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?", bucket, re.ASCII):
        raise ValueError("must be s3://BUCKET/PREFIX with a valid bucket name (and nothing else before the first slash)")
    empty = prefix.startswith("/")
    prefix = prefix.removesuffix("/")
    if empty or (prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/"))):
        raise ValueError("must not have an empty, '.' or '..' component in its prefix")
    if not _is_utf8(prefix):
        raise ValueError("must be UTF-8, as all keys of S3 are")
    return bucket, prefix


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class S3Store:
    """See `publishd.stores.Store`. A cancelled call may have been carried out by the store, but never by half."""

    consistent = True
    concurrency = 16  # each call has a few requests of its own; MAX_CALLS bounds them all

    def __init__(self, bucket: str, prefix: str, live: LiveCredentials, settings: S3Settings) -> None:
        self.root = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._settings = bucket, settings
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = Client(live, settings)

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        start = self._key(f"{folder}/") if folder else self._prefix
        wanted = f"{start}{prefix}"
        folders, files, exists = [], [], not folder or bool(prefix)
        async for page in self._pages("cannot list", folder, wanted, Delimiter="/"):
            folders += [child["Prefix"][len(start) :].removesuffix("/") for child in page.get("CommonPrefixes", ())]
            keys = [child["Key"] for child in page.get("Contents", ())]
            files += [key[len(start) :] for key in keys if key != start]
            exists = exists or start in keys
        if not (exists or folders or files):
            raise NotFound("cannot list", self._path(folder), "there is nothing below it")
        # A file last: where both have one name, who looks for a name finds what can be read.
        found = [(name, Kind.FOLDER) for name in folders] + [(name, Kind.FILE) for name in files]
        return [Entry(name, kind, 0) for name, kind in dict.fromkeys(found)]  # whatever is listed twice is there once

    async def exists(self, key: str) -> bool:
        # What a listing has of it may be a folder that SeaweedFS keeps for minutes after its last file was deleted.
        ways = [self._is_file, self._is_folder]
        if not key.startswith((f"{PUB}/", f"{PRUNE}/")):
            ways.reverse()
        return await ways[0](key) or await ways[1](key)

    async def _is_file(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        return (name, Kind.FILE, 0) in await self.list(folder, name)

    async def _is_folder(self, key: str) -> bool:
        async with aclosing(self._pages("cannot look for", key, self._key(f"{key}/"), MaxKeys=1)) as pages:
            async for page in pages:  # one without keys may be followed by others
                if page.get("Contents"):
                    return True
        return False

    async def read(self, key: str, limit: int) -> bytes:
        async def whole(answer: Any) -> bytes:
            try:
                length = self._length(key, answer)
                if length > limit:
                    raise TooLarge("cannot read", self._path(key), f"larger than {limit} bytes")
                content: bytes = await answer["Body"].read()
            finally:
                answer["Body"].close()
            if len(content) != length:
                raise aiohttp.ClientPayloadError("cut short")
            return content

        content: bytes = await self._object("cannot read", key, "get_object", whole)
        return content

    async def stream(self, key: str) -> AsyncGenerator[bytes, None]:
        async def opened(answer: Any) -> Any:
            return answer

        answer = await self._object("cannot read", key, "get_object", opened)
        body = answer["Body"]
        try:
            left = self._length(key, answer)
            while left:
                async with asyncio.timeout(_PIECE_SECONDS):
                    piece: bytes = await body.read(_PIECE)
                if not piece:
                    raise Unavailable("cannot read", self._path(key), "it was cut short")
                left -= len(piece)
                yield piece
        except (aiohttp.ClientError, BotoCoreError, OSError) as error:
            raise Unavailable("cannot read", self._path(key), f"the connection failed ({type(error).__name__})") from error
        finally:
            body.close()

    def _length(self, key: str, answer: Any) -> int:
        if not answer.get("ETag") or "ContentLength" not in answer:
            raise self._no_store(key, "its answer has no ETag or no length")
        length: int = answer["ContentLength"]
        return length

    async def create(self, key: str) -> None:
        if len(key.rpartition("/")[2].encode()) > await self.name_limit():
            raise Unavailable("cannot create", self._path(key), "the name is too long", "use shorter names")
        await self._put("cannot create", key, IfNoneMatch="*")

    async def make_folder(self, folder: str) -> None:
        """There are no folders."""

    async def move(self, key: str, to: str) -> None:
        if not await self._is_file(key):
            raise NotFound("cannot withdraw", self._path(key), "there is no such object")
        await self._put("cannot record", to)
        await self._delete("cannot withdraw", key)

    async def _put(self, what: str, key: str, **condition: str) -> None:
        # Without a Body: with one, even an empty one, botocore adds `Expect: 100-continue`.
        answer = await self._object(what, key, "put_object", **condition)
        if not answer.get("ETag"):
            raise self._no_store(key, "its answer has no ETag")

    async def delete(self, key: str) -> None:
        await self._delete("cannot delete", key)

    async def _delete(self, what: str, key: str) -> None:
        try:
            answer = (await self._object(what, key, "delete_object"))["ResponseMetadata"]
        except NotFound:
            return  # most stores answer 204 to this, too
        if answer["HTTPStatusCode"] != 204 and answer["HTTPHeaders"].get("content-length") != "0":
            raise self._no_store(key, "its answer to a delete has content, as a web page has")

    async def delete_tree(self, key: str, first: Collection[str] = ()) -> None:
        inside = await self._keys_below(key)
        markers = {f"{key}/{name}" for name in first}
        refused: dict[str, StoreError] = {}

        async def delete(inner: str) -> None:
            try:
                if not {".", ".."}.isdisjoint(inner.split("/")):
                    cause = "some stores take its '.' or '..' for a folder elsewhere"
                    raise Denied("cannot delete", self._path(inner), cause, "delete it by hand")
                await self.delete(inner)
            except StoreError as error:
                refused[inner] = error

        for batch in ([*filter(markers.__contains__, inside)], [key for key in inside if key not in markers]):
            await in_parallel(MAX_CALLS, delete, batch)
        for inner in await self._left_of(key, inside):
            # A lying answer to a delete would make a leftover that nothing names any more.
            refused.setdefault(inner, Unavailable("cannot delete", self._path(inner), "the store says it is gone, and lists it"))
        if refused:
            raise _all_of(refused)

    async def _left_of(self, key: str, deleted: builtins.list[str]) -> builtins.list[str]:
        """What of a deleted tree is listed all the same. Empty folders, which SeaweedFS goes on listing, are deleted."""
        parent, _, name = key.rpartition("/")
        if not any(entry.name == name for entry in await self.list(parent, name)):
            return []
        left, asked = await self._keys_below(key), set(deleted)
        if not left:
            folders = {inner[: slash.end()] for inner in deleted for slash in re.finditer("/", inner)}
            for folder in sorted(folders, key=len, reverse=True):
                if folder.startswith(f"{key}/"):
                    await self.delete(folder)
        return [inner for inner in left if inner in asked]

    async def _keys_below(self, key: str) -> builtins.list[str]:
        """The keys of the file and of all objects below the folder, the folder's own object included."""
        found = [key] if await self._is_file(key) else []
        async for page in self._pages("cannot list", key, self._key(f"{key}/")):
            found += [child["Key"][len(self._prefix) :] for child in page.get("Contents", ())]
        return found

    async def sync(self, key: str, *, recursive: bool) -> None:
        """An object is durable once its PUT is answered."""

    async def locate(self, save: str) -> str:
        key = save.removeprefix(f"{self.root}/") if save.startswith("s3://") else save
        key = key.removesuffix("/")
        if key.startswith(("/", "s3://")) or not key:
            cause = f"it does not lie below the checkpoint root {self.root}"
            which = "SAVE" if "@" in save else save  # s3://KEY:SECRET@… is no address, and shows a secret
            raise NotPublished("cannot publish", which, cause, "a relative SAVE is taken from the root")
        if not _is_utf8(key):
            raise NotPublished("cannot publish", save, "its name is not UTF-8, as all keys of S3 are")
        return key

    async def name_limit(self) -> int:
        """What every store can hold, also below `prune/`, which is where an entry may move to."""
        return min(_NAME_LIMIT, _KEY_LIMIT - len(self._key(f"{PRUNE}/").encode()))

    async def diagnose(self) -> builtins.list[Finding]:
        try:
            answer = await self._page("cannot list", "", self._prefix, Delimiter="/")
        except StoreError as error:
            return [Finding("object store", Verdict.FAIL, str(error))]
        proxy = self._settings.proxy
        return [
            Finding("object store", Verdict.OK, f"complete listings from {self._client.address}, region {self._client.region}"),
            Finding("proxy", Verdict.OK, f"through {proxy}" if proxy else "none"),
            _clock(answer["ResponseMetadata"]["HTTPHeaders"]),
        ]

    async def aclose(self) -> None:
        await self._client.aclose()

    # Requests

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def _key(self, key: str) -> str:
        return f"{self._prefix}{key}"

    async def _object(self, what: str, key: str, operation: str, read: Any = None, **parameters: Any) -> Any:
        self._check_utf8(what, key)
        return await self._client.call(
            what, self._path(key), operation, read, Bucket=self._bucket, Key=self._key(key), **parameters
        )

    async def _pages(self, what: str, folder: str, prefix: str, **parameters: Any) -> AsyncGenerator[dict[str, Any], None]:
        """All pages of a listing, each of them complete."""
        seen: set[str] = set()
        before, idle = None, 0
        while True:
            page = await self._page(what, folder, prefix, **parameters)
            yield page
            token, names = page.get("NextContinuationToken"), _names(page)
            if bool(token) != page["IsTruncated"]:  # botocore takes every word but `true` for false
                raise self._no_store(folder, "its listing does not say clearly whether it goes on")
            if not token:
                return
            idle = idle + 1 if not names or names == before else 0
            if token in seen or idle > _IDLE_PAGES:
                raise self._no_store(folder, "its listing goes on without an end")
            seen.add(token)
            before, parameters["ContinuationToken"] = names, token

    async def _page(self, what: str, folder: str, prefix: str, **parameters: Any) -> dict[str, Any]:
        self._check_utf8(what, prefix)
        try:
            page: dict[str, Any] = await self._client.call(
                what, self._path(folder), "list_objects_v2", Bucket=self._bucket, Prefix=prefix, **parameters
            )
        except NotFound as error:
            raise self._no_store(folder, "it finds no object where a listing was asked for") from error
        if "IsTruncated" not in page or page.get("Name", self._bucket) != self._bucket:
            raise self._no_store(folder, "its answer is no complete listing of the bucket")
        if not all(isinstance(name, str) and name.startswith(prefix) for name in _names(page)):
            raise self._no_store(folder, "its listing has keys that were not asked for")
        return page

    def _check_utf8(self, what: str, key: str) -> None:
        if not _is_utf8(key):
            raise NotFound(what, self._path(key), "its name is not UTF-8, as all keys of S3 are")

    def _no_store(self, key: str, cause: str) -> Unavailable:
        remedy = "is it an S3 store that answers? see -endpoint and -proxy; publishd probe tells more"
        return Unavailable("cannot believe the store", self._path(key), cause, remedy)


def _names(page: Mapping[str, Any]) -> list[Any]:
    keys = [child.get("Key") for child in page.get("Contents", ())]
    return keys + [child.get("Prefix") for child in page.get("CommonPrefixes", ())]


def _all_of(refused: Mapping[str, StoreError]) -> StoreError:
    """One error for all keys that could not be deleted: it names each of them, up to a few."""
    error, *others = refused.values()
    if not others:
        return error
    named = ", ".join(key.rpartition("/")[2] or key for key in [*refused][1:4])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return type(error)(error.what, error.which, f"{error.cause}; the same of {named}{more}", error.remedy)


def _clock(headers: Mapping[str, str]) -> Finding:
    ahead = clock_difference(headers)
    if ahead is None:
        return Finding("clock", Verdict.WARN, "the store tells no time")
    seconds = abs(ahead)
    verdict = Verdict.OK if seconds < _CLOCK_WARNING_SECONDS else Verdict.WARN
    if seconds > _CLOCK_LIMIT_SECONDS:
        verdict = Verdict.FAIL
    return Finding("clock", verdict, f"this node is {seconds:.0f} s {'ahead of' if ahead > 0 else 'behind'} the store")


__all__ = ["Access", "S3Settings", "S3Store", "open_s3", "split_root"]
