"""INT8 layers as operators of one compiled program, against torch.compile in FP16: both in one process, in turns.

The exported program's linear layers and convolutions become quantization, which Inductor fuses with what comes before it, and an
operator that runs our own kernel (scale, bias, activation, requantization inside). Everything else is compiled by Inductor.

usage: python benchmarks/gpu_compiled_int8.py OUT.json NETWORK:BATCH…   (torchvision names, random weights; one NVIDIA GPU, Hopper)
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torchvision

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.launches import LAUNCHERS
from optpipe.backends.torch_int8.precompile import collect_kernels, compile_side_by_side
from optpipe.backends.torch_int8.tactics import list_tactics, upload_constants
from optpipe.backends.torch_int8.tuning import sign_step, time_launch
from optpipe.backends.torch_program import set_assembler

aten = torch.ops.aten
ACTIVATIONS = {aten.relu.default: "relu", aten.relu_.default: "relu", aten.silu.default: "silu", aten.silu_.default: "silu",
               aten.hardswish.default: "hardswish", aten.hardswish_.default: "hardswish"}  # fmt: skip
LAYERS = []
"""(step, constants, tactic) by the index that the operator is called with."""
ROUNDS = 30


@torch.library.custom_op("optpipe_probe::int8_layer", mutates_args=())  # type: ignore[untyped-decorator]
def int8_layer(given: torch.Tensor, index: int) -> torch.Tensor:
    step, kept, tactic = LAYERS[index]
    return LAUNCHERS[tactic.kernel](step, given, None, kept, tactic.settings)


@int8_layer.register_fake
def _(given, index):
    step = LAYERS[index][0]
    dtype = torch.float16 if step.half else torch.int8
    if step.flat:
        return given.new_empty((*given.shape[:-1], len(step.scale)), dtype=dtype)
    top, left, below, right = step.padding
    wide = (given.shape[2] + top + below, given.shape[3] + left + right)
    size = [(each - span) // step.stride + 1 for each, span in zip(wide, step.kernel, strict=True)]
    return torch.empty((given.shape[0], len(step.scale), *size), dtype=dtype, device=given.device).to(
        memory_format=torch.channels_last
    )


def quantize(x, inverse):
    return torch.clamp(torch.round(x.float() * inverse), -128, 127).to(torch.int8)


def get_attribute(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


def read_layer(module, node):
    """(weight, bias, stride, padding) of a layer that our kernels take, else None."""
    weight = get_attribute(module, node.args[1].target)
    bias = get_attribute(module, node.args[2].target) if len(node.args) > 2 and node.args[2] is not None else None
    if node.target == aten.linear.default:
        return (weight, bias, 1, 0) if weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0 else None
    given = [*node.args[3:], *[[1, 1], [0, 0], [1, 1], 1][len(node.args[3:]) :]]
    stride, padding, dilation, groups = given
    even = len({*stride}) == len({*padding}) == len({*dilation}) == 1 and dilation[0] == 1
    if groups != 1 or not even or weight.shape[0] % 16 or weight.shape[1] % 16:
        return None
    return weight, bias, stride[0], padding[0]


class Ranges(torch.fx.Interpreter):
    """The largest absolute value that each of `nodes` gives."""

    def __init__(self, module, nodes):
        super().__init__(module)
        self.nodes, self.top, self.shapes = nodes, {}, {}

    def run_node(self, node):
        value = super().run_node(node)
        if node in self.nodes:
            self.top[node], self.shapes[node] = float(value.abs().max()), value
        return value


def find_activation(node):
    """The only user of a layer, where it is an activation that our kernels end in."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in ACTIVATIONS else None


def lower(module, x):
    """Replaces layers in place; gives how many, and how many of them hand INT8 to the next."""
    graph = module.graph
    found = {}
    for node in graph.nodes:
        if node.target in (aten.linear.default, aten.conv2d.default) and (layer := read_layer(module, node)):
            found[node] = layer
    ranges = Ranges(module, {node.args[0] for node in found})
    with torch.inference_mode():
        ranges.run(x)
    ends = {node: find_activation(node) for node in found}
    sources = {node: node.args[0] for node in found}  # before they are replaced
    handed = 0
    for node, (weight, bias, stride, padding) in found.items():
        end = ends[node] or node
        into = set(end.users)
        chained = (
            bool(into) and into <= set(found) and end in ranges.top and ACTIVATIONS.get(end.target, "") in ("", "relu")
        )
        given_scale = max(ranges.top[sources[node]], 1e-6) / 127
        output_scale = max(ranges.top[end], 1e-6) / 127 if chained else 1.0
        values = weight.detach().float()
        scale = values.flatten(1).abs().amax(1).clamp(min=1e-8) / 127
        whole = (values / scale.view(-1, *[1] * (values.dim() - 1))).round().clamp(-127, 127).to(torch.int8)
        flat = whole.dim() == 2
        arranged = whole[:, None, None, :] if flat else whole.permute(0, 2, 3, 1)
        offset = torch.zeros(len(scale)) if bias is None else bias.detach().float().cpu()
        step = steps.Convolution(
            node.name, "given", "output", np.ascontiguousarray(arranged.cpu().numpy()),
            (scale.cpu() * given_scale / output_scale).numpy().astype(np.float32), (offset / output_scale).numpy().astype(np.float32),
            stride, (padding,) * 4, ACTIVATIONS.get(end.target, ""), half=not chained, flat=flat,
        )  # fmt: skip
        example = quantize(ranges.shapes[sources[node]], 1 / given_scale)
        LAYERS.append([step, None, example])
        index = len(LAYERS) - 1
        with graph.inserting_after(end):
            new = graph.call_function(torch.ops.optpipe_probe.int8_layer.default, (node.args[0], index))
        source = node.args[0]
        if not getattr(source, "hands_int8", False):
            with graph.inserting_before(new):
                new.update_arg(0, graph.call_function(quantize, (source, 1 / given_scale)))
        end.replace_all_uses_with(new, propagate_meta=False)
        new.hands_int8 = chained
        handed += chained
        for each in (end, node) if end is not node else (node,):
            graph.erase_node(each)
    graph.lint()
    module.recompile()
    return len(found), handed


def tune(first):
    """The fastest tactic of each layer from `first` on, equal layers once."""

    def key(step, example):
        return sign_step(step, {"given": example})

    kinds = {}
    for place in range(first, len(LAYERS)):
        step, _, example = LAYERS[place]
        LAYERS[place][1] = upload_constants(step, "cuda")
        kinds.setdefault(key(step, example), place)
    with collect_kernels() as kernels:
        for place in kinds.values():
            step, kept, example = LAYERS[place]
            for tactic in list_tactics(step, example):
                try:
                    LAUNCHERS[tactic.kernel](step, example, None, kept, tactic.settings)
                except Exception:  # noqa: BLE001 - Triton refuses in many types
                    continue
    compile_side_by_side([*kernels])
    best = {}
    for kind, place in kinds.items():
        step, kept, example = LAYERS[place]
        timed = []
        for tactic in list_tactics(step, example):
            try:
                run = lambda each=tactic: LAUNCHERS[each.kernel](step, example, None, kept, each.settings)  # noqa: E731, B023
                timed.append((time_launch(run), tactic))
            except Exception as error:  # noqa: BLE001 - what fails is printed, the rest goes on
                print(f"  {step.name}: {tactic} {str(error)[:100]}", flush=True)
        best[kind] = min(timed, key=lambda each: each[0])
    total = 0.0
    for place in range(first, len(LAYERS)):
        step, kept, example = LAYERS[place]
        micro, tactic = best[key(step, example)]
        LAYERS[place] = (step, kept, tactic)
        total += micro
    return total / 1e3


def measure_in_turns(functions, x):
    """Milliseconds of each function by rounds, the order drawn for each round."""
    order = np.random.default_rng(0)
    times = {name: [] for name in functions}
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        for function in functions.values():
            for _ in range(5):
                function(x)
        for _ in range(ROUNDS):
            for name in order.permutation(list(functions)):
                torch.cuda.synchronize()
                begun.record()
                for _ in range(3):
                    functions[name](x)
                ended.record()
                ended.synchronize()
                times[name].append(begun.elapsed_time(ended) / 3)
    return times


def make_network(name):
    torch.manual_seed(0)
    module = torchvision.models.get_model(name, weights=None).eval()
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_var.fill_(0.5)
            layer.running_mean.normal_(0, 0.1)
    try:
        from torch.fx.experimental.optimization import fuse

        module = fuse(module) if any(isinstance(each, torch.nn.BatchNorm2d) for each in module.modules()) else module
    except Exception as error:  # noqa: BLE001 - what fails is printed, the rest goes on
        print(f"  batch normalization is not folded: {str(error)[:100]}", flush=True)
    return module.cuda().half().to(memory_format=torch.channels_last)


def run(name, batch):
    torch.compiler.reset()
    LAYERS.clear()
    module = make_network(name)
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        reference = module(x).float()
    started = time.monotonic()
    wide = torch.compile(module, mode="reduce-overhead", dynamic=False)
    with torch.inference_mode():
        wide(x)
    wide_s = time.monotonic() - started
    started = time.monotonic()
    with torch.no_grad():
        exported = torch.export.export(module, (x,)).module()
    for node in list(exported.graph.nodes):
        if node.op == "call_module" and "guard" in str(node.target):
            exported.graph.erase_node(node)
    layers, handed = lower(exported, x)
    products_ms = tune(0)
    narrow = torch.compile(exported, mode="reduce-overhead", dynamic=False)
    with torch.inference_mode():
        output = narrow(x).float()
    narrow_s = time.monotonic() - started
    error = (reference - output).pow(2).mean()
    snr = float(10 * torch.log10(reference.pow(2).mean() / error))
    times = measure_in_turns({"fp16": wide, "int8": narrow}, x)
    row = {
        "network": name, "batch": batch, "layers": layers, "handed_int8": handed, "int8_layers_alone_ms": round(products_ms, 3),
        "fp16_compile_ms": round(median(times["fp16"]), 4), "int8_compiled_ms": round(median(times["int8"]), 4), "snr_db": round(snr, 1),
        "fp16_build_s": round(wide_s), "int8_build_s": round(narrow_s), "times_ms": times,
    }  # fmt: skip
    row["speedup"] = round(row["fp16_compile_ms"] / row["int8_compiled_ms"], 3)
    print({key: value for key, value in row.items() if key != "times_ms"}, flush=True)
    return row


def main():
    set_assembler()
    out, rows = Path(sys.argv[1]), []
    device = torch.cuda.get_device_name()
    for spec in sys.argv[2:]:
        name, _, batch = spec.partition(":")
        try:
            rows.append(run(name, int(batch)))
        except Exception as error:  # noqa: BLE001 - what fails is printed, the rest goes on
            print(f"{spec} failed: {type(error).__name__}: {str(error)[:400]}", flush=True)
        out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
