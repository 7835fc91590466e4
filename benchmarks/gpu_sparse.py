"""2:4 sparse products of cuSPARSELt, through torch, against dense ones of cuBLAS, for the layers of three networks, on a GPU.

usage: python benchmarks/gpu_sparse.py OUT.json [--seconds 60] [--batch 1,64,256] [--types fp16,int8] [--search] [--dry-run]

A layer is the product of its rows (pixels of all images, or tokens) with its weights, of which each group of four along the
inputs keeps the two largest. Convolutions of 3 × 3 count as the product of their columns, without the copy that makes the
columns: cuSPARSELt has no convolutions, so this flatters the sparse side. Rows and outputs are padded to multiples of 16 on
both sides, and both write the same type, FP16 or INT32. The sparse side has cuSPARSELt's default algorithm or, with `--search`,
the one that its own search finds for the shape, if that is faster; on an H200 with torch 2.11 the search ended with an illegal
instruction.

Each side is replayed from a CUDA graph, in turns; the ratio is that of medians. An answer that is not that of the dense product
of the same pruned weights leaves the cell out.

No cell starts after SECONDS, or after an error of CUDA, which no later call survives; those left out are named. `--dry-run`
runs everything on a CPU with at most 64 rows and a dense product in place of the sparse one, to try the script.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from optpipe.kernels.tuner import capture_launches, time_replay
from optpipe.report.markdown import render_table_lines

LAUNCHES, ROUNDS = 10, 7
MULTIPLE = 16
"""Of rows and outputs: cuSPARSELt takes no others in INT8."""
LEAST_ROWS = 32
"""torch's INT8 product takes more than 16."""
DRY_ROWS = 64
TRANSFORMERS = {"BERT-base, 128 tokens": 128, "ViT-B/16": 197}
"""Tokens of one sample; twelve blocks of 768 channels."""
TYPES = {"fp16": torch.float16, "int8": torch.int8}


class Product(NamedTuple):
    """(rows, inputs) times the transpose of (outputs, inputs), with the rows of one sample."""

    rows: int
    inputs: int
    outputs: int


def list_products(network: str) -> Counter[Product]:
    """How often a network computes each product whose weights can be pruned."""
    if network in TRANSFORMERS:
        sizes = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
        return Counter({Product(TRANSFORMERS[network], *size): 12 for size in sizes})
    import torchvision

    found: Counter[Product] = Counter()

    def count(module: Any, _: Any, output: Any) -> None:
        weight = module.weight[:, :, 0, 0] if module.weight.dim() == 4 else module.weight
        rows = output[0, 0].numel() if output.dim() == 4 else 1
        inputs = module.weight[0].numel()
        if inputs % MULTIPLE == 0:  # not the first convolution: 147 inputs
            found[Product(rows, inputs, len(weight))] += 1

    with torch.device("meta"):
        model = torchvision.models.resnet50().eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.register_forward_hook(count)
        model(torch.empty(1, 3, 224, 224))
    return found


class Sides(NamedTuple):
    dense: Callable[[], Any]
    sparse: Callable[[], Any]


def draw_sides(
    product: Product, kind: str, device: str, *, search: bool = False
) -> Iterator[Sides]:
    """The dense product, and the sparse one by each algorithm that is worth timing, on the same operands."""
    torch.manual_seed(0)
    draw = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}
    rows, weight = (
        torch.randn(count, product.inputs, **draw) for count in (product.rows, product.outputs)
    )
    weight = prune(weight)
    if kind == "int8":
        rows, weight = ((each * 30).clamp(-127, 127).to(torch.int8) for each in (rows, weight))
    if device == "cuda":
        rows, weight = rows.to(TYPES[kind]), weight.to(TYPES[kind])
    multiply = torch._int_mm if kind == "int8" else torch.mm

    def dense() -> Any:
        return multiply(rows, weight.t())

    if device == "cpu":
        yield Sides(dense, dense)
        return
    packed = torch.sparse.to_sparse_semi_structured(weight).packed
    options: dict[str, Any] = {"transpose_result": True}
    if kind == "int8":  # FP16 takes no type of the answer
        options["out_dtype"] = torch.int32
    found = [torch._cslt_sparse_mm_search(packed, rows.t(), **options)] if search else []
    for algorithm in dict.fromkeys([0, *map(int, found)]):

        def sparse(algorithm: int = algorithm) -> Any:
            return torch._cslt_sparse_mm(packed, rows.t(), alg_id=algorithm, **options)

        yield Sides(dense, sparse)


def prune(weight: torch.Tensor) -> torch.Tensor:
    """The two largest of each group of four inputs, others 0."""
    groups = weight.view(len(weight), -1, 4)
    kept = groups.abs().topk(2, dim=-1).indices
    return groups.mul(torch.zeros_like(groups).scatter_(-1, kept, 1)).view_as(weight)


def measure_product(product: Product, kind: str, device: str, *, search: bool) -> dict[str, Any]:
    """Median microseconds of both sides, or why there are none."""
    best: dict[str, Any] = {}
    for sides in draw_sides(product, kind, device, search=search):
        expected, answer = (each().float() for each in sides)
        if answer.shape != expected.shape or not torch.allclose(
            answer, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
        ):
            return {"error": "the sparse answer is not that of the dense product"}
        del expected, answer
        times = measure_in_turns(sides, device)
        if (
            not best
            or times["sparse_us"] / times["dense_us"] < best["sparse_us"] / best["dense_us"]
        ):
            best = times
    return best


def measure_in_turns(sides: Sides, device: str) -> dict[str, float]:
    on_gpu = device == "cuda"
    runs = [capture_launches(each, LAUNCHES) if on_gpu else each for each in sides]
    time_one = time_replay if on_gpu else time_on_cpu
    times: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 1):
        for at in (0, 1) if turn % 2 else (1, 0):
            taken = time_one(runs[at]) / (LAUNCHES if on_gpu else 1)
            if turn:  # the first one warms up
                times[at].append(taken)
    return {"dense_us": median(times[0]), "sparse_us": median(times[1])}


def time_on_cpu(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return (time.perf_counter() - begun) * 1e6


def pad(count: int, least: int = 0) -> int:
    return max(-(-count // MULTIPLE) * MULTIPLE, least)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch", default="1,64,256")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.dry_run else "cuda"
    document: dict[str, Any] = {"torch": torch.__version__, "device": device, "rows": []}
    if device == "cuda":
        if not torch.backends.cusparselt.is_available():
            parser.exit(3, "this torch has no cuSPARSELt\n")
        torch.sparse.SparseSemiStructuredTensor._FORCE_CUTLASS = False
        document["device"] = torch.cuda.get_device_name()
        document["cusparselt"] = torch.backends.cusparselt.version()
    begun = time.monotonic()
    broken = ""
    for batch in map(int, given.batch.split(",")):
        for network in ("ResNet-50", *TRANSFORMERS):
            for (product, count), kind in (
                (each, kind)
                for each in list_products(network).items()
                for kind in given.types.split(",")
            ):
                row = {"network": network, "batch": batch, "type": kind, "count": count}
                wanted = product._replace(
                    rows=pad(batch * product.rows, LEAST_ROWS), outputs=pad(product.outputs)
                )
                if given.dry_run:
                    wanted = wanted._replace(rows=min(wanted.rows, DRY_ROWS))
                row |= {"product": list(wanted)}
                if time.monotonic() - begun > given.seconds:
                    row["error"] = "left out: the time was over"
                elif broken:
                    row["error"] = f"left out after an error: {broken}"
                else:
                    row |= try_product(wanted, kind, device, search=given.search)
                    said = str(row.get("error", ""))
                    broken = said if "CUDA error" in said else ""
                document["rows"].append(row)
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{document['device']}, torch {document['torch']}, {time.monotonic() - begun:.0f} s")
    print("\n".join(tabulate(document["rows"])))


def try_product(product: Product, kind: str, device: str, *, search: bool) -> dict[str, Any]:
    try:
        found = measure_product(product, kind, device, search=search)
        if device == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0][:200]}
    return found


def tabulate(rows: list[dict[str, Any]]) -> Iterator[str]:
    """All products of a network together, by batch and type."""
    cells = []
    for key in dict.fromkeys((row["network"], row["batch"], row["type"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["batch"], row["type"]) == key]
        timed = [row for row in mine if "error" not in row]
        sums = [
            sum(row["count"] * row[f"{side}_us"] for row in timed) for side in ("dense", "sparse")
        ]
        ratios = [row["dense_us"] / row["sparse_us"] for row in timed]
        faster = sum(ratio > 1 for ratio in ratios)
        each = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        ratio = f"{sums[0] / sums[1]:.2f}" if timed else ""
        cells.append(
            [
                *map(str, key),
                *(f"{each / 1e3:.3f}" for each in sums),
                ratio,
                each,
                f"{faster} of {len(timed)}",
                str(len(mine) - len(timed) or ""),
            ]
        )
    head = ["network", "batch", "type", "dense ms", "sparse ms", "dense / sparse", "by product"]
    yield from render_table_lines([*head, "faster", "left out"], cells)
    for said, count in Counter(row["error"] for row in rows if "error" in row).items():
        yield f"{count}: {said}"


if __name__ == "__main__":
    main()
