#!/bin/bash
# Separate lines, with a trap that hands SIGTERM on: for scripts that do more around training than `publishd run` would.
#
#   scancel, requeue, preemption, time limit   bash gets SIGTERM, alone; the trap hands it to the trainer, which has to save
#                                              and end; then the watch is told, and publishes that save
#   before the time limit                      --signal=B:TERM@120 tells bash 120 s earlier (SLURM may be a minute early)
#   state of the job                           scancel: CANCELLED. Time limit: COMPLETED if the trainer ends with 0 in time.
#                                              Requeue and preemption: pending, and it resumes from that save.
#   SIGKILL, a dead node                       what was complete in the last -interval stands unpublished in exec/
#   exit status                                the trainer's; where that is 0 but a save stayed unpublished, the watch's
#
# The trainer must be in the background: bash runs no trap while it waits for a program in the foreground, and without a trap
# it dies, upon which SLURM kills all else at once. A wait that a trap interrupts returns early, hence the loops. A watch that was
# killed (by SIGTERM, too, where training is over before it has begun) has not had its last look: -once takes it.
#SBATCH --job-name=finetune
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
CKPT=${CKPT:-/lustre/team/finetune}

TRAIN='' TOLD=''
trap 'TOLD=yes; [ -z "$TRAIN" ] || kill -TERM "$TRAIN" 2>/dev/null' TERM
EXECUTION=$(publishd env) || exit 1
eval "$EXECUTION"
RESUME=$(publishd resolve -checkpoint "$CKPT") || exit 1
publishd watch -checkpoint "$CKPT" -framework hf &
WATCH=$!
python train.py --output_dir "$CKPT/exec/$DISPATCH_ATTEMPT" ${RESUME:+--resume_from_checkpoint "$RESUME"} &
TRAIN=$!
[ -z "$TOLD" ] || kill -TERM "$TRAIN"
while :; do wait "$TRAIN"; STATUS=$?; kill -0 "$TRAIN" 2>/dev/null || break; done
kill -TERM "$WATCH"
while :; do wait "$WATCH"; WATCHED=$?; kill -0 "$WATCH" 2>/dev/null || break; done
[ "$WATCHED" -lt 128 ] || { publishd watch -checkpoint "$CKPT" -framework hf -once; WATCHED=$?; }
[ "$STATUS" -ne 0 ] || STATUS=$WATCHED
[ -n "$TOLD" ] || publishd prune -checkpoint "$CKPT" -keep 3
exit "$STATUS"
