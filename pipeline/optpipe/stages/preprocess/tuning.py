"""Finds the fastest DataLoader and the fastest DALI configuration here, then measures both again, in turn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.core.events import Listener, Step
from optpipe.core.transform import Transform
from optpipe.stages.preprocess.dali_pipeline import DaliPlan
from optpipe.stages.preprocess.throughput import Throughput, dali_throughput, dataloader_throughput

ROUNDS = 2
"""The winners are measured this often, alternating, so that drift of the machine hits both."""
LOADS = (0.65, 0.8, 0.9, 1.0)
"""Shares of the hardware JPEG decoder worth trying; 0 loses by a factor of three where there is one."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Every configuration that was tried, the winners measured anew, and decoding alone beside them."""

    rows: tuple[Throughput, ...]
    dataloader: Throughput
    dali: Throughput
    decode_only: Throughput
    plan: DaliPlan

    @property
    def speedup(self) -> tuple[float, tuple[float, float] | None]:
        """DALI over DataLoader, with the interval that both intervals allow."""
        ours, theirs = self.dali.interval(), self.dataloader.interval()
        interval = (ours[0] / theirs[1], ours[1] / theirs[0]) if ours and theirs and theirs[0] > 0 else None
        return self.dali.images_per_s / self.dataloader.images_per_s, interval

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of what was chosen."""
        ratio, interval = self.speedup
        return {
            "dataloader": self.dataloader.to_dict(),
            "dali": self.dali.to_dict(),
            "decode_only": self.decode_only.to_dict(),
            "plan": self.plan.to_dict(),
            "speedup": ratio,
            "speedup_ci": list(interval) if interval else None,
            "share_of_decode_only": self.dali.images_per_s / self.decode_only.images_per_s
            if self.decode_only.images_per_s
            else None,
        }


def tuned(
    paths: Sequence[Path], transform: Transform, plan: DaliPlan, cores: int, seconds: float, listener: Listener
) -> Tuned:
    """Sweeps workers up to `cores`, then where to decode, the share of the hardware decoder, and threads.

    What fails (out of memory, say) is a row with its reason; raises StageError where nothing of a kind worked.
    """
    device = "cuda" if plan.device == "gpu" else "cpu"
    rows: list[Throughput] = []
    total = len(_workers(cores)) + len(_first_plans(plan, cores)) + len(_thread_plans(plan, cores)) + 3 * ROUNDS

    with listener.step("throughput", total=total) as step:

        def keep(measured: Throughput) -> Throughput:
            rows.append(measured)
            step.advance()
            return measured

        for workers in _workers(cores):
            keep(dataloader_throughput(paths, transform, workers, plan.batch_size, device, seconds))
        candidates = _first_plans(plan, cores)
        tried = {each: keep(dali_throughput(paths, transform, each, seconds)) for each in candidates}
        best = max(candidates, key=lambda each: tried[each].images_per_s)
        for each in _thread_plans(best, cores):
            if each not in tried:
                tried[each] = keep(dali_throughput(paths, transform, each, seconds))
        best = max(tried, key=lambda each: tried[each].images_per_s)
        loader = max((row for row in rows if row.implementation == "dataloader"), key=lambda row: row.images_per_s)
        return _final(paths, transform, best, loader, seconds, rows, step)


def _final(
    paths: Sequence[Path],
    transform: Transform,
    plan: DaliPlan,
    loader: Throughput,
    seconds: float,
    rows: list[Throughput],
    step: Step,
) -> Tuned:
    kinds: dict[str, list[Throughput]] = {"dataloader": [], "dali": [], "dali-decode": []}
    workers, device = loader.settings["workers"], loader.settings["device"]
    for _ in range(ROUNDS):
        kinds["dataloader"].append(dataloader_throughput(paths, transform, workers, plan.batch_size, device, seconds))
        kinds["dali"].append(dali_throughput(paths, transform, plan, seconds))
        kinds["dali-decode"].append(dali_throughput(paths, transform, plan, seconds, decode_only=True))
        for _ in kinds:
            step.advance()
    merged = {name: _merged(found) for name, found in kinds.items()}
    return Tuned((*rows, *merged.values()), merged["dataloader"], merged["dali"], merged["dali-decode"], plan)


def _merged(rounds: Sequence[Throughput]) -> Throughput:
    """All batches of all rounds as one measurement; a round that failed is left out unless all did."""
    good = [each for each in rounds if each.error is None]
    if not good:
        from optpipe.stages.preprocess.throughput import require_rate

        return require_rate(rounds[0], rounds[0].implementation)
    reader = tuple(value for each in good for value in each.reader_ns)
    batch = tuple(value for each in good for value in each.batch_ns)
    return replace(good[0], reader_ns=reader, batch_ns=batch)


def _workers(cores: int) -> tuple[int, ...]:
    """Powers of two up to the cores, and the cores; with few of them also 0, the process itself."""
    powers = [1 << power for power in range(1, cores.bit_length()) if 1 << power <= cores]
    return tuple(sorted({*((0,) if cores <= 4 else ()), *powers, cores}))


def _first_plans(plan: DaliPlan, cores: int) -> tuple[DaliPlan, ...]:
    """Where to decode, with the hardware decoder's share on a GPU."""
    if plan.device == "cpu":
        return (replace(plan, threads=cores),)
    middle = min(8, cores)
    mixed = [replace(plan, decode="mixed", threads=middle, hw_decoder_load=load) for load in LOADS]
    return (replace(plan, decode="cpu", threads=cores), *mixed)


def _thread_plans(plan: DaliPlan, cores: int) -> tuple[DaliPlan, ...]:
    """Other thread counts and a deeper queue for the best of the first plans."""
    counts = sorted({1, max(1, cores // 2), cores} if plan.device == "cpu" else {min(4, cores), cores})
    deeper = [] if plan.device == "cpu" else [replace(plan, prefetch=plan.prefetch + 1)]
    return tuple(each for each in (*(replace(plan, threads=count) for count in counts), *deeper) if each != plan)
