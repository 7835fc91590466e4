"""What Triton has to be told of a TensorRT engine, and which engines it cannot serve."""

import pytest
from tests.fakes.entries import artifact_info

from optpipe.backends.tensorrt_options import BuilderOptions
from optpipe.core.errors import BadInputError
from optpipe.core.records import plain_from_record
from optpipe.deploy.repository import list_profiles, require_servable


def engine(backend="tensorrt", **options):
    details = {"builder": plain_from_record(BuilderOptions(**options))}
    return artifact_info(backend=backend, device="cuda", details=details)


def test_every_profile_of_an_engine_is_named() -> None:
    assert list_profiles(engine(profiles="1:1:1,1:32:64")) == ["0", "1"]
    assert list_profiles(engine()) == list_profiles(artifact_info()) == []


def test_an_engine_that_needs_more_than_its_file_is_refused() -> None:
    require_servable(engine())
    require_servable(artifact_info())
    require_servable(engine("tensorrt-rtx", plugins="a.so"))  # served by optpipe's own session, which loads them
    with pytest.raises(BadInputError, match="build without strip_weights"):
        require_servable(engine(strip_weights=True))
    with pytest.raises(BadInputError, match="build without plugins"):
        require_servable(engine(plugins="a.so"))
