#!/bin/bash
# The watch as a job step of its own beside an srun that trains on several nodes; no trap is needed.
#
#   scancel, requeue, preemption, time limit   SLURM tells the tasks of both steps together, and bash, which dies: the watch
#                                              therefore lingers, and publishes what the trainer saves meanwhile. -linger and
#                                              -drain together must stay below KillWait (30 s).
#   before the time limit                      --signal=TERM@120, without B:, tells the steps 120 s earlier; bash goes on
#   state of the job                           scancel: CANCELLED. Time limit: COMPLETED if the trainer ends with 0 in time.
#                                              Requeue and preemption: pending, and it resumes from that save.
#   training ends by itself                    the watch's step is told through SLURM: an srun that gets SIGTERM kills its
#                                              tasks instead. It lingers here, too. (That scancel prints "Invalid job
#                                              id specified" for the nodes without a watch; the one with it is told.)
#   exit status                                the trainer's; where that is 0 but a save stayed unpublished, the watch's
#
# A watch that was killed (SIGTERM came before it had begun) has not had its last look: -once takes it.
# What the steps print after bash has died goes nowhere: give each srun an --output of its own if you want it.
# Where a save takes longer than a -linger that KillWait leaves room for, take srun.sh.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
CKPT=${CKPT:-/lustre/team/finetune} LINGER=${LINGER:-15s} DRAIN=${DRAIN:-10s}

EXECUTION=$(publishd env) || exit 1
eval "$EXECUTION"
RESUME=$(publishd resolve -checkpoint "$CKPT") || exit 1
srun --overlap --nodes=1 --ntasks=1 --job-name=watch \
    publishd watch -checkpoint "$CKPT" -framework hf -linger "$LINGER" -drain "$DRAIN" &
WATCH=$!
srun --overlap --job-name=train \
    python train.py --output_dir "$CKPT/exec/$DISPATCH_ATTEMPT" ${RESUME:+--resume_from_checkpoint "$RESUME"}
STATUS=$?
while kill -0 "$WATCH" 2>/dev/null; do
    STEP=$(squeue --noheader --steps --jobs "$SLURM_JOB_ID" --format '%i %j' | awk '$2 == "watch" { print $1 }')
    [ -z "$STEP" ] || { scancel --signal=TERM "$STEP"; break; }
    sleep 1 # training was over before the step began
done
wait "$WATCH"
WATCHED=$?
[ "$WATCHED" -lt 128 ] || { publishd watch -checkpoint "$CKPT" -framework hf -once; WATCHED=$?; }
[ "$STATUS" -ne 0 ] || STATUS=$WATCHED
exit "$STATUS"
