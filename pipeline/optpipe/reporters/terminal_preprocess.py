"""A preprocessing proof on the terminal."""

import os
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_duration
from optpipe.reporters.records import VERDICT_STYLES, format_rate_interval


def render_preprocess(record: Mapping[str, Any]) -> RenderableType:
    """The verdict first, then step by step, the odd files, and the race."""
    proof = record["parity"]
    lines: list[RenderableType] = [
        Text(f"{proof['verdict']}  {record['model']}: {proof['reason']}", style=VERDICT_STYLES[proof["verdict"]])
    ]
    if proof["remedy"]:
        lines.append(Text(f"→ {proof['remedy']}"))
    lines.append(_render_steps(proof))
    lines.append(Text(_format_outputs(proof)))
    lines += [Text(f"refused by DALI  {each['image']}: {each['reason']}", style="red") for each in proof["refused"][:5]]
    lines.append(_format_worst(record))
    lines.append(_format_edge_cases(proof["odd_files"]))
    if record["throughput"]:
        lines.append(_render_throughput(record))
    pipeline = record["pipeline"]
    lines.append(Text(f"pipeline  {pipeline['path']}  sha256 {pipeline['sha256'][:12]}"))
    lines.append(Text(f"evidence  {record['run_dir']}"))
    return Group(*lines)


def _render_steps(proof: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    for name in ("mean |Δ|", "max |Δ|", "levels differing", "alone: mean", "max"):
        table.add_column(name, justify="right")
    for each in proof["steps"]:
        alone = each["alone"]
        marked = each["step"] == proof["largest_step"] and alone["mean_levels"] > 0
        table.add_row(
            Text(each["step"] + (" ← largest" if marked else "")),
            f"{each['mean_levels']:.4f}",
            f"{each['max_levels']:.2f}",
            f"{each['off_share']:.2%}",
            f"{alone['mean_levels']:.4f}",
            f"{alone['max_levels']:.2f}",
        )
    table.caption = f"in 8-bit levels (0 to 255), {proof['images']} images"
    table.caption_justify = "left"
    return table


def _format_outputs(proof: Mapping[str, Any]) -> str:
    output = proof["output"]
    if not output["finite"]:
        return "outputs contain NaN or Inf"
    parts = ["outputs bit-identical" if output["snr_db"] is None else f"outputs: SNR {output['snr_db']:.1f} dB"]
    if agreement := proof["top1_agreement"]:
        parts.append(f"top-1 agreement {agreement['equal']}/{agreement['images']}")
    if accuracy := proof["accuracy"]:
        parts.append(f"accuracy {accuracy['reference']:.2%} with the reference, {accuracy['dali']:.2%} with DALI")
    return ", ".join(parts)


def _format_worst(record: Mapping[str, Any]) -> Text:
    """Where to look: the pictures lie in the run's folder."""
    proof, folder = record["parity"], record["images"]["folder"]
    pairs = zip(proof["worst"], proof["pictures"], strict=True)
    named = (
        f"{picture['path']} {os.path.relpath(each['image'], folder)} (mean {each['mean_levels']:.2f}, max {each['max_levels']:.0f})"
        for each, picture in pairs
    )
    return Text(f"worst images, side by side with the difference: {', '.join(named)}")


def _format_edge_cases(odd: list[Mapping[str, Any]]) -> Text:
    good = [each for each in odd if each["outcome"] in ("equal", "refused by both")]
    rest = [each for each in odd if each not in good]
    text = f"edge-case files  {len(good)} of {len(odd)} match"
    if rest:
        text += "; " + ", ".join(
            f"{each['file']} {each['outcome']}"
            + ("" if each["max_levels"] is None else f" (max {each['max_levels']:.1f})")
            for each in rest
        )
    return Text(text)


def _render_throughput(record: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "device", "threads"):
        table.add_column(name)
    for name in ("images/s", "95 % interval", "reader_cost", "batch_cost"):
        table.add_column(name, justify="right")
    winners = [record["tuned"][name] for name in ("dataloader", "dali", "decode_only")]
    for each in record["throughput"]:
        row = _format_throughput_row(each)
        table.add_row(*row, style="bold" if each in winners else "dim")
    tuned = record["tuned"]
    interval = tuned["speedup_ci"]
    text = f"DALI {tuned['speedup']:.2f}× the best DataLoader"
    text += f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    if tuned["share_of_decode_only"]:
        text += f", {tuned['share_of_decode_only']:.2f} of decoding alone"
    text += f"; not tried: {tuned['left_out']}" if tuned["left_out"] else ""
    table.caption = f"{text}; {record['images']['count']} images, page cache {record['images']['page_cache']}"
    table.caption_justify = "left"
    return table


def _format_throughput_row(each: Mapping[str, Any]) -> list[str]:
    name = each["implementation"]
    if each["settings"].get("decode") == "mixed":
        name += f" hw {each['settings']['hw_decoder_load']:g}"
        name += f" cpu {each['settings']['cpu_share']:g}" if each["settings"]["cpu_share"] else ""
    threads = f"{each['threads']}" + (" workers" if each["implementation"] == "dataloader" else "")
    if each["error"]:
        return [name, str(each["device"]), threads, "failed", each["error"], "", ""]
    costs = [format_duration(each[key] * 1e9) for key in ("reader_cost_s", "batch_cost_s")]
    return [
        name,
        str(each["device"]),
        threads,
        f"{each['images_per_s']:,.0f}",
        format_rate_interval(each["ci"]),
        *costs,
    ]
