"""A real transformers.Trainer on the CPU: a tiny GPT-2 made from a config, random texts, nothing downloaded.

`--output_dir DIR [--resume_from_checkpoint DIR]` trains; the rest comes from the environment, since job scripts do not
pass it on: MAX_STEPS, SAVE_STEPS, STEP_SECONDS, SAVE_TOTAL_LIMIT, JIT=1 (Trainer's own way to save on SIGTERM; without,
a callback saves), DIE_IN_SAVE=STEP (SIGKILL to itself between optimizer.pt and trainer_state.json), HANG_IN_SAVE=STEP
(there it waits to be killed).

`--check SAVE…` loads each save in every way a user would, trains one step on from it, and prints `SAVE STEP`.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY = 64


def setting(name: str) -> int:
    return int(os.environ.get(name, "0"))


class RandomTexts(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": text, "labels": text}


class Pace(TrainerCallback):  # type: ignore[misc]
    """Gives each step a length; after SIGTERM saves and stops, as scripts on preemptible nodes do."""

    def __init__(self) -> None:
        self.told = False
        if not setting("JIT"):
            signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = True

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if self.told:
            control.should_save = control.should_training_stop = True


class MortalTrainer(Trainer):  # type: ignore[misc]
    """Trainer as it is, but for what may befall it once it has written optimizer.pt, scheduler.pt and rng_state.pth."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.state.global_step == setting("DIE_IN_SAVE"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.state.global_step == setting("HANG_IN_SAVE"):
            time.sleep(600)


def train(output_dir: str, resume: str | None, max_steps: int, save_steps: int) -> int:
    """Train and return the step at the end."""
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        save_steps=save_steps,
        save_total_limit=setting("SAVE_TOTAL_LIMIT") or None,
        enable_jit_checkpoint=bool(setting("JIT")),
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = MortalTrainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=RandomTexts(), callbacks=[Pace()])
    trainer.train(resume_from_checkpoint=resume)
    return int(trainer.state.global_step)


def check(save: Path) -> int:
    """Load the model, the optimizer, the scheduler and the random state, and train one step; return the step it was at."""
    AutoModelForCausalLM.from_pretrained(save)
    for name in ("optimizer.pt", "scheduler.pt"):
        assert torch.load(save / name, weights_only=True), name
    torch.load(save / "rng_state.pth", weights_only=False)
    with tempfile.TemporaryDirectory() as folder:
        return train(folder, str(save), int(save.name.removeprefix("checkpoint-")) + 1, 1) - 1


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--check", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    for save in options.check:
        print("checked", save, check(save), flush=True)
    if options.output_dir:
        print("resuming from", options.resume_from_checkpoint, flush=True)
        step = train(options.output_dir, options.resume_from_checkpoint, setting("MAX_STEPS"), setting("SAVE_STEPS"))
        print("ended at", step, flush=True)


if __name__ == "__main__":
    main()
