#!/bin/bash
# Several nodes: publishd around an srun that passes SIGUSR1 on to its tasks. For trainers that save and end at SIGUSR1.
#
#   before the time limit             --signal=B:TERM@120 tells publishd 120 s earlier (SLURM may be a minute early); it sends srun
#                                     SIGUSR1, and srun each of its tasks. The last save is published once srun is over.
#   scancel, requeue, preemption,     SLURM sends each task SIGTERM, too, at the same moment: the trainer must survive it (take it for
#   time limit                        the same as SIGUSR1)
#   state of the job                  scancel: CANCELLED. Time limit: COMPLETED if the trainer ends with 0 in time.
#                                     Requeue and preemption: pending, and it resumes from that save.
#
# An srun that got SIGTERM itself would kill its tasks within milliseconds, hence -forward.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
CKPT=${CKPT:-/lustre/team/finetune}

EXECUTION=$(publishd env) || exit 1
eval "$EXECUTION"
# shellcheck disable=SC2016 # for the inner shell to expand
exec publishd run -checkpoint "$CKPT" -framework hf -keep 3 -forward TERM=USR1 -- sh -c \
    'exec srun python train.py --output_dir "$PUBLISHD_OUT" ${PUBLISHD_RESUME:+--resume_from_checkpoint "$PUBLISHD_RESUME"}'
