"""Samples that share a source: the sources are the units of every interval, in both verifiers, from every format."""

import json

import numpy as np
import pytest
from tests.fakes.dossiers import examine

from optpipe.core.card import InputSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.classification import Classification
from optpipe.evaluate.tasks.texts import Embedding, TokenClassification
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.models.inputs.text_set import TextSet, text_set_from_path
from optpipe.stats.paired import Share, groups_from_names, mean_from_samples


def make_names(count, size):
    return [f"clip {at // size}" for at in range(count)]


def test_copies_of_a_sample_count_once():
    """Each sample four times, as a group of four: the interval is about that of the samples alone."""
    values = (np.arange(400) % 7).astype(float) / 6
    alone = mean_from_samples(values)
    copied = mean_from_samples(np.repeat(values, 4), groups_from_names(make_names(1600, 4)))
    assert copied.value == pytest.approx(alone.value)
    assert copied.interval(0.95) == pytest.approx(alone.interval(0.95), rel=1e-6)
    pretended = mean_from_samples(np.repeat(values, 4)).interval(0.95)
    assert np.ptp(pretended) < 0.6 * np.ptp(copied.interval(0.95))


def test_groups_of_one_are_independent_samples():
    assert groups_from_names([str(at) for at in range(100)]) is None
    assert groups_from_names([None] * 100) is None
    assert isinstance(mean_from_samples(np.ones(100), groups_from_names(["a"] * 0)), Share)


@pytest.mark.parametrize("groups", [1, 2, 19])
def test_too_few_groups_withhold_the_interval(groups):
    names = [str(at % groups) for at in range(1000)]
    seen = (
        Classification()
        .with_groups(names)
        .observe(
            [at % 10 for at in range(1000)],
            [[at % 10] for at in range(1000)],
            [[at % 10 if at > 5 else 3] for at in range(1000)],
            0.95,
            "",
        )
    )
    assert (seen["drop"].low, seen["drop"].high) == (-1.0, 1.0)
    assert (seen["agreement"].low, seen["agreement"].high) == (0.0, 1.0)


@pytest.mark.parametrize("groups", [1, 19])
def test_a_jackknife_of_too_few_groups_withholds_too(groups):
    truths = [["B-PER", "O"]] * 100
    found = [["O", "O"] if at < 5 else each for at, each in enumerate(truths)]
    task = TokenClassification().with_groups([str(at % groups) for at in range(100)])
    seen = task.observe(truths, truths, found, 0.95, "")
    assert (seen["drop"].low, seen["drop"].high) == (-1.0, 1.0)


def test_a_whole_lost_source_widens_a_jackknife():
    truths = [["B-PER", "O"]] * 400
    found = [["O", "O"] if at < 10 else each for at, each in enumerate(truths)]
    widths = [
        np.ptp([seen.low, seen.high])
        for names in ([None] * 400, make_names(400, 10))
        for seen in [
            TokenClassification()
            .with_groups(names)
            .observe(truths, truths, found, 0.95, "")["drop"]
        ]
    ]
    assert widths[1] > 2 * widths[0]


def test_pairs_have_no_groups():
    with pytest.raises(BadInputError, match="pairs"):
        Embedding().with_groups(["a", "a"])


POLICY = 'schema = 1\n[accuracy]\nmaximum_drop = "5 points"\n'


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
def test_both_verifiers_judge_groups_alike(workspace, tmp_path, size):
    entry = workspace.artifact("fp16")
    workspace.evaluate(entry, lost=20, groups=make_names(1000, size), dataset={"validation": False})
    record, folder = workspace.sign_off(POLICY, tmp_path / "one")
    found, verdict = examine(folder)
    assert (found.differs, verdict) == ([], record.verdict)
    drop = next(one for one in record.criteria if one.name == "accuracy.maximum_drop")
    assert ("in 1000 groups" if size == 1 else f"in {1000 // size} group") in drop.about
    assert drop.verdict == ("PASS" if size == 1 else "INCONCLUSIVE")


def test_the_report_says_that_samples_are_taken_as_independent(workspace, tmp_path):
    workspace.evaluate(workspace.artifact("fp16"), dataset={"validation": True})
    record, _ = workspace.sign_off(POLICY, tmp_path / "one")
    drop = next(one for one in record.criteria if one.name == "accuracy.maximum_drop")
    assert drop.about.endswith("taken as independent")


def test_tags_in_groups_agree_in_both_verifiers(workspace, tmp_path):
    truths = [["B-PER", "O", "B-ORG"]] * 300
    found = [["O", "O", "B-ORG"] if at % 31 < 2 else each for at, each in enumerate(truths)]
    workspace.evaluate(
        workspace.artifact("fp16"),
        task="token-classification",
        rows=(truths, truths, found),
        groups=make_names(300, 7),
    )
    record, folder = workspace.sign_off(POLICY, tmp_path / "one")
    checked, verdict = examine(folder)
    assert (checked.differs, verdict) == ([], record.verdict)


def write_lines(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_json_lines_name_groups(tmp_path):
    source = write_lines(
        tmp_path / "texts.jsonl",
        *(f'{{"text": "text {at}", "group": {at // 2}}}' for at in range(6)),
    )
    found, bad = text_set_from_path(source)
    assert ([each.group for each in found.files], bad) == (["0", "0", "1", "1", "2", "2"], ())
    manifest = tmp_path / "set.json"

    manifest.write_text(json.dumps(found.to_dict(tmp_path)))
    assert [each.group for each in TextSet.from_manifest(manifest).files] == [
        each.group for each in found.files
    ]


@pytest.mark.parametrize("second", ["", ', "group": [1]', ', "group": ""', ', "group": 1.5'])
def test_a_line_without_its_group_is_not_used(tmp_path, second):
    lines = [f'{{"text": "text {at}", "group": "a"}}' for at in range(40)]
    source = write_lines(tmp_path / "texts.jsonl", *lines, f'{{"text": "last"{second}}}')
    found, bad = text_set_from_path(source)
    assert (len(found.files), [path.name for path, _ in bad]) == (40, ["line 41"])
    assert "group" in bad[0][1]


SPECS = (InputSpec("x", "float32", (1, 2), (1, 2), (8, 2)),)


def write_arrays(path, groups, count=4):
    np.savez(path, x=np.arange(2.0 * count, dtype=np.float32).reshape(count, 2), group=groups)
    return path


@pytest.mark.parametrize("groups", [[7, 7, 8, 8], ["a", "a", "b", "b"]])
def test_arrays_name_groups(tmp_path, groups):
    found = read_tensor_set(write_arrays(tmp_path / "x.npz", np.array(groups)), SPECS)
    assert [each.group for each in found.files] == [str(each) for each in groups]


@pytest.mark.parametrize("groups", [[1, 2], [0.5] * 4, [[1], [1], [2], [2]], [True] * 4])
def test_arrays_that_are_no_groups_are_refused(tmp_path, groups):
    with pytest.raises(BadInputError, match="give a string or an integer"):
        read_tensor_set(write_arrays(tmp_path / "x.npz", np.array(groups)), SPECS)


def test_a_folder_of_images_names_groups_in_a_file(tmp_path):
    from PIL import Image

    for at in range(4):
        Image.new("RGB", (8, 8), (at * 20, 0, 0)).save(tmp_path / f"{at}.png")
    write_lines(tmp_path / "groups.csv", *(f"{at}.png,clip {at // 2}" for at in range(4)))
    found, bad = image_set_from_path(tmp_path)
    assert ([each.group for each in found.files], bad) == (
        ["clip 0", "clip 0", "clip 1", "clip 1"],
        (),
    )
    write_lines(tmp_path / "groups.csv", "0.png,a", "1.png,a")
    with pytest.raises(BadInputError, match="names no group for 2 of 4 images"):
        image_set_from_path(tmp_path)
    write_lines(tmp_path / "groups.csv", "0.png")
    with pytest.raises(BadInputError, match="line 1"):
        image_set_from_path(tmp_path)
    write_lines(tmp_path / "groups.csv", *(f"{at}.png,a" for at in range(4)), "0.png,b")
    with pytest.raises(BadInputError, match=r"line 5: 0\.png has two groups"):
        image_set_from_path(tmp_path)
