import shlex
from collections.abc import Iterator

from optpipe.core.measurement import LatencySummary
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.deploy.records import DeployResult, ProofRecord, RecheckRecord
from optpipe.report.document import TONES, Document, Sentence, Table, Tone, figure_columns, make_document, make_table


def document_from_deployment(found: DeployResult) -> Document:
    record, dossier = found.deployment, found.deployment.dossier
    to_server = record.target != "folder"
    built = f"{record.model}: {record.backend} {record.precision} ({record.device})"
    prove = shlex.join(["optpipe", "deploy", "--check", found.folder, "--prove"])
    because = f"deployed on {dossier.verdict} because: {dossier.because}"
    without = f"not set, Triton's backend has no such setting: {', '.join(record.not_carried)}"
    return make_document(
        [
            Sentence(f"{built} for {record.target}, by dossier {dossier.name}"),
            Sentence(because, Tone.DOUBTFUL) if dossier.because else None,
            make_table(
                ("setting", "value", "from"), [(each.setting, each.value, each.source) for each in record.choices]
            ),
            Sentence(without, Tone.DOUBTFUL) if record.not_carried else None,
            Sentence(f"passport: {record.triton}", Tone.FAINT) if to_server else None,
            *(Sentence(each, Tone.DOUBTFUL, "differs from the evidence") for each in found.differences),
            *(_describe_proof(found.proof) if found.proof else ()),
            Sentence(found.folder, Tone.STRONG, "deployment"),
            Sentence(prove, Tone.FAINT, "prove it on a server") if found.proof is None and to_server else None,
        ]
    )


def _describe_proof(proof: ProofRecord) -> Iterator[Sentence | Table]:
    server = proof.server
    python = f", Python {server.python}, NumPy {server.numpy}" if server.python else ""
    tone, label = (Tone.DOUBTFUL, "PROVEN IN PART") if proof.notes else (Tone.GOOD, "PROVEN")
    yield Sentence(f"on {server.program} {server.version}{python}", tone, label)
    yield make_table(
        ["model", "protocol", *figure_columns("requests", "equal to the bit", "largest error"), "predictions"],
        [
            (
                each.model,
                each.protocol,
                str(each.requests),
                str(each.equal_bits),
                "0" if each.relative_error == 0 else f"{each.relative_error:.1e}",
                each.predictions,
            )
            for each in proof.comparisons
        ],
    )
    yield from (Sentence(f"{model}: {proven}", Tone.FAINT) for model, proven in proof.models.items())
    if proof.costs:
        yield make_table(
            ["load", "through", *figure_columns("requests", "mean", "p50", "p99"), "limited by"],
            [
                (
                    str(cost.load),
                    name,
                    str(found.samples),
                    format_quantity(found.mean, Dimension.TIME),
                    *(_format_percentile(found, percent) for percent in ("p50", "p99")),
                    cost.source,
                )
                for cost in proof.costs
                for name, found in (("in-process", cost.in_process), ("server, gRPC", cost.server))
            ],
        )
        yield make_table(
            figure_columns("in flight", "in-process, joined", "server, gRPC", "server p50", "server p99"),
            [
                (
                    str(each.concurrency),
                    *(
                        f"{one.value:,.0f} requests/s ({one.bounds[0]:,.0f} to {one.bounds[1]:,.0f})"
                        for one in (each.in_process, each.server)
                    ),
                    *(_format_percentile(each.latency, percent) for percent in ("p50", "p99")),
                )
                for each in proof.throughputs
            ],
        )
    yield from (Sentence(each, Tone.DOUBTFUL) for each in proof.notes)


def _format_percentile(found: LatencySummary, name: str) -> str:
    if (each := found.percentiles.get(name)) is None:
        return ""
    low, high = (format_quantity(bound, Dimension.TIME) for bound in each.bounds)
    return f"{format_quantity(each.value, Dimension.TIME)} ({low} to {high})"


def document_from_recheck(found: RecheckRecord) -> Document:
    latency = found.latency
    versions = [(name, *each) for name, each in found.versions.items()]
    outputs = [
        f"output {one.name}: {f'{one.changed:,} of {one.values:,} values changed' if one.changed else 'equal'}, "
        f"relative error {one.relative_error:.2g} ({found.outputs_how})"
        for one in found.outputs
    ]
    return make_document(
        [
            Sentence(str(found.dossier), TONES[found.verdict], found.verdict, found.reasons),
            make_table(("changed", "old", "new"), versions) if versions else Sentence("versions: nothing changed"),
            *map(Sentence, outputs),
            Sentence(
                f"latency {latency.metric}, {latency.load}: {latency.ratio:.3f} times the old "
                f"({latency.format_interval()}), {latency.change}; {latency.how}"
            ),
            Sentence(f"precision: {found.precision}", Tone.FAINT),
        ]
    )
