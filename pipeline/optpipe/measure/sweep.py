"""Which batch sizes to measure next. Pure decisions over a function that measures one."""

from collections.abc import Callable, Sequence

from optpipe.core.errors import BadInputError
from optpipe.core.measurement import Measurement
from optpipe.measure.slo import Slo, has_figures

MIN_SWEEP_GAIN = 1.05
"""Two steps in a row with less than 5 % more throughput: saturated."""


def batch_sizes_from_text(text: str, flag: str = "--batch") -> tuple[int, ...]:
    """Reads the batch sizes of an option: `8`, a list `1,8,32`, or powers of two `1:256`."""
    try:
        if ":" in text:
            low, high = (int(part) for part in text.split(":"))
            sizes = [low]
            while sizes[-1] * 2 <= high:
                sizes.append(sizes[-1] * 2)
            if low < 1 or high < low:
                raise ValueError  # noqa: TRY301
            return tuple(sizes) if sizes[-1] == high else (*sizes, high)
        sizes = sorted({int(part) for part in text.split(",")})
        if sizes[0] < 1:
            raise ValueError  # noqa: TRY301
        return tuple(sizes)
    except ValueError as error:
        raise BadInputError(
            f"{flag} {text}: expected positive sizes, such as 8, 1,8,32, or 1:256 for powers of two"
        ) from error


def sweep_batch_sizes(
    measure: Callable[[int], Measurement], sizes: Sequence[int], slo: Slo | None = None, *, to_the_end: bool = False
) -> list[Measurement]:
    """Measures `sizes` upwards until memory, saturation or the limit ends it; then closes in on the limit.

    A size that ran out of memory is in the result, without figures. With a limit, saturation does not end the sweep, and
    neither does a size of which the limit's percentile was withheld: it is not known to be beyond.
    """
    found: list[Measurement] = []
    for size in sorted(set(sizes)):
        found.append(measure(size))
        if found[-1].interrupted or not has_figures(found[-1]):
            break
        if slo is not None and not slo.is_met_by(found[-1]) and slo.explain_not_judged(found[-1]) is None:
            break
        if slo is None and not to_the_end and is_saturated(found):
            break
    if slo is not None and not found[-1].interrupted:
        found += bisect_batch_size(measure, found, slo)
    return sorted(found, key=lambda each: each.load.batch_size)


def is_saturated(found: Sequence[Measurement]) -> bool:
    """Whether the last two sizes each gave less than 5 % more throughput than the best before them."""
    rates = [each.throughput_images_per_s.value for each in found if each.throughput_images_per_s]
    if len(rates) < 3:
        return False
    return all(rates[at] < MIN_SWEEP_GAIN * max(rates[:at]) for at in (len(rates) - 2, len(rates) - 1))


def bisect_batch_size(
    measure: Callable[[int], Measurement], found: Sequence[Measurement], slo: Slo
) -> list[Measurement]:
    """Halves between the largest size inside the limit and the smallest beyond it, to one eighth of the size or to 1."""
    inside = max((each.load.batch_size for each in found if slo.is_met_by(each)), default=0)
    beyond = min(
        (each.load.batch_size for each in found if not slo.is_met_by(each) and each.load.batch_size > inside), default=0
    )
    more: list[Measurement] = []
    while inside and beyond - inside > max(1, inside // 8):
        more.append(measure((inside + beyond) // 2))
        if more[-1].interrupted:
            break
        if slo.is_met_by(more[-1]):
            inside = more[-1].load.batch_size
        else:
            beyond = more[-1].load.batch_size
    return more


def find_largest_inside(found: Sequence[Measurement], slo: Slo) -> Measurement | None:
    """The largest batch that meets the limit; an INVALID measurement only where no valid one does."""
    met = (each for each in found if slo.is_met_by(each))
    return max(met, key=lambda each: (each.is_valid, each.load.batch_size), default=None)


def find_nearest_to_limit(found: Sequence[Measurement], slo: Slo) -> Measurement | None:
    """What comes closest to a limit that nothing meets."""
    measured = [each for each in found if slo.read(each) is not None]
    return min(measured, key=lambda each: seen.value if (seen := slo.read(each)) else 0.0, default=None)
