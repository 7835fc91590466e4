"""Names of files that several verbs read or write, and file names made of names that came from outside."""

import hashlib
import re

from optpipe.core.errors import BadInputError

# an exported model
ONNX = "model.onnx"
CARD = "card.json"
REFERENCE = "reference.npz"
TOKENIZER = "tokenizer.json"
# a verification
OUTPUT_ERRORS = "errors.parquet"
# a calibration
CALIBRATION_SET = "set.json"
MODELOPT_LOG = "modelopt.log"
# runs
PREDICTIONS = "predictions.parquet"
EVALUATION = "evaluate.json"
PREPROCESSING = "preprocess.json"
ROWS = "images.parquet"
END_TO_END = "end-to-end.json"
PROFILE = "profile.json"
TURNS = "turns.json"
# a dossier
REQUEST = "request.json"
POLICY = "policy.toml"
VERDICT = "verdict.json"
BUILDS = "builds"

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
_SHOWN = 60
"""Characters of a name that stay readable in its file name."""


def make_file_name(name: str) -> str:
    """A name for a file or folder, made of the name of a model or tensor, or of anything else from outside.

    It has no separator, is never `.` or `..`, has at most 100 characters, and two names never share one: a name of letters,
    digits, `_`, `.`, `+` and `-` stays as it is, every other one gets `~` and its hash.

    >>> make_file_name("resnet50.a1_in1k")
    'resnet50.a1_in1k'
    >>> make_file_name("../digits")
    'digits~c9e8680d916886e7'
    """
    if _PLAIN.fullmatch(name) and not name.endswith(".json"):  # a record beside the folder ends so
        return name
    readable = re.sub(r"[^A-Za-z0-9_+-]+", "-", name).strip("-")[:_SHOWN]
    return f"{readable}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def require_name(name: str, what: str) -> str:
    """`name`, if it can name a model: one printable line without `/` and `\\`, and neither `.` nor `..`.

    Raises BadInputError, with `what` for the place.
    """
    if not name.isprintable() or not name.strip() or {"/", "\\"} & set(name) or set(name) == {"."}:
        raise BadInputError(
            f"{what}: {name!r} cannot be the name of a model\ngive one printable line without / and \\, such as my-model"
        )
    return name
