"""A process that has imported publishd already, and forks one command after the other: each saves a start of 0.1 s.

It is told on stdin, one JSON object a line, and answers so on stdout. What runs is publishd's own `main`, in a process of its
own, with the environment, the arguments and the streams that it is given; the shim of `injected.c` is attached to it alone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from typing import Any, NoReturn

_PDEATHSIG, _KILL = 1, 9


def _become(request: dict[str, Any]) -> NoReturn:
    ctypes.CDLL(None).prctl(_PDEATHSIG, _KILL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for fd, file in enumerate((os.open(os.devnull, os.O_RDONLY), os.open(request["out"], flags), os.open(request["err"], flags))):
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["publishd", *request["arguments"]]
    if request["control"] and ctypes.CDLL(None).injected_attach(os.fsencode(request["control"])):
        os._exit(99)
    try:
        from publishd.__main__ import main

        main()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve() -> None:
    import aiofiles  # noqa: F401 - all that commands on a folder import
    import uvloop  # noqa: F401

    import publishd.cli
    import publishd.probe
    import publishd.prune
    import publishd.run
    import publishd.stores.filesystem
    import publishd.stores.posix
    import publishd.systemd
    import publishd.watch

    # The wait between two tries of a drain, which is not what these tests are about.
    publishd.watch._RETRY_INTERVAL = 0.02
    gc.collect()
    gc.freeze()  # what is not looked at after a fork need not be copied
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _become(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
