#!/bin/sh
# PPO on GSM8K with Qwen3-0.6B, policy and critic on one GPU. Further arguments override the recipe:
#   tandem data gsm8k --in DOWNLOADED --out data/gsm8k
#   MODEL_PATH=models/Qwen3-0.6B DATA_DIR=data/gsm8k examples/ppo_trainer/run_qwen3-0.6b.sh trainer.epochs=1
# TANDEM_COMMAND=plan before it says what it would need of GPUs, from the model's config.json alone (docs/plan.md).
set -eu
PATH="$PATH:$(dirname "$0")/../../.venv/bin" # of scripts/setup, where no other environment is activated
command -v tandem >/dev/null || { echo "$0: tandem is not installed: run scripts/setup in the clone" >&2; exit 2; }
exec tandem "${TANDEM_COMMAND:-train}" "$(dirname "$0")/../../recipes/gsm8k_ppo.yaml" \
    model.path="${MODEL_PATH:?is the directory of Qwen3-0.6B}" \
    data.train_files="[${DATA_DIR:?is where tandem data wrote}/train.parquet]" \
    data.val_files="[$DATA_DIR/test.parquet]" \
    trainer.run_dir="${RUN_DIR:-runs/ppo_qwen3-0.6b}" \
    "$@"
