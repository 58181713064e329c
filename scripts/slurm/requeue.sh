#!/bin/bash
# Training that takes longer than any time limit: the job requeues itself before its limit, as often as it takes.
#
#   before the time limit     --signal=B:TERM@120 tells bash (SLURM may be a minute early): the trainer saves and ends, the save is
#                             published, and the job, still RUNNING, requeues itself. It is pending, and resumes from that save.
#   scancel                   the trainer saves and ends, the save is published; CANCELLED it stays, for it is RUNNING no longer
#   scontrol requeue,         the same, but SLURM requeues the job; with a GraceTime it may be this script that does
#   preemption
#   training ends by itself   COMPLETED or FAILED with the trainer's status, never requeued
#   SIGKILL, a dead node      what was complete in the last -interval stands unpublished in exec/
#
# Give --signal the time that a save takes, 20 s for publishing it, and a minute because SLURM may be late, too.
#SBATCH --job-name=finetune
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
CKPT=${CKPT:-/lustre/team/finetune}

RUN='' TOLD=''
trap 'TOLD=yes; [ -z "$RUN" ] || kill -TERM "$RUN" 2>/dev/null' TERM
EXECUTION=$(publishd env) || exit 1
eval "$EXECUTION"
publishd prune -checkpoint "$CKPT" -keep 3 # here, as none of its executions but the last ends in time to do so
# shellcheck disable=SC2016 # for the inner shell to expand
publishd run -checkpoint "$CKPT" -framework hf -keep 3 -- sh -c \
    'exec python train.py --output_dir "$PUBLISHD_OUT" ${PUBLISHD_RESUME:+--resume_from_checkpoint "$PUBLISHD_RESUME"}' &
RUN=$!
[ -z "$TOLD" ] || kill -TERM "$RUN"
while :; do wait "$RUN"; STATUS=$?; kill -0 "$RUN" 2>/dev/null || break; done
if [ -n "$TOLD" ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
