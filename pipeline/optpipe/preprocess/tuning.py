"""Finds the fastest DataLoader and the fastest DALI configuration here, then measures both again, in turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import randbits

from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.throughput import (
    PATIENCE,
    LoaderPlan,
    Throughput,
    ThroughputJob,
    ThroughputTuning,
    compute_ratio_interval,
    make_dali_job,
    make_loader_job,
    measure_throughputs,
)
from optpipe.stats.ratio import alternate

LOADER_BATCH = 64
"""Larger batches make the DataLoader no faster and its rounds longer: each worker makes whole batches."""
LOSING = 0.8
"""Fewer workers are not tried once a count gives less than this share of the best so far."""
LOADS = (1.0, 0.9)
"""Shares of the hardware JPEG decoder worth trying; less makes the SMs the limit (0.65: 10 % slower, 0: a third)."""
CPU_SHARES = (0.125, 0.25)
"""Shares that the CPU's cores may take off a hardware decoder that is the limit."""
ROUNDS = 2
QUICK = 0.5
"""Measuring time while searching, of what the winners get."""


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


def tune_preprocessing(search: TuningSearch) -> tuple[ThroughputTuning, tuple[Throughput, ...]]:
    """Sweeps workers from all cores down, then where to decode, who takes which share of it, and threads.

    Also the raw times of all that was tried, in that order, then of the DataLoader, DALI and decoding alone, measured again.
    What fails (out of memory, say) is a row with its reason; raises StageError where nothing of a kind worked.
    """
    loaders, left_out = _try_loaders(search)
    found = _try_pipelines(search)
    plan = max(found, key=lambda each: found[each].images_per_s)
    loader = max(loaders, key=lambda row: row.images_per_s)
    seed = randbits(32)
    tried, again = (*loaders, *found.values()), _measure_again(search, plan, loader, seed)
    return record_from_throughputs(tried, *again, left_out, seed), (*tried, *again)


def _try_loaders(search: TuningSearch) -> tuple[list[Throughput], str | None]:
    """The DataLoader with ever fewer workers, as long as that does not lose clearly; beside it what was not tried."""
    counts, on_gpu = _list_worker_counts(search.cores), search.plan.device == "gpu"
    batch_size = min(search.plan.batch_size, LOADER_BATCH)
    plans = [LoaderPlan(workers, batch_size, "cuda" if on_gpu else "cpu") for workers in counts]
    jobs = [
        shorten_job(make_loader_job(search.paths, search.transform, each, search.seconds * QUICK)) for each in plans
    ]
    rows: list[Throughput] = []
    with search.listener.step("DataLoader by workers", total=len(jobs)) as step:
        measured = measure_throughputs(jobs)
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
            seconds = search.seconds * QUICK
            jobs = [shorten_job(make_dali_job(search.paths, search.transform, each, seconds)) for each in new]
            for each, row in zip(new, measure_throughputs(jobs), strict=True):
                tried[each] = row
                step.advance()
        return max(tried, key=lambda each: tried[each].images_per_s)

    best = measure(_list_first_plans(search.plan, search.cores), "DALI by decoder")
    measure(_list_second_plans(best, search.cores), "DALI by threads")
    return tried


def _measure_again(
    search: TuningSearch, plan: DaliPlan, loader: Throughput, seed: int
) -> tuple[Throughput, Throughput, Throughput]:
    """DataLoader, DALI and DALI's decoding alone, in rounds, so that drift of the machine hits all alike."""
    again = replace(loader.job, seconds=search.seconds, patience=PATIENCE)
    ours = make_dali_job(search.paths, search.transform, plan, search.seconds)
    decode = make_dali_job(search.paths, search.transform, plan, search.seconds, decode_only=True)
    with search.listener.step("both, interleaved", total=3 * ROUNDS) as step:

        def measure(*jobs: ThroughputJob) -> list[Throughput]:
            found = []
            for row in measure_throughputs(jobs):
                found.append(row)
                step.advance()
            return found

        found = alternate({"loader": partial(measure, again), "dali": partial(measure, ours, decode)}, ROUNDS, seed)
    loaders, pipelines, decoders = ([rows[0] for rows in found["loader"]], *zip(*found["dali"], strict=True))
    return merge_repeats(loaders), merge_repeats(pipelines), merge_repeats(decoders)


def record_from_throughputs(
    tried: Sequence[Throughput],
    dataloader: Throughput,
    dali: Throughput,
    decode_only: Throughput,
    left_out: str | None = None,
    seed: int = 0,
) -> ThroughputTuning:
    """What is stored and shown of a tuning."""
    ours, theirs, rate, other = (
        dali.compute_interval(), dataloader.compute_interval(), dali.images_per_s, dataloader.images_per_s
    )  # fmt: skip
    return ThroughputTuning(
        tuple(each.summarize() for each in tried),
        dataloader.summarize(),
        dali.summarize(),
        decode_only.summarize(),
        speedup=rate / other,
        speedup_ci=compute_ratio_interval(rate, ours, other, theirs) if ours and theirs else None,
        share_of_decode_only=rate / decode_only.images_per_s,
        left_out=left_out,
        seed=seed,
    )


def shorten_job(job: ThroughputJob) -> ThroughputJob:
    """The same without waiting for a steady rate: to tell configurations apart, and in a bounded time."""
    return replace(job, patience=1.0)


def merge_repeats(repeats: Sequence[Throughput]) -> Throughput:
    """All repetitions as one measurement, those that failed left out. Raises StageError where all did."""
    times = tuple(each for one in repeats for each in one.repeats)
    if not times:
        raise StageError(
            f"{repeats[0].job.implementation} could not be measured: {repeats[0].error}\n"
            "use --no-throughput to verify parity only"
        )
    return Throughput(repeats[0].job, times)


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
