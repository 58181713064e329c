#!/bin/bash
# A training job that may be killed at any moment and be started again as often as it takes: each execution resumes from
# the latest complete save of all executions before it.
# CKPT is the checkpoint root, a folder that exists and that all executions share. In the environment must be
# DISPATCH_ATTEMPT, this execution's name, and DISPATCH_EPOCH, its number, greater than that of every execution before;
# README.md shows how to make them under SLURM. publish and python must be found in PATH, and train.py in the current
# folder.
CKPT=${CKPT:-/lustre/team/finetune}
RESUME=$(publish resolve -checkpoint "$CKPT") || exit 1
OUT=$CKPT/exec/$DISPATCH_ATTEMPT
publish watch -checkpoint "$CKPT" -framework hf &
WATCH=$!
python train.py --output_dir "$OUT" ${RESUME:+--resume_from_checkpoint "$RESUME"}
STATUS=$?
kill -TERM "$WATCH"; wait "$WATCH"
publish prune -checkpoint "$CKPT" -keep 3
exit $STATUS
