#!/bin/bash
# The job of job.sh with its checkpoint root in an S3-compatible store.
# CKPT is the root, s3://BUCKET/PREFIX; the bucket must exist. CREDS names the one source of credentials that is asked:
# here a secret of Vault, which tells the store's endpoint and region, too; with other sources -endpoint and -region go
# into STORE. PROXY and CA are for a store behind a proxy or with certificates of its own: what the environment says of
# either is not used. train.py is given s3:// URLs, and uploads and downloads by itself.
CKPT=${CKPT:-s3://team/finetune}
CREDS=${CREDS:-vault:https://vault.example:8200/team/s3?auth=kubernetes&role=trainer}
STORE=(${PROXY:+-proxy "$PROXY"} ${CA:+-ca "$CA"})
RESUME=$(publish resolve -checkpoint "$CKPT" -creds "$CREDS" "${STORE[@]}") || exit 1
OUT=$CKPT/exec/$DISPATCH_ATTEMPT
publish watch -checkpoint "$CKPT" -creds "$CREDS" "${STORE[@]}" -framework hf &
WATCH=$!
python train.py --output_dir "$OUT" ${RESUME:+--resume_from_checkpoint "$RESUME"}
STATUS=$?
kill -TERM "$WATCH"; wait "$WATCH"
publish prune -checkpoint "$CKPT" -creds "$CREDS" "${STORE[@]}" -keep 3
exit $STATUS
