"""A build on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_bytes, format_duration
from optpipe.reporters.records import format_random_weights


def render_build(record: Mapping[str, Any]) -> RenderableType:
    """The answer first: what was built, what is proven of it, whether it computes what the model does."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("artifact", "backend", "precision", "MACs", "verified", "runs here"):
        table.add_column(name, overflow="fold")
    for name in ("size", "build"):
        table.add_column(name, justify="right")
    for each in record["artifacts"]:
        table.add_row(
            each["id"],
            f"{each['backend']} ({each['device']})",
            each["precision"],
            _format_proof(each),
            _format_parity(each["parity"]),
            "yes" if each["runnable_here"] else Text("no", style="dim"),
            format_bytes(each["size_bytes"]),
            format_duration(each["build_seconds"] * 1e9),
        )
    weights = record["weights"]
    lines: list[RenderableType] = [
        Text(f"{record['model']} from {record['source']}, weights {weights['source']} {weights['sha256'][:12]}")
    ]
    if record["artifacts"]:
        lines.append(table)
    why_not = {f"{each['backend']}: {each['why_not']}" for each in record["artifacts"] if each["why_not"]}
    lines += [Text(f"built, cannot run here  {text}", style="dim") for text in sorted(why_not)]
    lines += [
        Text(f"not proven  {each['id']}: {_format_others(each)}", style="red")
        for each in record["artifacts"]
        if not each["precision_proof"]["proven"]
    ]
    lines += [
        Text(
            f"lint  {each['id']}: {_format_lint(each['lint'])}; optpipe show {each['id']} lists them",
            style="yellow",
        )
        for each in record["artifacts"]
        if each["lint"]
    ]
    lines += [
        Text(f"failed  {each['backend']} {each['precision']}: {each['reason']}", style="red")
        for each in record["failed"]
    ]
    reasons: dict[str, list[str]] = {}
    for each in record["skipped"]:
        reasons.setdefault(f"{each['backend']}: {each['reason']}", []).append(each["precision"])
    lines += [Text(f"skipped {', '.join(precisions)} for {text}", style="dim") for text, precisions in reasons.items()]
    if not weights["trained"]:
        lines.append(Text(format_random_weights(weights), style="yellow"))
    return Group(*lines)


def _format_proof(artifact: Mapping[str, Any]) -> Text:
    shares = artifact["precision_share"]["macs"] or artifact["precision_share"]["layers"]
    text = ", ".join(f"{share:.1%} {kind}" for kind, share in sorted(shares.items(), key=lambda item: -item[1]))
    return Text(text, style="" if artifact["precision_proof"]["proven"] else "red")


def _format_others(artifact: Mapping[str, Any]) -> str:
    proof = artifact["precision_proof"]
    names = ", ".join(f"{each['name']} ({each['type']})" for each in proof["others"])
    more = proof["others_count"] - len(proof["others"])
    return f"{proof['reason']}; others: {names}" + (f" and {more} more" if more > 0 else "")


def _format_lint(lint: Mapping[str, Any]) -> str:
    counted = ", ".join(f"{count} × {rule}" for rule, count in lint["counts"].items())
    return f"{counted}, such as {lint['first']['layer']}: {lint['first']['message']}"


def _format_parity(parity: Mapping[str, Any] | None) -> Text:
    if parity is None:
        return Text("not run", style="dim")
    if parity["passed"] is None:
        return Text("nothing to compare", style="yellow")
    snr = "exact" if parity["snr_db"] is None else f"SNR {parity['snr_db']:.0f} dB"
    if parity["top1_accuracy"] is not None:
        snr += f", top-1 {parity['top1_accuracy']:.2%} (source {parity['source_top1_accuracy']:.2%}, {parity['samples']} images)"
    elif parity["top1_agreement"] is not None:
        snr += f", top-1 agreement {parity['top1_agreement']:.1%}"
    return Text(
        snr if parity["passed"] else f"FAIL: {snr}",
        style="green" if parity["passed"] else "red",
    )
