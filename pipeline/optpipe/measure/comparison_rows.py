"""A row of a comparison: one build with its settings under one load, over all processes that measured it, with unique names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from optpipe.core.comparison import ComparisonRow, Levels
from optpipe.core.measurement_group import GroupFigure
from optpipe.core.quantity import Estimate
from optpipe.core.records import group_pairs
from optpipe.core.settings import find_differing_settings, format_settings
from optpipe.measure.groups import (
    ProcessGroup,
    RecordedMeasurement,
    merge_group,
)


@dataclass(frozen=True, slots=True)
class BuildFacts:
    size_bytes: int | None = None
    build_s: float | None = None
    top1: Estimate | None = None
    causes: str = ""
    accuracy: str | None = None
    """How the accuracy drop of an INT8 artifact may exceed its budget."""


Groups = Mapping[tuple[object, ...], ProcessGroup]

BuildKey = tuple[str | None, str, str, str, str]
"""Model, backend, precision, device and the processor's name."""


class RowNames:
    """Names of builds and settings that are unique within a comparison."""

    def __init__(self, measured: Sequence[RecordedMeasurement]) -> None:
        settings = group_pairs(
            (get_build_key(recorded), recorded.measurement.subject.settings)
            for recorded in measured
        )
        self.differing = {
            build: find_differing_settings(values) for build, values in settings.items()
        }

    def build(self, recorded: RecordedMeasurement) -> str:
        """`onnxruntime int8`, with its model first and its device or processor last if others differ in them."""
        model, backend, precision, device, processor = get_build_key(recorded)
        several_models = len({build[0] for build in self.differing}) > 1
        places = [key[3:] for key in self.differing if key[:3] == (model, backend, precision)]
        place = device if sum(on == device for on, _ in places) == 1 else processor
        prefix = f"{model} " if several_models else ""
        suffix = f" ({place})" if len(places) > 1 else ""
        return f"{prefix}{backend} {precision}{suffix}"

    def setting(self, recorded: RecordedMeasurement) -> str:
        """`threads=2`: the settings that distinguish `recorded` from others of its build."""
        return format_settings(
            recorded.measurement.subject.settings, self.differing[get_build_key(recorded)]
        )

    def configuration(self, recorded: RecordedMeasurement) -> str:
        return f"{self.build(recorded)} {self.setting(recorded)}".rstrip()


def group_by_key(
    measured: Sequence[RecordedMeasurement],
) -> dict[tuple[object, ...], ProcessGroup]:
    """The processes by processor and `Measurement.key`, of the last measured artifact only: a rebuilt artifact is another one."""

    def key(recorded: RecordedMeasurement) -> tuple[object, ...]:
        return name_processor(recorded), *recorded.measurement.key

    ordered = sorted(
        measured,
        key=lambda recorded: (str(key(recorded)), recorded.measurement.started_utc, recorded.run),
    )
    groups = {}
    for row_key, measured_alike in groupby(ordered, key=key):
        tries = list(measured_alike)
        artifact = tries[-1].measurement.subject.artifact
        groups[row_key] = ProcessGroup(
            tuple(
                recorded for recorded in tries if recorded.measurement.subject.artifact == artifact
            )
        )
    return groups


def format_row_id(recorded: RecordedMeasurement) -> str:
    return f"{recorded.run}/{recorded.measurement.id}"


def row_from_group(
    group: ProcessGroup, known: BuildFacts, names: RowNames, levels: Levels
) -> ComparisonRow:
    newest = (group.valid or group.tries)[-1]
    merged = merge_group(group, levels.figures, levels.unseen)
    subject = merged.subject
    largest_memory = max(
        recorded.measurement.memory_bytes or 0 for recorded in group.valid or (newest,)
    )
    return ComparisonRow(
        id=format_row_id(newest),
        run=newest.run,
        artifact=subject.artifact,
        model=subject.model or "",
        backend=subject.backend,
        precision=subject.precision,
        device=subject.device,
        load=merged.load,
        build=names.build(newest),
        valid=merged.is_valid,
        reasons=tuple(reason.message for reason in merged.reasons),
        reason_codes=merged.invalid_codes,
        processes=group.count_processes(),
        left_out=len(group.left_out),
        samples=merged.samples,
        latency_ns=merged.latency_ns.percentiles if merged.latency_ns else {},
        throughput_images_per_s=merged.throughput_images_per_s,
        throughput_tokens_per_s=merged.throughput_tokens_per_s,
        energy_j_per_image=merged.energy_j_per_image,
        figures=_estimate_listed(group, levels),
        memory_bytes=largest_memory or None,
        size_bytes=known.size_bytes,
        build_s=known.build_s,
        top1=known.top1,
        settings=subject.settings,
        setting=names.setting(newest),
        caveats=merged.caveats,
        sources={} if merged.samples_file is None else {merged.samples_file: ""},
    )


def _estimate_listed(group: ProcessGroup, levels: Levels) -> dict[str, GroupFigure]:
    """The figures that lie in no field of a measurement, over processes."""
    figures = {}
    for name, unit in group.find_units().items():
        if (estimate := group.estimate(name, levels.figures, levels.unseen)) is not None:
            values = tuple(value for run in group.list_values(name) for value in run)
            figures[name] = GroupFigure(estimate, values, None, None, unit)
    return figures


def get_build_key(recorded: RecordedMeasurement) -> BuildKey:
    of = recorded.measurement.subject
    return of.model, of.backend, of.precision, of.device, name_processor(recorded)


def name_processor(recorded: RecordedMeasurement) -> str:
    return recorded.environment.get_fact(
        "cpu" if recorded.measurement.subject.device == "cpu" else "gpu"
    )
