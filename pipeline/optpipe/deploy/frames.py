"""Arrays over a pipe: a line of JSON, `{"tensors": [{name, dtype, shape, bytes}], …}`, and the tensors' bytes after it.

`triton_model.py` speaks the same and imports nothing of optpipe.
"""

import json
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray"]


def write_frame(pipe: IO[bytes], header: Mapping[str, Any], arrays: Arrays) -> None:
    """Writes one frame and flushes."""
    tensors = [
        {"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "bytes": array.nbytes}
        for name, array in arrays.items()
    ]
    pipe.write(json.dumps({**header, "tensors": tensors}).encode() + b"\n")
    for array in arrays.values():
        pipe.write(array.tobytes())
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> "tuple[dict[str, Any], dict[str, np.ndarray]] | None":
    """The next frame's header and arrays; None where the other end has closed."""
    import numpy as np

    if not (line := pipe.readline()):
        return None
    header = json.loads(line)
    return header, {
        each["name"]: np.frombuffer(pipe.read(each["bytes"]), each["dtype"]).reshape(each["shape"])
        for each in header["tensors"]
    }
