"""Of several GPUs the one is described and watched that CUDA uses; the rules are those of CUDA's programming guide."""

import pytest

from optpipe.workspace.environment import select_visible_gpus

UUIDS = ("GPU-8932f937-d72c", "GPU-89aa0000-0001", "GPU-1f000000-0002")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("2,1", (2, 1)),
        ("0,2,-1,1", (0, 2)),
        (" 1 , 0", (1, 0)),
        ("1,7,0", (1,)),
        ("GPU-8932f937,GPU-1f", (0, 2)),
        ("GPU-89", ()),
        ("GPU-1f,1", (2, 1)),
        ("none", ()),
        ("MIG-8932f937-d72c", (0, 1, 2)),
    ],
)
def test_which_gpus_cuda_shows(text: str | None, shown: tuple[int, ...]) -> None:
    assert select_visible_gpus(text, UUIDS) == shown


def test_without_a_gpu_none_is_shown() -> None:
    assert select_visible_gpus("0", ()) == ()
