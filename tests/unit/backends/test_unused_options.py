"""An option of a backend that is not used has no effect, which is said with its name."""

from optpipe.backends.registry import parse_options, warn_of_unused_options
from optpipe.core.events import SilentListener
from optpipe.sweep.job import Matrix
from optpipe.sweep.matrix import list_option_keys

TEXTS = ("inductor.fuse=false", "inductor.max_autotune=true", "onnxruntime.threads=2")


def test_each_option_without_an_effect_is_named() -> None:
    listener = SilentListener()
    warn_of_unused_options(parse_options(TEXTS), {"onnxruntime"}, "measured", listener)
    assert [str(each).partition(" has no effect")[0] for each in listener.warnings] == [
        "--option inductor.fuse",
        "--option inductor.max_autotune",
    ]


def test_a_sweep_knows_the_options_of_all_its_cells() -> None:
    matrix = Matrix(models=("net",), build_options=TEXTS[:1], options=(TEXTS[1:2], TEXTS[2:]))
    assert list_option_keys(matrix) == {
        "inductor": {"fuse", "max_autotune"},
        "onnxruntime": {"threads"},
    }
