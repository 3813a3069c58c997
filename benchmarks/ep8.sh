#!/usr/bin/env bash
# EP = 8 on the eight GPUs of one machine, in one go of under ten minutes:  benchmarks/ep8.sh [OUT] [part ...]
#
#   OUT    folder for the JSON files and the comparison; default docs/results
#   parts  correctness link layers steps; default: all of them
#   GPUS   how many ranks (default 8)
#
# The layer benchmark's protocol is that of the published comparison: one node, EP = 8, 128 experts, top-8, random routing,
# 16,384 tokens for each GPU; forward, backward (forward and backward less forward), and a full layer: two forwards and a backward.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Multicast is not used, and can take a shared machine's NVLink down.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
OUT=${1:-docs/results}
PARTS=${*:2}
PARTS=${PARTS:-correctness link layers steps}
GPUS=${GPUS:-8}
NAME=ep${GPUS}
TORCHRUN="torchrun --nproc_per_node=$GPUS --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --local-ranks-filter=0"
FAILED=()

run() {
    echo "== $*"
    "$@" || FAILED+=("$*")
}

nvidia-smi topo -m || true
mkdir -p "$OUT"
for part in $PARTS; do
    case $part in
    correctness)
        run $TORCHRUN benchmarks/ep_correctness.py --out "$OUT/${NAME}_correctness.json"
        ;;
    link)
        run $TORCHRUN benchmarks/link.py --out "$OUT/${NAME}_link.json"
        ;;
    layers)
        for shape in qwen3-30b qwen3-235b; do
            run $TORCHRUN -m titan_megamoe.bench.layer --shape $shape --tokens 16384 \
                --out "$OUT/${NAME}_layer_${shape//-/_}.json"
            # The same rows on one rank, without communication: compute alone.
            run python -m titan_megamoe.bench.layer --shape $shape-ep8 --tokens 131072 --only "mega_moe hopper" \
                --only "mega_moe hopper fp8" --out "$OUT/${NAME}_layer_${shape//-/_}_compute_alone.json"
        done
        ;;
    steps)
        run python -m titan_megamoe.data
        # All 48 layers of Qwen3-30B-A3B, sharded over the ranks, full checkpointing, one sequence of 16,384 tokens each.
        run python -m titan_megamoe.cli.main compare --config train_configs/qwen3_30b_a3b.toml --nproc "$GPUS" --repeats 1 \
            --strategies all_to_all,deepep,mega_moe,mega_moe:fp8 --no_seed_checkpoint --out "$OUT/${NAME}_compare" \
            --parallelism.expert_parallel_degree "$GPUS" --training.local_batch_size 1 --training.seq_len 16384 \
            --activation_checkpoint.mode full --compile.enable --model.moe.force_load_balance uniform \
            --hf_assets_path ./assets/python_docs --dataloader.dataset python_docs
        rm -rf "$OUT/${NAME}_compare/runs" "$OUT/${NAME}_compare/tensorboard"
        ;;
    *)
        echo "unknown part '$part': correctness link layers steps" >&2
        exit 2
        ;;
    esac
done
if ((${#FAILED[@]})); then
    printf 'failed: %s\n' "${FAILED[@]}" >&2
    exit 1
fi
