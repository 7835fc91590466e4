"""A build whose every result is stored, as a multiple of a bare interpreter that imports typer and rich: wall and processor time.

usage: uv run python benchmarks/warm_build.py [ROUNDS]

Fresh processes in turn; the first build, which fills the workspace, is not counted. Without a network the default weights are
replaced by random ones, and that path is measured.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time

BARE = [sys.executable, "-c", "import typer, rich"]
BUILD = [sys.executable, "-m", "optpipe", "build", "resnet50", "--precision", "fp16"]


def time_process(command: list[str], folder: str) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, which other work on the machine changes less."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    passed, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints both medians and the median of the ratios."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        time_process(BUILD, folder)
        pairs = [(time_process(BARE, folder), time_process(BUILD, folder)) for _ in range(rounds)]
    for at, name in enumerate(("wall", "processor")):
        bare, build = (statistics.median(each[side][at] for each in pairs) for side in (0, 1))
        ratio = statistics.median(second[at] / first[at] for first, second in pairs)
        print(
            f"{name}: bare {bare:.2f} s, warm build {build:.2f} s: {ratio:.1f} times, {rounds} rounds"
        )


if __name__ == "__main__":
    main()
