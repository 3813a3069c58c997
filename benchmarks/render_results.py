"""Tables of what was measured, from the JSON files beside them: ``python benchmarks/render_results.py > docs/results/README.md``."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "docs" / "results"

INTRODUCTION = """\
# Results

Generated from the JSON files in this folder by `python benchmarks/render_results.py`; each file holds its command, environment
and every number.
"""


def render() -> str:
    documents = {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    parts = [INTRODUCTION]
    steps = {name: d for name, d in documents.items() if "runs" in d}
    layers = {name: d for name, d in documents.items() if "ceiling_tflops" in d}
    if layers:
        parts.append("## One layer's routed experts\n")
        parts += [_layer_table(name, document) for name, document in layers.items()]
    kernels = {name: d for name, d in documents.items() if "tunings" in d}
    if kernels:
        parts.append("## The fused kernels\n")
        for name, document in kernels.items():
            has_parts = "part" in document["results"][0]
            parts.append((_kernels_table if has_parts else _weight_gradients_table)(name, document))
    errors = {name: d for name, d in documents.items() if "relative_errors" in d}
    if errors:
        parts.append("## Errors of the precisions\n")
        parts += [_errors_table(name, document) for name, document in errors.items()]
    if steps:
        parts.append("## Whole training steps\n")
        parts += [_steps_table(name, document) for name, document in steps.items()]
    return "\n".join(parts)


def _environment(document: dict) -> str:
    return _machine(document) + (f". {document['remark']}".removesuffix(".") if "remark" in document else "")


def _machine(document: dict) -> str:
    environment = document["environment"]
    if environment["gpus"] == 0:
        return f"No GPU, torch {environment['torch']}, {environment['date']}"
    return f"{environment['gpus']} x {environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}, {environment['date']}"


def _steps_table(name: str, document: dict) -> str:
    first, last = document["measured_steps"]
    lines = [
        f"`{name}`: {document['config']}, {'compiled' if document['compile'] else 'eager'}, routing {document['routing']}; "
        f"mean of steps {first} to {last}. {_environment(document)}.",
        "",
        "| run | s per step (min to max) | tokens/s per GPU | peak GiB | loss, first and last step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for run, result in document["runs"].items():
        if "error" in result:
            lines.append(f"| {run} | failed: see the JSON | | | |")
            continue
        label = run + "".join(f" ({backend})" for backend in result["backend"])
        losses = list(result["losses"].values())
        lines.append(
            f"| {label} | {result['seconds_per_step']:.4f} ({result['seconds_per_step_min']:.4f} to "
            f"{result['seconds_per_step_max']:.4f}) | {result['tokens_per_second_per_gpu']:,.0f} | "
            f"{result['peak_memory_gib']:.1f} | {losses[0]:.5f}, {losses[-1]:.5f} |"
        )
    return "\n".join(lines) + "\n"


def _layer_table(name: str, document: dict) -> str:
    lines = [
        f"`{name}`: {document['shape_name']}, {document['tokens']} tokens, EP = {document['ep_size']}, {document['routing']}; "
        f"median of {document['repeats']}. Dense cuBLAS: {document['ceiling_tflops']:.0f} TFLOP/s. {_environment(document)}.",
        "",
        "| implementation | forward ms (min to max) | backward ms | full layer ms | forward TFLOP/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for implementation, result in document["results"].items():
        if "error" in result:
            lines.append(f"| {implementation} | failed: see the JSON | | | |")
            continue
        forward, both, full = (result[key] for key in ("forward", "forward_and_backward", "full_layer"))
        lines.append(
            f"| {implementation} | {forward['median']:.3f} ({forward['min']:.3f} to {forward['max']:.3f}) | "
            f"{both['median'] - forward['median']:.3f} | {full['median']:.3f} | "
            f"{document['forward_tflop'] / forward['median'] * 1e3:.0f} |"
        )
        if "stages" in result:
            stages = ", ".join(f"{stage} {ms:.3f}" for stage, ms in result["stages"].items())
            lines.append(f"| its stages, ms | {stages} | | | |")
    chart = name.replace(".json", ".png")
    if (RESULTS / chart).exists():
        lines += ["", f"![{document['shape_name']}]({chart})"]
    return "\n".join(lines) + "\n"


KERNEL_PARTS = {
    "fused": "the kernel",
    "gemm": "with rows in place, or not sent",
    "rows": "the rows alone",
    "dense": "dense matmul of the same size",
    "one stream": "kernels in a row",
    "two streams": "weight gradients on a stream of their own",
}


def _kernels_table(name: str, document: dict) -> str:
    times = {(r["shape"], r["kernel"], r["part"]): r["median_ms"] for r in document["results"]}
    lines = [
        f"`{name}`, by benchmarks/kernel_sweep.py: random routing, median of {document['repeats']}, ms. {_device(document)}. The ep8 "
        "shapes are one rank's part of EP = 8, with all ranks' memory on the one card.",
        "",
        f"| shape | kernel | {' | '.join(KERNEL_PARTS.values())} |",
        "| --- | --- | " + "--- | " * len(KERNEL_PARTS),
    ]
    for shape, kernel in dict.fromkeys((r["shape"], r["kernel"]) for r in document["results"]):
        cells = [times.get((shape, kernel, part)) for part in KERNEL_PARTS]
        lines.append(f"| {shape} | {kernel} | " + " | ".join("" if ms is None else f"{ms:.3f}" for ms in cells) + " |")
    return "\n".join(lines) + "\n"


def _weight_gradients_table(name: str, document: dict) -> str:
    results = {(r["shape"], r["kernel"]): r for r in document["results"]}
    kernels = list(dict.fromkeys(kernel for _, kernel in results))
    lines = [
        f"`{name}`, by benchmarks/weight_gradients.py: gradients of W1, W2 and W3, random routing, median of "
        f"{document['repeats']}, ms (TFLOP/s). {_device(document)}.",
        "",
        f"| shape | {' | '.join(kernels)} |",
        "| --- | " + "--- | " * len(kernels),
    ]
    for shape in dict.fromkeys(shape for shape, _ in results):
        cells = [f"{results[shape, k]['median_ms']:.3f} ({results[shape, k]['tflops']:.0f})" for k in kernels]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _errors_table(name: str, document: dict) -> str:
    columns = list(next(iter(document["relative_errors"].values())))
    lines = [
        f"`{name}`, by benchmarks/precision_errors.py: relative errors against fp64 of the output and of the gradients of the "
        f"others; {', '.join(f'{key} {value}' for key, value in document['shape'].items())}. {_environment(document)}.",
        "",
        f"| precision | {' | '.join(columns)} |",
        "| --- | " + "--- | " * len(columns),
    ]
    for precision, errors in document["relative_errors"].items():
        lines.append(f"| {precision} | " + " | ".join(f"{errors[column]:.2e}" for column in columns) + " |")
    return "\n".join(lines) + "\n"


def _device(document: dict) -> str:
    return _environment(document) if "environment" in document else f"{document['device']}, torch {document['torch']}"


if __name__ == "__main__":
    print(render(), end="")
