"""Finds the fastest DataLoader and the fastest DALI configuration here, then measures both again, in turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.throughput.throughput import (
    Throughput,
    ThroughputJob,
    make_dali_job,
    make_dataloader_job,
    measure_throughputs,
    require_rate,
)
from optpipe.preprocess.throughput.windows import compute_ratio_interval

LOADER_BATCH = 64
"""Larger batches make the DataLoader no faster and its rounds longer: each worker makes whole batches."""
LOSING = 0.8
"""Fewer workers are not tried once a count gives less than this share of the best so far."""
LOADS = (1.0, 0.9)
"""Shares of the hardware JPEG decoder worth trying; less makes the SMs the limit (0.65: 10 % slower, 0: a third)."""
CPU_SHARES = (0.125, 0.25)
"""Shares that the CPU's cores may take off a hardware decoder that is the limit."""
QUICK = 0.5
"""Measuring time while searching, of what the winners get."""


@dataclass(frozen=True, slots=True)
class TunedPreprocessing:
    """Every configuration that was tried, the winners measured anew, and decoding alone beside them."""

    rows: tuple[Throughput, ...]
    dataloader: Throughput
    dali: Throughput
    decode_only: Throughput
    plan: DaliPlan
    left_out: str | None = None
    """What was not tried, and why."""

    @property
    def speedup(self) -> tuple[float, tuple[float, float] | None]:
        """DALI over DataLoader, with its 95 % interval."""
        ours, theirs = self.dali.interval(), self.dataloader.interval()
        rates = self.dali.images_per_s, self.dataloader.images_per_s
        interval = compute_ratio_interval(rates[0], ours, rates[1], theirs) if ours and theirs else None
        return rates[0] / rates[1], interval

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
            "left_out": self.left_out,
        }


@dataclass(frozen=True, slots=True)
class TuningSearch:
    """What is tuned, and for how long each configuration is measured."""

    paths: Sequence[Path]
    transform: Transform
    plan: DaliPlan
    """Where the search starts."""
    cores: int
    seconds: float
    """Measuring time of the winners; while searching QUICK of it."""
    listener: Listener
    fixed: frozenset[str] = frozenset()
    """Fields that are as `plan` has them in every pipeline that is tried."""


def tune_preprocessing(search: TuningSearch) -> TunedPreprocessing:
    """Sweeps workers from all cores down, then where to decode, who takes which share of it, and threads.

    What fails (out of memory, say) is a row with its reason; raises StageError where nothing of a kind worked.
    """
    loaders, left_out = _try_loaders(search)
    found = _try_pipelines(search)
    best = max(found, key=lambda each: found[each].images_per_s)
    loader = max(loaders, key=lambda row: row.images_per_s)
    return _measure_in_turn(search, best, loader, (*loaders, *found.values()), left_out)


def _try_loaders(search: TuningSearch) -> tuple[list[Throughput], str | None]:
    """The DataLoader with ever fewer workers, as long as that does not lose clearly; beside it what was not tried."""
    plan, seconds, counts = search.plan, search.seconds * QUICK, _list_worker_counts(search.cores)
    device, batch_size = "cuda" if plan.device == "gpu" else "cpu", min(plan.batch_size, LOADER_BATCH)
    jobs = [
        shorten_job(make_dataloader_job(search.transform, workers, batch_size, device, seconds)) for workers in counts
    ]
    rows: list[Throughput] = []
    with search.listener.step("DataLoader by workers", total=len(jobs)) as step:
        measured = measure_throughputs(search.paths, jobs)
        for row in measured:
            rows.append(row)
            step.advance()
            best = max(each.images_per_s for each in rows)
            if len(rows) < len(jobs) and row.error is None and row.images_per_s < LOSING * best:
                measured.close()
                fewer = ", ".join(str(each) for each in counts[len(rows) :])
                return (
                    rows,
                    f"{fewer} workers not tried: {counts[len(rows) - 1]} reached {row.images_per_s / best:.2f} of the best",
                )
    return rows, None


def _try_pipelines(search: TuningSearch) -> dict[DaliPlan, Throughput]:
    """DALI: first where to decode, then the threads of the best."""
    tried: dict[DaliPlan, Throughput] = {}
    kept = {field: getattr(search.plan, field) for field in search.fixed}

    def measure(plans: Iterable[DaliPlan], name: str) -> DaliPlan:
        new = [each for each in dict.fromkeys(replace(each, **kept) for each in plans) if each not in tried]
        with search.listener.step(name, total=len(new)) as step:
            jobs = [shorten_job(make_dali_job(search.transform, each, search.seconds * QUICK)) for each in new]
            for each, row in zip(new, measure_throughputs(search.paths, jobs) if jobs else (), strict=True):
                tried[each] = row
                step.advance()
        return max(tried, key=lambda each: tried[each].images_per_s)

    best = measure(_list_first_plans(search.plan, search.cores), "DALI by decoder")
    measure(_list_second_plans(best, search.cores), "DALI by threads")
    return tried


def _measure_in_turn(
    search: TuningSearch, plan: DaliPlan, loader: Throughput, rows: tuple[Throughput, ...], left_out: str | None
) -> TunedPreprocessing:
    """The winners again, DALI's between those of the loader, so that drift of the machine hits both alike."""
    transform, seconds, settings = search.transform, search.seconds, loader.settings
    again = make_dataloader_job(transform, settings["workers"], loader.batch_size, settings["device"], seconds)
    ours = [make_dali_job(transform, plan, seconds), make_dali_job(transform, plan, seconds, decode_only=True)]
    kinds: dict[str, list[Throughput]] = {"dataloader": [], "dali": [], "dali-decode": []}
    order = ([again], [*ours, ours[0]], [again])
    with search.listener.step("both, interleaved", total=sum(map(len, order))) as step:
        for jobs in order:
            for row in measure_throughputs(search.paths, jobs):
                kinds[row.implementation].append(row)
                step.advance()
    merged = {name: merge_rows(found) for name, found in kinds.items()}
    return TunedPreprocessing(
        (*rows, *merged.values()), merged["dataloader"], merged["dali"], merged["dali-decode"], plan, left_out
    )


def shorten_job(job: ThroughputJob) -> ThroughputJob:
    """The same without waiting for a steady rate: to tell configurations apart, and in a bounded time."""
    return replace(job, patience=1.0)


def merge_rows(repeats: Sequence[Throughput]) -> Throughput:
    """All batches of all repetitions as one measurement; one that failed is left out unless all did."""
    good = [each for each in repeats if each.error is None]
    if not good:
        return require_rate(repeats[0], repeats[0].implementation)
    reader = tuple(value for each in good for value in each.reader_ns)
    batch = tuple(value for each in good for value in each.batch_ns)
    counts = tuple(len(each.batch_ns) for each in good)
    others = max(each.other_cpu_cores or 0.0 for each in good)
    return replace(good[0], reader_ns=reader, batch_ns=batch, repeats=counts, other_cpu_cores=others)


def _list_worker_counts(cores: int) -> tuple[int, ...]:
    """From all cores down: three quarters, then powers of two; with few cores also 0, the process itself."""
    powers = [1 << power for power in range(1, cores.bit_length()) if 1 << power <= cores]
    few = (0, 1) if cores <= 4 else ()
    return tuple(sorted({*few, *powers, cores * 3 // 4 or 1, cores}, reverse=True))


def _list_first_plans(plan: DaliPlan, cores: int) -> tuple[DaliPlan, ...]:
    """Where to decode; on a GPU with the shares of the hardware decoder and of the CPU."""
    if plan.device == "cpu":
        return (replace(plan, threads=cores),)
    mixed = replace(plan, decode="mixed", threads=min(8, cores))
    loads = [replace(mixed, hw_decoder_load=load) for load in LOADS]
    # the queue hides that the CPU takes longer for its part than the hardware
    shared = [replace(mixed, threads=cores, prefetch=plan.prefetch + 1, cpu_share=share) for share in CPU_SHARES]
    return (*loads, *shared, replace(plan, decode="cpu", threads=cores))


def _list_second_plans(best: DaliPlan, cores: int) -> tuple[DaliPlan, ...]:
    """Other thread counts for the best of the first plans; on a GPU also a longer queue, against a host that stutters."""
    if best.device == "cpu":
        return tuple(replace(best, threads=count) for count in sorted({1, max(1, cores // 2)}))
    counts = {max(1, best.threads // 2), min(cores, best.threads * 2)}
    queued = replace(best, prefetch=best.prefetch + 2)
    return (*(replace(best, threads=count) for count in sorted(counts)), queued)
