#!/bin/sh
# GRPO on GSM8K with Qwen3-0.6B on one GPU. Further arguments override the recipe:
#   tandem data gsm8k --in DOWNLOADED --out data/gsm8k
#   MODEL_PATH=models/Qwen3-0.6B DATA_DIR=data/gsm8k examples/grpo_trainer/run_qwen3-0.6b.sh trainer.epochs=1
set -eu
exec tandem train "$(dirname "$0")/../../recipes/gsm8k_grpo.yaml" \
    model.path="${MODEL_PATH:?is the directory of Qwen3-0.6B}" \
    data.train_files="[${DATA_DIR:?is where tandem data wrote}/train.parquet]" \
    data.val_files="[$DATA_DIR/test.parquet]" \
    trainer.run_dir="${RUN_DIR:-runs/grpo_qwen3-0.6b}" \
    "$@"
