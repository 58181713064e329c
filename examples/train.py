"""A stand-in for a trainer: no model, but the files that transformers.Trainer writes, in its order, slowly.

A save takes long enough that a kill can hit the middle of it. Told by SIGTERM or SIGUSR1 it saves once more and ends, with
status 0. What the options leave open comes from MAX_STEPS, SAVE_STEPS, STEP_SECONDS and SAVE_SECONDS in the environment,
so that a job script needn't pass it on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path

MODEL = "model.safetensors"
STATE = "trainer_state.json"
# Trainer's order; its state is written last, which is what makes it the completion marker.
FILES = (
    "config.json",
    "generation_config.json",
    MODEL,
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    STATE,
)


def main() -> None:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: told.append(number))
    options = arguments()
    state = {"global_step": 0, "max_steps": options.max_steps, "log_history": []}
    say(f"process {os.getpid()}")
    if options.resume_from_checkpoint:
        state.update(read_save(options.resume_from_checkpoint), max_steps=options.max_steps)
        say(f"resuming from {options.resume_from_checkpoint} at step {state['global_step']}")
    for step in range(state["global_step"] + 1, options.max_steps + 1):
        time.sleep(options.step_seconds)
        state["global_step"] = step
        state["log_history"].append({"step": step, "loss": round(4 / (1 + step / 10), 4)})
        saving = step % options.save_steps == 0 or step == options.max_steps or bool(told)
        if saving:
            save = options.output_dir / f"checkpoint-{step}"
            say(f"saving {save.name}")
            write_save(save, state, options.save_seconds / len(FILES))
        if saving and told:
            say(f"told to end by {signal.Signals(told[0]).name}")
            break
    say(f"ended at step {state['global_step']}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume_from_checkpoint", type=Path)
    parser.add_argument("--max_steps", type=int, default=os.environ.get("MAX_STEPS", "40"))
    parser.add_argument("--save_steps", type=int, default=os.environ.get("SAVE_STEPS", "10"))
    parser.add_argument("--step-seconds", type=float, default=os.environ.get("STEP_SECONDS", "0.02"))
    parser.add_argument("--save-seconds", type=float, default=os.environ.get("SAVE_SECONDS", "0.4"))
    return parser.parse_args()


def say(what: str) -> None:
    # A path may have bytes that are not text; they go out as they came in.
    os.write(1, f"train.py: {what}\n".encode("utf-8", "surrogateescape"))


def read_save(save: Path) -> dict[str, object]:
    """The state in a save; ends the program where the save is not whole, as a real trainer would sooner or later."""
    missing = [name for name in FILES if not (save / name).is_file()]
    if missing:
        sys.exit(f"train.py: cannot resume from {save}: {', '.join(missing)} missing")
    state: dict[str, object] = json.loads((save / STATE).read_bytes())
    if save.name != f"checkpoint-{state['global_step']}" or weight(save / MODEL) != state["global_step"]:
        sys.exit(f"train.py: cannot resume from {save}: its parts are not of one step")
    return state


def write_save(save: Path, state: dict[str, object], pause: float) -> None:
    save.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        time.sleep(pause)
        if name == MODEL:
            # The one file that Trainer renames into place; it writes all others where they stand.
            part = save / f".{MODEL}.part"
            part.write_bytes(safetensors(state["global_step"]))
            part.rename(save / name)
        elif name.endswith(".json"):
            (save / name).write_text(json.dumps(state if name == STATE else {"model_type": "stand-in"}))
        else:
            (save / name).write_bytes(os.urandom(64))


def safetensors(step: object) -> bytes:
    """A valid safetensors file with one tensor of one number, the step."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", step)


def weight(file: Path) -> float:
    (number,) = struct.unpack("<f", file.read_bytes()[-4:])
    return float(number)


if __name__ == "__main__":
    main()
