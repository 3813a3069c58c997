#!/usr/bin/env bash
# Train from a TOML file, as with TorchTitan's own run_train.sh:
#
#   NGPU=2 CONFIG_FILE=train_configs/qwen3_moe_debug.toml ./run_train.sh [--training.steps 20 ...]
#
#   NGPU          ranks on this machine (default 2), one per GPU, or on the CPU where there is none
#   CONFIG_FILE   TOML file (default train_configs/qwen3_moe_debug.toml); the options after it override it
#   LOG_RANK      ranks whose output is shown (default 0)
# scripts/environment.sh lists the variables that choose the Python environment.
set -euo pipefail
cd "$(dirname "$0")"

CONFIG_FILE="${CONFIG_FILE:-train_configs/qwen3_moe_debug.toml}"
NGPU="${NGPU:-2}"
EXTRAS=""
source scripts/environment.sh

# Text and tokenizer for the debug configuration; made once, in seconds, without a network.
if grep -q 'python_docs' "$CONFIG_FILE" 2>/dev/null; then
    python -m titan_megamoe.data
fi

export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec torchrun --nproc_per_node="$NGPU" --rdzv_backend c10d --rdzv_endpoint localhost:0 \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 \
    -m titan_megamoe.train --config "$CONFIG_FILE" "$@"
