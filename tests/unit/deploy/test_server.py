"""The reason that a server's log gives, and which servers are taken."""

import sys

import pytest

from optpipe.core.errors import BadInputError, MissingError
from optpipe.deploy.server import find_server, read_reason

LOG = """I1122 12:44:06.302228 1 model_lifecycle.cc:472] "loading: ens:1"
E1122 12:44:06.302386 1 ensemble_scheduler.cc:1468] "unable to create stream: CUDA driver version is insufficient"
E1122 12:44:06.402386 1 model_lifecycle.cc:642] "failed to load 'net' version 1: Internal: no such file"
| net   | 1       | UNAVAILABLE: Internal: no such file |
error: creating server: Internal - failed to load all models
"""


def test_the_reason_is_the_model_s_own(tmp_path):
    (tmp_path / "log").write_text(LOG)
    assert read_reason(tmp_path / "log") == "Internal: no such file"
    (tmp_path / "log").write_text("\n".join(LOG.splitlines()[:3]))
    assert read_reason(tmp_path / "log") == "failed to load 'net' version 1: Internal: no such file"
    (tmp_path / "log").write_text(
        'E1122 12:44:06.3 1 cuda_utils.cc:18] "CudaDriverHelper has not been initialized."\n' + LOG.splitlines()[0]
    )
    assert read_reason(tmp_path / "log") == "loading: ens:1", "a server that is not ready is named by where it is"
    (tmp_path / "log").write_text("Segmentation\x1b[31m fault\n")
    assert read_reason(tmp_path / "log") == "Segmentation\\x1b[31m fault"
    (tmp_path / "log").write_text("")
    assert read_reason(tmp_path / "log") == "it wrote nothing"


def test_no_server_is_a_missing_tool_with_the_way_to_get_one(monkeypatch, tmp_path):
    monkeypatch.delenv("OPTPIPE_TRITON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match=r"nvidia-pytriton==0\.7\.0"):
        find_server(None)
    with pytest.raises(MissingError, match="has no nvidia-pytriton"):
        find_server(sys.executable)
    with pytest.raises(BadInputError, match="neither"):
        find_server(str(tmp_path / "nothing"))
