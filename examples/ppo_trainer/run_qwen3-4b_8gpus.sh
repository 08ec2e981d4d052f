#!/bin/sh
# PPO on GSM8K with Qwen3-4B on eight GPUs of one machine: four for the policy, two for critic and reference, two for
# generation, which work at the same time where the algorithm lets them. It shows how pools are written: by `tandem plan
# --search` one pool of eight takes half the time. Further arguments override the recipe:
#   MODEL_PATH=models/Qwen3-4B DATA_DIR=data/gsm8k examples/ppo_trainer/run_qwen3-4b_8gpus.sh
# TANDEM_COMMAND=plan before it says what it would need of GPUs, from the model's config.json alone (docs/plan.md).
set -eu
PATH="$PATH:$(dirname "$0")/../../.venv/bin" # of scripts/setup, where no other environment is activated
command -v tandem >/dev/null || { echo "$0: tandem is not installed: run scripts/setup in the clone" >&2; exit 2; }
exec tandem "${TANDEM_COMMAND:-train}" "$(dirname "$0")/../../recipes/gsm8k_ppo.yaml" \
    model.path="${MODEL_PATH:?is the directory of Qwen3-4B}" \
    data.train_files="[${DATA_DIR:?is where tandem data wrote}/train.parquet]" \
    data.val_files="[$DATA_DIR/test.parquet]" \
    placement.pools.acting="[4]" placement.pools.judging="[2]" placement.pools.asking="[2]" \
    placement.roles.actor=acting placement.roles.rollout=asking \
    placement.roles.critic=judging placement.roles.reference=judging \
    trainer.run_dir="${RUN_DIR:-runs/ppo_qwen3-4b}" \
    trainer.max_restarts=3 \
    "$@"
