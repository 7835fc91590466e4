"""How DALI and inference share a CPU's cores, and what they could reach at best.

On a GPU one part waits while the other works; on a CPU both want the same cores. An image costs `preprocess_s` and
`inference_s` of processor time, so no order of work gives more than cores / (preprocess_s + inference_s) images per second:
the work-conserving bound, which leaves no core idle and loses nothing to sharing.

What costs more than that, measured on two cores with ONNX Runtime: threads that work on one batch wait for each other at
every operator (and spin meanwhile, which takes DALI's cores). Streams of one thread each do not wait. So a few divisions
are tried, and the fastest is measured.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Who gets how many threads."""

    streams: int
    """Batches that inference works on at once."""
    threads: int
    """Of inference, for each stream; 0: as many as the runtime takes by itself."""
    dali_threads: int
    spinning: bool
    """Whether inference's threads keep their cores while they wait for each other."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @property
    def options(self) -> dict[str, Any]:
        """Of ONNX Runtime's session."""
        return {"threads": self.threads, "spinning": self.spinning}


def list_core_splits(cores: int, dali_threads: int, fixed: Mapping[str, Any]) -> tuple[CoreSplit, ...]:
    """The divisions worth trying between the usual one, all cores for one batch, which is first, and a stream per core.

    `fixed` are session options that the user gave: then only what agrees with them.
    """
    if "threads" in fixed:
        shapes = [(1, int(fixed["threads"]))]
    else:
        shapes = [(1, 0), *((count, cores // count) for count in sorted({2, cores // 2, cores}) if 1 < count <= cores)]
    found = []
    for streams, threads in shapes:
        waits = streams == 1 and threads != 1  # one thread has nobody to wait for
        spins = (bool(fixed["spinning"]),) if "spinning" in fixed else (True, False) if waits else (False,)
        found += [CoreSplit(streams, threads, dali_threads, spinning) for spinning in spins]
    return tuple(found)


def vary_dali_threads(best: CoreSplit, cores: int) -> tuple[CoreSplit, ...]:
    """The same with other counts of DALI's threads: one, half the cores, all."""
    counts = sorted({1, max(1, cores // 2), cores} - {best.dali_threads})
    return tuple(replace(best, dali_threads=count) for count in counts)


@dataclass(frozen=True, slots=True)
class CoreSharing:
    """What the parts cost and reach on shared cores, in images per second and seconds of processor time per image."""

    cores: int
    division: CoreSplit
    tried: Mapping[CoreSplit, float]
    """Images per second of each division, from a short look."""
    preprocess: float
    """Alone, with the threads that it has in the division."""
    inference: float
    """Alone, with the streams and threads that it has in the division."""
    preprocess_s: float
    inference_s: float
    whole_s: float

    @property
    def bound(self) -> float:
        """What no order of work can exceed: all cores busy, and only with what each part costs alone."""
        return self.cores / (self.preprocess_s + self.inference_s)

    def to_dict(self, whole: float, slower: float) -> dict[str, Any]:
        """The JSON form; `whole` is the rate of both at once, `slower` that of the slower part alone at its best."""
        return {
            "cores": self.cores,
            "division": self.division.to_dict(),
            "tried": [{**each.to_dict(), "images_per_s": rate} for each, rate in self.tried.items()],
            "cpu_ms_per_image": {
                "preprocess": self.preprocess_s * 1e3,
                "inference": self.inference_s * 1e3,
                "whole": self.whole_s * 1e3,
            },
            "bound_images_per_s": self.bound,
            "bound_of_slower_part": min(1.0, self.bound / slower),
            "of_bound": whole / self.bound,
            "same_threads_images_per_s": {"preprocess": self.preprocess, "inference": self.inference},
            "of_slower_part_with_same_threads": whole / min(self.preprocess, self.inference),
        }
