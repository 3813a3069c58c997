#!/usr/bin/env bash
# What docs/results holds of one H200, in one go:  benchmarks/one_h200.sh [OUT] [part ...]
#
#   OUT    folder for the JSON files and charts; default docs/results
#   parts  tests layers sweep kernels steps compare convergence ranks soak; default: all of them. "ranks" trains with 2 and 4
#          ranks on the one card, "soak" with 2 that are killed again and again; "steps" are eager, "compare" compiles
#
# The first training run compiles flex attention, which takes minutes. Afterwards:
#   python benchmarks/render_results.py
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
OUT=${1:-docs/results}
PARTS=${*:2}
PARTS=${PARTS:-tests layers sweep kernels steps compare convergence ranks soak}
SLICE="--config train_configs/qwen3_30b_a3b_6layers.toml"
DEBUG="--config train_configs/qwen3_moe_debug.toml"
FAILED=()

run() {
    echo "== $*"
    "$@" || FAILED+=("$*")
}

for part in $PARTS; do
    case $part in
    tests)
        run env RANDOM_ROUTINGS="${RANDOM_ROUTINGS:-1000}" python -m pytest -q -m gpu tests/gpu
        ;;
    layers)
        for shape in qwen3-30b qwen3-235b; do
            run python -m titan_megamoe.bench.layer --shape $shape --out "$OUT/h200_layer_${shape//-/_}.json"
            run python -m titan_megamoe.bench.layer --shape $shape --pause_ms 30 --out "$OUT/h200_layer_${shape//-/_}_paused.json"
            run python -m titan_megamoe.bench.layer --shape $shape-ep8 --tokens 131072 --out "$OUT/h200_layer_${shape//-/_}_ep8.json"
        done
        ;;
    sweep)
        run python -m titan_megamoe.bench.sweep --out "$OUT/h200_sweep.json"
        ;;
    kernels)
        run python benchmarks/kernel_sweep.py --json "$OUT/h200_kernels.json"
        run python benchmarks/weight_gradients.py --json "$OUT/h200_weight_gradients.json"
        ;;
    steps)
        run python -m titan_megamoe.data
        run python benchmarks/train_steps.py $SLICE --out "$OUT/h200_qwen3_30b_6layers_eager_uniform.json" \
            --run mega_moe --run mega_moe:fp8 --run all_to_all --routing uniform
        ;;
    compare)
        run python -m titan_megamoe.data
        run python -m titan_megamoe.cli.main compare $SLICE --strategies all_to_all,mega_moe,mega_moe:fp8 --compile.enable \
            --model.moe.force_load_balance uniform --out /tmp/titan_megamoe_compare
        mkdir -p "$OUT/h200_compare" && cp /tmp/titan_megamoe_compare/report.* /tmp/titan_megamoe_compare/*.png "$OUT/h200_compare/"
        ;;
    convergence)
        run python -m titan_megamoe.data
        run python benchmarks/train_steps.py $SLICE --out "$OUT/h200_qwen3_30b_6layers_precisions.json" --steps 200 --compile \
            --run mega_moe:bf16 --run mega_moe:fp8 --run mega_moe:fp8_bwd --run all_to_all:quantize.grouped_mm.float8 \
            --routing none -- --training.local_batch_size 1
        run python benchmarks/plot_losses.py "$OUT/h200_qwen3_30b_6layers_precisions.json"
        ;;
    ranks)
        run python -m titan_megamoe.data
        for ranks in 2 4; do
            run python benchmarks/train_steps.py $DEBUG --out "$OUT/h200_debug_${ranks}_ranks_on_one_gpu.json" \
                --run mega_moe --run all_to_all --routing none --steps 50 --nproc $ranks --one_gpu -- \
                --parallelism.expert_parallel_degree $ranks --checkpoint.no-enable
        done
        ;;
    soak)
        run python -m titan_megamoe.data
        run python -m titan_megamoe.bench.soak $DEBUG --one_gpu --out "$OUT/h200_soak.json"
        ;;
    *)
        echo "unknown part '$part': tests layers sweep kernels steps compare convergence ranks soak" >&2
        exit 2
        ;;
    esac
done
if ((${#FAILED[@]})); then
    printf 'failed: %s\n' "${FAILED[@]}" >&2
    exit 1
fi
