"""Blocking calls in daemon threads: nothing at exit waits for them, nor does whoever was cancelled while they ran."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

from publishd.credentials.base import NotNow

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_daemon(call: Callable[[], T], seconds: float) -> T:
    """What `call()` returns or raises; TimeoutError after so long, with the call still running and its outcome lost.

    The loop's own threads are no place for it: a loop that is closed waits for them. Raises NotNow where no thread
    is to be had.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=run, name="credentials", daemon=True).start()
    except RuntimeError as error:
        raise NotNow("no credentials", "cannot start a thread", str(error), "see ulimit -u and the cgroup's pids.max") from None
    async with asyncio.timeout(seconds):
        return await future
