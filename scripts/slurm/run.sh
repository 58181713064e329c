#!/bin/bash
# One line, told by SLURM itself: take this unless you have a reason not to. One node, or a launcher that is no srun.
#
#   scancel, requeue, preemption, time limit   publishd gets SIGTERM and hands it to the trainer, which has to save and end;
#                                              that save is published. KillWait (30 s) is the time for both, -drain its part.
#   before the time limit                      --signal=B:TERM@120 tells it 120 s earlier (SLURM may be a minute early)
#   state of the job                           scancel: CANCELLED. Time limit: COMPLETED if the trainer ends with 0 in time.
#                                              Requeue and preemption: pending, and it resumes from that save.
#   SIGKILL, a dead node                       what was complete in the last -interval stands unpublished in exec/
#
# Nobody but publishd may stand between SLURM and the trainer: hence exec, twice.
#SBATCH --job-name=finetune
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
CKPT=${CKPT:-/lustre/team/finetune}

EXECUTION=$(publishd env) || exit 1
eval "$EXECUTION"
# shellcheck disable=SC2016 # for the inner shell to expand
exec publishd run -checkpoint "$CKPT" -framework hf -keep 3 -- sh -c \
    'exec python train.py --output_dir "$PUBLISHD_OUT" ${PUBLISHD_RESUME:+--resume_from_checkpoint "$PUBLISHD_RESUME"}'
