"""No name that came from outside becomes a path, and no two names share a file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.deploy.triton_config import WARM_UP, add_warm_up
from optpipe.models.sources.resolve import CardSource
from optpipe.workspace.file_names import REQUEST, make_file_name, require_name
from optpipe.workspace.seal import find_approved_baseline, seal_folder, store_baseline

EVIL = (
    *(
        "../../../ESCAPED",
        "/abs",
        "serving/input:0",
        "..",
        ".",
        "",
        "a/../b",
        "evil/digits",
        "digits/",
    ),
    *(
        "a\\b",
        "nul\0",
        "line\nbreak",
        "\x1b[2J",
        "x" * 5000,
        "~",
        "CON",
        "digits.json",
        "ü",
        "\ud800",
        " ",
    ),
)
names = st.one_of(
    st.text(),
    st.sampled_from(EVIL),
    st.text("./\\~-_aA", max_size=8),
    st.characters().map(lambda one: f"a{one}"),
)


@given(names)
def test_a_file_name_is_one_part_of_a_path(name) -> None:
    made = make_file_name(name)
    assert not {"/", "\\", "\0", "\n", " "} & set(made)
    assert made not in ("", ".", "..")
    assert made.isascii()
    assert len(made) <= 100


@given(names, names)
def test_two_names_never_share_a_file(one, other) -> None:
    assert (make_file_name(one) == make_file_name(other)) == (one == other)
    assert make_file_name(make_file_name(one)) != make_file_name(one) or make_file_name(one) == one


@pytest.mark.parametrize("name", ["digits", "resnet50.a1_in1k", "net.make", "a-b_c+1"])
def test_plain_names_stay_as_they_are(name) -> None:
    assert make_file_name(name) == name


@pytest.mark.parametrize(
    "name", [each for each in EVIL if each not in ("x" * 5000, "~", "CON", "digits.json", "ü")]
)
def test_a_card_with_such_a_name_is_refused(tmp_path, name) -> None:
    with pytest.raises(BadInputError, match="cannot be the name of a model"):
        require_name(name, "card.toml: name")
    if name.isprintable():
        card = tmp_path / "card.toml"
        card.write_text(f"name = {json.dumps(name)}\nsource = 'net.onnx'\ntask = 'other'\n")
        with pytest.raises(BadInputError, match="cannot be the name of a model"):
            assert CardSource(card).card


def test_warm_up_data_stay_in_their_folder(tmp_path) -> None:
    pytest.importorskip("tritonclient.grpc")
    from tritonclient.grpc import model_config_pb2

    folder = tmp_path / "repository" / "model"
    folder.mkdir(parents=True)
    config = model_config_pb2.ModelConfig()
    inputs = [
        (TensorSpec(each, "float32", (2,)), b"12345678") for each in EVIL if each.isprintable()
    ]
    add_warm_up(config, folder, "first", 1, inputs)
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.parent for path in written} == {folder / WARM_UP}
    assert len(written) == len(inputs)
    assert {*config.model_warmup[0].inputs} == {spec.name for spec, _ in inputs}


@pytest.mark.parametrize(
    "name", ["evil/digits", "..", "../baselines/digits", "/digits", "digits/", "digits.json"]
)
def test_a_baseline_is_not_replaced_by_a_model_of_another_name(tmp_path, name) -> None:
    workspace = tmp_path / "workspace"
    for folder, model in (("own", "digits"), ("evil", name)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / REQUEST).write_text(json.dumps({"model": model}))
        seal_folder(tmp_path / folder)
        store_baseline(Files(tmp_path / folder), workspace)
    for model in ("digits", name):
        found = find_approved_baseline(workspace, model)
        assert json.loads(found.read(REQUEST)) == {"model": model}
        assert found.folder.parent == workspace / "baselines"
    assert {path.name for path in tmp_path.iterdir()} == {"own", "evil", "workspace"}


def test_a_baseline_is_not_replaced_by_another_model_of_its_name(tmp_path) -> None:
    def approve(network, content):
        folder = tmp_path / f"of-{content}"
        folder.mkdir()
        (folder / REQUEST).write_text(json.dumps({"model": "digits", "network": network}))
        seal_folder(folder)
        return store_baseline(Files(folder), tmp_path / "w", content=content)

    narrow, wide, trained_again = (
        approve("8 to 10", "a"), approve("8 to 20", "b"), approve("8 to 10", "c")
    )  # fmt: skip
    for network, content, expected in (
        ("8 to 10", "a", narrow),
        ("8 to 20", "b", wide),
        ("8 to 20", "trained again", wide),
        ("8 to 10", "trained again", trained_again),
        ("8 to 30", "another", trained_again),  # the sign-off says that it is another network
        (None, "", trained_again),
    ):
        found = find_approved_baseline(tmp_path / "w", "digits", network, content)
        assert found.folder == expected
    assert find_approved_baseline(tmp_path / "w", "other", "8 to 10", "a") is None


def test_a_baseline_of_an_earlier_version_is_found_and_replaced_by_the_next(tmp_path) -> None:
    for name in ("w/baselines/digits", "new"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / REQUEST).write_text(json.dumps({"model": "digits"}))
        seal_folder(tmp_path / name)
    earlier = tmp_path / "w" / "baselines" / "digits"
    note = {"approved_utc": "2026-01-01T00:00:00+00:00", "because": None, "dossier": "d"}
    earlier.with_name("digits.json").write_text(json.dumps(note))
    assert find_approved_baseline(tmp_path / "w", "digits", "8 to 10").folder == earlier
    newer = store_baseline(Files(tmp_path / "new"), tmp_path / "w")
    assert find_approved_baseline(tmp_path / "w", "digits", "8 to 10").folder == newer
