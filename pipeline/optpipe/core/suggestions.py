"""The names that a mistyped one may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches

SHORT_FORMS = {
    "aoti": "inductor",
    "aotinductor": "inductor",
    "ort": "onnxruntime",
    "rtx": "tensorrt-rtx",
    "torch-trt": "torch-tensorrt",
    "trt": "tensorrt",
}
"""How engineers call the backends: too short for a comparison of letters."""

SIMILARITY = 0.6
"""The share of letters in common from which a name is suggested: the default of difflib."""


def suggest_names(
    wrong: str,
    known: Iterable[str],
    *,
    otherwise: str = "",
    count: int = 1,
    similarity: float = SIMILARITY,
) -> str:
    """A question that names the `count` nearest of `known`, or `otherwise` if none is near.

    >>> suggest_names("precisions", ["precision", "backend"])
    'did you mean precision?'
    >>> suggest_names("ort", ["tensorrt", "onnxruntime"])
    'did you mean onnxruntime?'
    >>> suggest_names("x", ["precision"], otherwise="valid keys: precision")
    'valid keys: precision'
    """
    names = list(known)
    meant = SHORT_FORMS.get(wrong)
    near = (
        [meant] if meant in names else get_close_matches(wrong, names, n=count, cutoff=similarity)
    )
    return f"did you mean {', '.join(near)}?" if near else otherwise
