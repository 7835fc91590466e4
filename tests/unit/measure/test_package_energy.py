"""What `bench --energy` says of CPU packages, which no verdict rests on."""

from dataclasses import replace

import pytest
from tests.fakes.measurements import planted

from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Subject
from optpipe.core.metrics.measured import ENERGY
from optpipe.measure.measure import describe_package_energy
from optpipe.workspace.energy import EnergyUse


@pytest.mark.parametrize(
    ("energy", "images", "words"),
    [
        (EnergyUse(12.0, cpu_j=600.0), 1000, ("500 mJ/image", "2 images/s/W", "50 W over 12.0 s", "not judged")),
        (EnergyUse(12.0, cpu_why_not="only root may read it"), 1000, ("not counted (only root may read it)",)),
        (EnergyUse(0.0005, cpu_j=0.0), 1000, ("did not move",)),
        (EnergyUse(12.0, cpu_j=600.0), 0, ("did not move",)),
    ],
    ids=["counted", "forbidden", "too short", "nothing ran"],
)  # fmt: skip
def test_the_energy_of_cpu_packages_is_stated_in_words(
    energy: EnergyUse, images: int, words: tuple[str, ...]
) -> None:
    """10 s of the measured part at the mean power of the 12 s that were counted."""
    said = describe_package_energy(energy, 10.0, images, LoadSpec(batch_size=1))
    assert all(word in said for word in words)


def test_no_reason_of_a_verdict_repeats_it() -> None:
    """Whoever recomputes the verdict has no counter of these packages."""
    said = describe_package_energy(EnergyUse(12.0, cpu_j=600.0), 10.0, 1000, LoadSpec(batch_size=1))
    measured = planted(Subject("abc", "onnxruntime", "fp32", "cpu", options={}), 1, 2.0)
    plain, with_words = (
        ENERGY.explain_missing(replace(measured, energy_why_not="no counter" + words))
        for words in ("", said)
    )
    assert plain == with_words
