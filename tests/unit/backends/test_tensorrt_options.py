"""Options of a TensorRT build as values: what is read, what is in an artifact's key, and which profile a shape runs in."""

from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.backends.registry import BACKENDS
from optpipe.backends.tensorrt_builder import (
    BuilderOptions,
    capabilities_from_text,
    describe_in_key,
    list_profile_shapes,
    options_from_given,
    require_supported,
    sources_from_text,
)
from optpipe.backends.tensorrt_session import choose_profile
from optpipe.build.build import warn_of_plugins
from optpipe.cli.parsing import build_plan_from_options, model_from_options
from optpipe.core.card import InputSpec, batch_ranges_from_text, join_batch_ranges
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import hash_file
from optpipe.workspace.store import Store

RANGES = st.lists(st.integers(1, 256), min_size=3, max_size=3).map(sorted).map(tuple)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))
def test_every_option_is_described_and_has_its_own_default(backend) -> None:
    for device in backend.devices():
        options = backend.describe_options(device)
        assert len({each.name for each in options}) == len(options)
        assert {each.name: each.default for each in options if not each.builds} == backend.runtime_options(device)
        assert all(each.help and not each.help.endswith(".") for each in options)
        assert all(each.default in each.choices for each in options if each.choices)


def test_options_at_their_defaults_rename_no_artifact() -> None:
    assert describe_in_key(BuilderOptions()) == {"workspace_bytes": 0, "optimization_level": -1}
    assert describe_in_key(options_from_given({"refit": "false", "aux_streams": "-1"}, "tensorrt", "tensorrt")) == (
        describe_in_key(BuilderOptions())
    )


def test_a_plugin_is_in_the_key_by_its_bytes_not_its_place(tmp_path) -> None:
    for folder, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.so").write_bytes(content)
    keys = [describe_in_key(BuilderOptions(plugins=str(tmp_path / folder / "plugin.so"))) for folder in "abc"]
    assert keys[0] == keys[1] != keys[2]


def test_capabilities_and_sources_are_read_as_the_library_names_them() -> None:
    assert capabilities_from_text("8.6, 12.0,8.6") == ("SM86", "SM120")
    assert sources_from_text("-A,+B") == (("A", False), ("B", True))
    for text in ("8", "ada", "8.x"):
        with pytest.raises(BadInputError, match="compute_capabilities"):
            capabilities_from_text(text)


@given(st.lists(RANGES, min_size=1, max_size=4))
def test_the_joined_range_holds_every_profile(ranges) -> None:
    low, usual, high = join_batch_ranges(ranges)
    assert low == min(each[0] for each in ranges)
    assert high == max(each[2] for each in ranges)
    assert low <= usual <= high
    text = ",".join(":".join(map(str, each)) for each in ranges)
    assert batch_ranges_from_text(text) == tuple(ranges)
    spec = InputSpec("x", "float32", (low, 3), (usual, 3), (high, 3))
    shapes = list_profile_shapes(BuilderOptions(profiles=text), (spec,))
    assert [(each.min[0], each.opt[0], each.max[0]) for (each,) in shapes] == list(ranges)


@given(st.lists(RANGES, min_size=1, max_size=4), st.integers(1, 300))
def test_a_shape_runs_in_a_profile_that_holds_it_or_in_none(ranges, size) -> None:
    profiles = [{"x": tuple((edge, 3) for edge in each)} for each in ranges]
    chosen = choose_profile(profiles, {"x": (size, 3)})
    holding = [index for index, (low, _, high) in enumerate(ranges) if low <= size <= high]
    assert (chosen in holding) if holding else chosen is None
    exact = [index for index in holding if ranges[index][1] == size]
    assert not exact or ranges[chosen][1] == size, "where one is tuned for just this size, it is taken"


def test_several_ranges_of_batch_become_profiles_of_the_backends_that_have_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    plan = build_plan_from_options(
        "fp32", "tensorrt-rtx,onnxruntime", None, [], images=None, calibration=None, batch="1:1:1,1:32:64"
    )
    assert plan.options == {"tensorrt-rtx": {"profiles": "1:1:1,1:32:64"}}
    assert model_from_options("digits", "default", "1:1:1,1:32:64", [], store).batch == (1, 32, 64)
    with pytest.raises(BadInputError, match="--batch 1:x"):
        model_from_options("digits", "default", "1:1:1,1:x", [], store)


def test_a_build_says_which_plugin_libraries_run(tmp_path) -> None:
    library = tmp_path / "mine.so"
    library.write_bytes(b"code")
    plan = build_plan_from_options(
        "fp32", "tensorrt-rtx", None, [f"tensorrt-rtx.plugins={library}"], images=None, calibration=None
    )
    heard = SilentListener()
    warn_of_plugins(plan, heard)
    assert heard.warnings == [
        f"plugin library {library} runs its code here and wherever the artifact loads, sha256 {hash_file(library)}"
    ]


def test_what_an_older_library_does_not_know_is_refused_by_name() -> None:
    class Level(Enum):
        NONE = 0
        AMPERE_PLUS = 1

    older = SimpleNamespace(
        __name__="tensorrt", __version__="10.0", HardwareCompatibilityLevel=Level, TacticSource=Level
    )
    require_supported(older, BuilderOptions(hardware_compatibility="ampere+"))
    with pytest.raises(BadInputError, match=r"sameComputeCapability: tensorrt 10\.0 does not have it"):
        require_supported(older, BuilderOptions(hardware_compatibility="sameComputeCapability"))
