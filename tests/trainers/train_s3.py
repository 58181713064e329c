"""The stand-in of examples/train.py for an S3 root: each file of a save is uploaded when it is written, in the same order.

It takes s3:// URLs, and the store and its keys from STORE_ENDPOINT, STORE_ACCESS_KEY and STORE_SECRET_KEY: a trainer has
credentials of its own. A save that it resumes from is downloaded first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "examples")]

import train  # type: ignore[import-not-found]  # noqa: E402 - the stand-in on a folder

from services.places import Keys, Refused, S3Service  # noqa: E402


def main() -> None:
    options = arguments()
    store = S3Service(os.environ["STORE_ENDPOINT"], Keys(os.environ["STORE_ACCESS_KEY"], os.environ["STORE_SECRET_KEY"]))
    state = {"global_step": 0, "max_steps": options.max_steps, "log_history": []}
    train.say(f"process {os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        if options.resume_from_checkpoint:
            state.update(train.read_save(download(store, options.resume_from_checkpoint, Path(folder))))
            train.say(f"resuming from {options.resume_from_checkpoint} at step {state['global_step']}")
        for step in range(state["global_step"] + 1, options.max_steps + 1):
            state["global_step"] = step
            if step % options.save_steps == 0:
                save = Path(folder, f"checkpoint-{step}")
                train.say(f"saving {save.name}")
                train.write_save(save, state, 0)
                upload(store, save, f"{options.output_dir}/{save.name}", options.save_seconds / len(train.FILES))
    store.close()
    train.say(f"ended at step {state['global_step']}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--max_steps", type=int, default=os.environ.get("MAX_STEPS", "40"))
    parser.add_argument("--save_steps", type=int, default=os.environ.get("SAVE_STEPS", "10"))
    parser.add_argument("--save-seconds", type=float, default=os.environ.get("SAVE_SECONDS", "0.4"))
    return parser.parse_args()


def path_of(url: str) -> str:
    """What a path-style request asks for."""
    assert url.startswith("s3://"), url
    return url.removeprefix("s3:/")


def upload(store: S3Service, save: Path, url: str, pause: float) -> None:
    for name in train.FILES:
        time.sleep(pause)
        store.request("PUT", f"{path_of(url)}/{name}", body=(save / name).read_bytes())


def download(store: S3Service, url: str, folder: Path) -> Path:
    save = folder / url.rpartition("/")[2]
    save.mkdir()
    for name in train.FILES:
        try:
            (save / name).write_bytes(store.request("GET", f"{path_of(url)}/{name}"))
        except Refused:
            pass  # read_save says what is missing
    return save


if __name__ == "__main__":
    main()
