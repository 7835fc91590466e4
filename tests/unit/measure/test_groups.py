"""All VALID processes of a load count, also those whose own interval could not be shown."""

from dataclasses import replace

import pytest
from tests.fakes.measurements import planted

from optpipe.core.measurement import Subject
from optpipe.core.quantity import Dimension
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, summarize_group
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.signoff.build_evidence import BuildEvidence, observe_group
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import Sense

WHY = "samples follow each other too closely: 2,648 are worth 12 independent ones"


def group_of(*figures: tuple[float, tuple[str, ...]], percentile: float = 99.0) -> ProcessGroup:
    """One process for each median in ms, with the percentiles that it withholds, measured for `percentile`."""
    found = []
    for number, (milliseconds, withheld) in enumerate(figures):
        one = planted(Subject("a", "onnxruntime", "fp32", "cpu"), 8, milliseconds)
        latency = replace(
            one.latency_ns,
            percentiles={name: each for name, each in one.latency_ns.percentiles.items() if name not in withheld},
            withheld=dict.fromkeys(withheld, WHY),
            median=milliseconds * 1e6,
        )
        one = replace(one, latency_ns=latency, process=number, load=replace(one.load, percentile=percentile))
        found.append(RecordedMeasurement(one, f"run for p{percentile:g}"))
    return ProcessGroup(tuple(found))


def observe(group: ProcessGroup, name: str):
    limit = Criterion("latency", name, Sense.AT_MOST, 3e6, Dimension.TIME)
    return observe_group(limit, group, name, BuildEvidence(JudgedBuild("m", "a", "onnxruntime", "fp32")))


def test_the_medians_of_disturbed_processes_count() -> None:
    group = group_of((2.4, ()), (2.6, ()), (3.8, ("p50",)), (3.4, ("p50",)))
    assert group.list_values("p50") == [[2.4e6, 2.6e6, 3.8e6, 3.4e6]]
    assert group.estimate("p50", 0.95).value == pytest.approx(3.05e6)
    assert len(summarize_group(group).figures["p50"].processes) == 4
    assert observe(group, "p50").blockers == ()


def test_of_one_or_two_processes_a_withheld_median_stays_withheld() -> None:
    assert group_of((2.4, ("p50",)), (2.6, ("p50",))).list_values("p50") == []


def test_a_percentile_that_some_processes_withhold_decides_nothing() -> None:
    seen = observe(group_of((2.4, ()), (2.6, ()), (2.5, ()), (3.8, ("p99",))), "p99")
    (blocker,) = seen.blockers
    assert blocker.reason == f"1 of 4 VALID processes do not show p99: {WHY}"
    assert blocker.remedy.startswith("measure longer: optpipe bench")


def test_processes_that_were_measured_for_a_lower_percentile_count_all_or_not_at_all() -> None:
    quick, slow = (2.4, ()), (3.8, ("p99",))
    asked = group_of((2.6, ()), (2.5, ()), (2.7, ())).tries
    seen = observe(ProcessGroup((*group_of(quick, slow, percentile=90.0).tries, *asked)), "p99")
    assert seen.blockers == ()
    assert (seen.processes, seen.about.endswith("3 processes; 2 not measured for p99, 2.50 ms to 2.70 ms")) == (3, True)
    assert observe(ProcessGroup((*group_of(quick, quick, percentile=90.0).tries, *asked)), "p99").processes == 5
    assert observe(group_of(quick, slow, percentile=90.0), "p99").blockers, "nothing was measured for it"
