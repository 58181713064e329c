#!/bin/bash
# Several nodes: publishd around an srun whose tasks SLURM tells directly. For trainers that save and end at SIGTERM.
#
#   scancel, requeue, preemption, time limit   SLURM sends SIGTERM to publishd and to each task, so -forward TERM=none:
#                                              publishd only scans faster, and publishes the last save once srun is over.
#                                              (An srun that gets a SIGTERM meant for publishd, of `scancel --batch` or
#                                              --signal=B:, kills its tasks within milliseconds.)
#   before the time limit                      --signal=TERM@120, without B:, tells the tasks 120 s earlier
#   state of the job                           scancel: CANCELLED. Time limit: COMPLETED if the trainer ends with 0 in time.
#                                              Requeue and preemption: pending, and it resumes from that save.
#   preemption with a GraceTime                tells the tasks alone, and a job that ends well by itself is COMPLETED: it is
#                                              not requeued. Where your partition has one, requeue as requeue.sh does.
#
# Where trainers know SIGUSR1 rather than SIGTERM, take srun-usr1.sh.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
CKPT=${CKPT:-/lustre/team/finetune}

EXECUTION=$(publishd env) || exit 1
eval "$EXECUTION"
# shellcheck disable=SC2016 # for the inner shell to expand
exec publishd run -checkpoint "$CKPT" -framework hf -keep 3 -forward TERM=none -- sh -c \
    'exec srun python train.py --output_dir "$PUBLISHD_OUT" ${PUBLISHD_RESUME:+--resume_from_checkpoint "$PUBLISHD_RESUME"}'
