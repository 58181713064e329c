"""A real torch.distributed.checkpoint on the CPU: folders step-N/, by one process, or by several gloo ranks under torchrun.

`--output_dir DIR [--mode sync|async] [--max_steps N] [--save_steps N] [--die-in-save STEP]` trains. In the save that
--die-in-save names, the last rank is killed by SIGKILL once it has written its shard.

`--check SAVE…` loads each save whole, in one process, and prints `SAVE STEP`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ROWS = 4096


class MortalWriter(FileSystemWriter):  # type: ignore[misc]
    """The writer as it is, but for what may befall the last rank."""

    dies = False

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        written = super().write_data(*arguments, **options)
        if self.dies and RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def state(step: int) -> dict[str, Any]:
    """A model all of whose weights are the step, sharded over the ranks, and the step itself."""
    weights = torch.full((ROWS, 8), float(step))
    if WORLD > 1:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        weights = distribute_tensor(weights, init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    return {"weights": weights, "step": torch.tensor(step)}


def train(options: argparse.Namespace) -> None:
    if WORLD > 1 or options.mode == "async":
        dist.init_process_group("gloo")
    pending: Any = None
    for step in range(options.save_steps, options.max_steps + 1, options.save_steps):
        time.sleep(options.step_seconds)
        writer = MortalWriter(f"{options.output_dir}/step-{step}")
        writer.dies = step == options.die_in_save
        if pending is not None:
            pending.result()
        if options.mode == "sync":
            dcp.save(state(step), storage_writer=writer)
        else:
            pending = dcp.async_save(state(step), storage_writer=writer)
    if pending is not None:
        pending.result()
    if dist.is_initialized():
        dist.destroy_process_group()


def check(save: str) -> int:
    loaded = {"weights": torch.zeros(ROWS, 8), "step": torch.tensor(0)}
    dcp.load(loaded, checkpoint_id=save, no_dist=True)
    step = int(loaded["step"])
    assert torch.equal(loaded["weights"], torch.full((ROWS, 8), float(step))), save
    return step


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--die-in-save", type=int, default=-1)
    parser.add_argument("--check", nargs="+", default=[])
    options = parser.parse_args()
    for save in options.check:
        print("checked", save, check(save), flush=True)
    if options.output_dir:
        train(options)


if __name__ == "__main__":
    main()
