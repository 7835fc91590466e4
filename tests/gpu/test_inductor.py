"""AOTInductor's code for single batch sizes on a real GPU: tuned, measured against the code for all sizes, and kept where it is faster."""

from dataclasses import replace

import numpy as np
from tests.fakes.fp8_models import VIT, draw, make_request

from optpipe.backends.inductor import Inductor
from optpipe.backends.inductor_packages import GENERAL, name_static_package
from optpipe.core.entries import ArtifactInfo, WeightsRecord
from optpipe.core.precision import Precision, prove_precision


def test_code_for_single_batch_sizes_gives_the_same_outputs_and_stays_where_it_is_faster(tmp_path):
    wanted = replace(make_request(VIT, tmp_path, "cuda"), precision=Precision.FP16, options={"static_batches": "1,8"})
    built = Inductor().build(wanted)
    kept = built.details["static_batches"]
    assert {each.name for each in wanted.directory.glob("*.pt2")} == {GENERAL, *map(name_static_package, kept)}
    assert [f"batch {size} runs" in "; ".join(built.remarks) for size in (1, 8)] == [
        size not in kept for size in (1, 8)
    ]
    info = ArtifactInfo(
        wanted.card.name, wanted.card.source, "inductor", Precision.FP16, "cuda", GENERAL, WeightsRecord("random", ""),
        prove_precision(Precision.FP16, built.layers), options=built.options, details=built.details,
    )  # fmt: skip
    general = replace(info, details={**built.details, "static_batches": []})
    rows = np.concatenate([draw(wanted.card.inputs[0]).numpy()] * 8)[:8]
    name = wanted.card.inputs[0].name
    with (
        Inductor().load(wanted.directory, info, {}) as own,
        Inductor().load(wanted.directory, general, {}) as all_sizes,
    ):
        for size in (1, 8, 3):
            found, expected = ({**each.run({name: rows[:size]})} for each in (own, all_sizes))
            for output, values in expected.items():
                np.testing.assert_allclose(found[output], values, atol=0.02 * np.abs(values).max())
