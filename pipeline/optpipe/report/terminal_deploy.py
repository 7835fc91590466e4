"""A deployment and its proof on the terminal."""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.quantity import Dimension, format_quantity
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.core.measurement import LatencySummary
    from optpipe.deploy.records import DeployResult, ProofRecord


def render_deployment(found: "DeployResult") -> RenderableType:
    """What was written and why, how this machine differs, and what the server served."""
    record, dossier = found.deployment, found.deployment.dossier
    lines: list[RenderableType] = [
        Text(
            f"{record.model}: {record.backend} {record.precision} ({record.device}) for {record.target}, by dossier {dossier.name}"
        )
    ]
    if dossier.because:
        lines.append(Text(f"deployed on {dossier.verdict} because: {dossier.because}", style="bold yellow"))
    table = make_table("setting", "value", "from")
    for each in record.choices:
        table.add_row(each.setting, each.value, each.source)
    lines.append(table)
    if record.not_carried:
        lines.append(
            Text(f"not set, Triton's backend has no such setting: {', '.join(record.not_carried)}", style="yellow")
        )
    if record.target != "folder":
        lines.append(Text(f"passport: {found.passport.triton}", style="dim"))
    lines += [Text(f"differs from the evidence  {each}", style="yellow") for each in found.differences]
    lines += _render_proof(found.proof) if found.proof else []
    lines.append(Text(f"deployment  {found.folder}"))
    if found.proof is None and record.target != "folder":
        command = shlex.join(["optpipe", "deploy", "--check", found.folder, "--prove"])
        lines.append(Text(f"prove it on a server  {command}", style="dim"))
    return Group(*lines)


def _render_proof(proof: "ProofRecord") -> Iterator[RenderableType]:
    server = proof.server
    python = f", Python {server.python}, NumPy {server.numpy}" if server.python else ""
    word = ("PROVEN IN PART", "bold yellow") if proof.notes else ("PROVEN", "bold green")
    yield Text.assemble(word, f"  on {server.program} {server.version}{python}")
    table = make_table("model", "protocol", "requests", "equal to the bit", "largest error", "predictions")
    for each in proof.comparisons:
        error = "0" if each.relative_error == 0 else f"{each.relative_error:.1e}"
        table.add_row(
            each.model, each.protocol, str(each.requests), str(each.equal_bits), error, each.predictions or ""
        )
    yield table
    yield from (Text(f"{each.model}: {each.proven}", style="dim") for each in proof.models)
    if proof.costs:
        yield _render_costs(proof)
        yield _render_throughputs(proof)
    yield from (Text(each, style="yellow") for each in proof.notes)


def _render_costs(proof: "ProofRecord") -> Table:
    """What the server adds: two rows for each load, each percentile with its interval."""
    table = make_table("load", "through", "requests", "mean", "p50", "p99", "limited by")
    for cost in proof.costs:
        for load, name, found, source in (
            (cost.load, "in-process", cost.in_process, cost.source),
            ("", "server, gRPC", cost.server, ""),
        ):
            mean = format_quantity(found.mean, Dimension.TIME)
            shown = [_format_percentile(found, percent) for percent in ("p50", "p99")]
            table.add_row(load, name, str(found.samples), mean, *shown, source)
    return table


def _render_throughputs(proof: "ProofRecord") -> Table:
    """Requests/s at each concurrency, with intervals over laps."""
    table = make_table("in flight", "in-process, joined", "server, gRPC", "server p50", "server p99")
    for each in proof.throughputs:
        rates = [
            f"{one.value:,.0f} requests/s ({one.bounds[0]:,.0f} to {one.bounds[1]:,.0f})"
            for one in (each.in_process, each.server)
        ]
        shown = [_format_percentile(each.latency, percent) for percent in ("p50", "p99")]
        table.add_row(str(each.concurrency), *rates, *shown)
    return table


def _format_percentile(found: "LatencySummary", name: str) -> str:
    if (each := found.percentiles.get(name)) is None:
        return "–"
    low, high = (format_quantity(bound, Dimension.TIME) for bound in each.bounds)
    return f"{format_quantity(each.value, Dimension.TIME)} ({low} to {high})"
