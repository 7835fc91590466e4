"""Too little evidence in the commands that judge: a reason and status 5, never an interval of width zero or a claim."""

import shutil

import pytest

from tests.integration.conftest import ROOT, SHARED_MACHINE, optpipe

IMAGES = ROOT / "calibration" / "digits" / "validation"
POLICY = """schema = 1
name = "too little"
model = "digits"
[build]
backend = "onnxruntime"
precision = "fp32"
[[latency]]
p50 = "1 s"
batch_size = 1
[accuracy]
maximum_drop = "5 points"
[regression]
p50 = "50%"
"""


def copy_images(folder, count, group):
    """A folder of `count` images by class, each of which `group` gives a source."""
    lines = ["path,group"]
    for at, each in enumerate(sorted(IMAGES.glob("*/*.png"))[:: 800 // count][:count]):
        place = folder / each.parent.name / each.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(each, place)
        lines.append(f"{place.relative_to(folder)},{group(at)}")
    (folder / "groups.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def measured(exported, tmp_path_factory):
    """A folder whose workspace holds one VALID or INVALID process of `digits`, and no more."""
    folder = tmp_path_factory.mktemp("little")
    exported(folder / ".optpipe")
    (folder / "policy.toml").write_text(POLICY)
    bench = ("bench", "digits", "--precision", "fp32", "--batch", "1", "--processes", "1")
    optpipe(*bench, "--min-time", "0.1", "--percentile", "50", cwd=folder)
    return folder


@pytest.mark.parametrize(
    ("group", "count", "said"),
    [(lambda _: "all", 60, "in 1 group, fewer than 20"), (str, 10, "10 images")],
    ids=["one group of everything", "few groups of one"],
)
def test_an_evaluation_of_too_few_sources_spans_the_whole_range(
    measured, inside, tmp_path, group, count, said
):
    data = copy_images(tmp_path / "few", count, group)
    ran = inside("evaluate", "digits", "--data", data, "--json", cwd=measured).expect(0)
    (build,) = [row for row in ran.document["results"] if row["artifact"]]
    assert build["accuracy"]["drop_ci"] == [-1, 1]
    assert said in inside("evaluate", "digits", "--data", data, cwd=measured).stdout


def test_one_process_and_one_group_decide_nothing(measured, inside, tmp_path):
    data = copy_images(tmp_path / "few", 60, lambda _: "all")
    inside("evaluate", "digits", "--data", data, cwd=measured).expect(0)
    words = ("signoff", "digits", "--policy", "policy.toml", "--no-measure", "--no-figures")
    ran = inside(*words, *SHARED_MACHINE, "--json", cwd=measured).expect(5)
    judged = {one["name"].partition(".")[0]: one for one in ran.document["criteria"]}
    for name in ("latency", "accuracy", "regression"):
        assert judged[name]["verdict"] == "INCONCLUSIVE"
        assert judged[name]["reason"]
        assert judged[name]["remedy"]
        low, high = judged[name]["ci"] or (0, 1)
        assert low < high
    table = inside("compare", "--model", "digits", "--slo", "p50=1s", "--json", cwd=measured)
    rows = table.document["rows"]
    assert not any(row["dominated_by"] or row["change"] in ("faster", "slower") for row in rows)


def list_intervals(found):
    """Every interval in a document: bounds called `low` and `high`, and pairs called `ci` or `SOMETHING_ci`."""
    if isinstance(found, list):
        for each in found:
            yield from list_intervals(each)
    if isinstance(found, dict):
        if None not in (found.get("low"), found.get("high")):
            yield found["low"], found["high"]
        for key, value in found.items():
            if (key == "ci" or key.endswith("_ci")) and isinstance(value, list):
                yield tuple(value)
            yield from list_intervals(value)


def test_no_document_has_an_interval_of_width_zero(measured, inside, tmp_path):
    data = copy_images(tmp_path / "few", 60, lambda _: "all")
    judge = ("signoff", "digits", "--policy", "policy.toml", "--no-measure", "--no-figures")
    seen = []
    for words in (
        ("evaluate", "digits", "--data", data),
        ("compare", "--model", "digits"),
        ("compare", "--history", "digits"),
        judge + SHARED_MACHINE,
    ):
        found = list(list_intervals(inside(*words, "--json", cwd=measured).document))
        seen += found
        assert all(low < high for low, high in found), (words, found)
    assert seen
