"""A metric: a callable that scores one sample."""

from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any

from optpipe.api.arguments import check_arguments
from optpipe.core.errors import BadInputError


class Metric:
    """`function(outputs, truth)` scores one sample with a number in `range`; the score of a set is the mean over its samples.

    `outputs` are those of one sample, without the batch axis: an array, or a named tuple of several outputs. `truth` is what the
    data give with the sample. Scores are shown and limited as a share of the range, so that a point is 1% of it.
    With `larger_is_better=False` they are turned around.

    A verdict records that the scores come from a callable, and the hash of its source: means, drops, and intervals can be
    recomputed from the stored scores, the scores themselves cannot.

    >>> import numpy as np, optpipe as op
    >>> op.Metric(lambda outputs, label: float(np.argmax(outputs) == label), range=(0, 1), name="top1")
    Metric('top1', range=(0, 1))
    """

    @check_arguments
    def __init__(
        self,
        function: Annotated[
            Callable[[Any, Any], Any], "a function of (outputs, truth) that returns a number"
        ],
        *,
        range: Annotated[
            tuple[float, float], "two finite numbers, the smaller first, such as (0, 1)"
        ],
        name: str | None = None,
        larger_is_better: bool = True,
    ) -> None:
        low, high = range
        if not (isfinite(low) and isfinite(high) and low < high):
            raise BadInputError(
                f"range: expected finite numbers, the smaller first, such as (0, 1), not {range}"
            )
        self.function, self.range, self.larger_is_better = function, range, larger_is_better
        given: str = name or str(getattr(function, "__name__", type(function).__name__))
        self.name = "metric" if given == "<lambda>" else given
        if not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise BadInputError(f"name {self.name!r}: expected letters, digits, and any of - . _")

    @property
    def source_sha256(self) -> str:
        """Hash of the callable's source, as a verdict records it."""
        from optpipe.core.files import hash_callable

        return hash_callable(self.function)

    def __repr__(self) -> str:
        turned = "" if self.larger_is_better else ", larger_is_better=False"
        return f"Metric({self.name!r}, range={self.range}{turned})"


def require_metric(metric: Any) -> None:
    """Raises BadInputError for anything but a Metric or None, with how to make one of a callable."""
    if metric is None or isinstance(metric, Metric):
        return
    if not callable(metric):
        raise BadInputError(
            f"metric {metric!r}: expected a Metric\ngive metric=Metric(function, range=(0, 1))"
        )
    name = getattr(metric, "__name__", "function").replace("<lambda>", "function")
    raise BadInputError(
        f"metric: a callable needs the range of its scores\ngive metric=Metric({name}, range=(0, 1))"
    )
