"""How long `import optpipe` takes over a bare interpreter: `uv run python benchmarks/import_time.py [ROUNDS]`.

Prints the median times in ms of both, taken in turn, and their ratio. It should cost no more than 50 ms, and imports no torch.
"""

import subprocess
import sys
from statistics import median
from time import perf_counter_ns


def time_start(program: str) -> int:
    begun = perf_counter_ns()
    subprocess.run([sys.executable, "-c", program], check=True)
    return perf_counter_ns() - begun


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    programs = {"bare": "pass", "optpipe": "import optpipe"}
    times: dict[str, list[int]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(time_start(program))
    bare, ours = (median(each) / 1e6 for each in times.values())
    print(
        f"bare {bare:.1f} ms, optpipe {ours:.1f} ms, ratio {ours / bare:.2f}, {ours - bare:.1f} ms more"
    )


if __name__ == "__main__":
    main()
