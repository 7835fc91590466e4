"""Counts the files of the package that a command touches: those whose functions run, and those that are only imported.

usage: python benchmarks/walk_files.py build digits --precision fp32 --backend onnxruntime --device cpu
       python benchmarks/walk_files.py --list signoff digits --policy policy.toml

A class body counts as imported, and a function that an import calls too. Run a command twice: the second run finds what is stored.
The tables of pipeline/README.md were counted by it. Processes that the command starts are not counted.
"""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import optpipe
from optpipe.__main__ import main as run_command

ROOT = f"{Path(optpipe.__file__).parent}/"
ENTRY = "cli/app.py"


class Walk:
    """The files that run, and the steps between them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.imported: set[str] = set()
        self.steps: set[tuple[str, str]] = set()

    def watch(self, frame: FrameType, event: str, _argument: object) -> None:
        """The profile function of a thread."""
        place = name_file(frame)
        if event != "call" or place is None or frame.f_code.co_name == "<module>":
            return
        if is_importing(frame):
            self.imported.add(place)
            return
        self.calls[place] += 1
        caller = find_caller(frame)
        if caller is not None and caller != place:
            self.steps.add((caller, place))

    def report(self, *, every_file: bool) -> str:
        rooms = sorted({place.partition("/")[0] for place in self.calls})
        lines = [
            f"{len(self.calls)} files run, in {len(rooms)} rooms ({', '.join(rooms)}), with {len(self.steps)} distinct steps between files",
            f"{len(self.imported - self.calls.keys())} more are only imported",
        ]
        if every_file:
            lines += [f"{count:8,}  {place}" for place, count in sorted(self.calls.items())]
        return "\n".join(lines)


def name_file(frame: FrameType) -> str | None:
    """The file's path inside the package; None outside it."""
    name = frame.f_code.co_filename
    return name.removeprefix(ROOT) if name.startswith(ROOT) else None


def find_caller(frame: FrameType) -> str | None:
    """The file of the nearest caller inside the package."""
    above = frame.f_back
    while above is not None:
        if (place := name_file(above)) is not None:
            return place
        above = above.f_back
    return None


def is_importing(frame: FrameType) -> bool:
    """Whether an import is under way: a module body of the package, or the import system, is among the callers."""
    above = frame.f_back
    while above is not None:
        if above.f_code.co_filename.startswith("<frozen importlib"):
            return True
        if above.f_code.co_name == "<module>" and name_file(above) not in (None, ENTRY):
            return True
        above = above.f_back
    return False


def main() -> int:
    words = sys.argv[1:]
    every_file = words[:1] == ["--list"]
    sys.argv = ["optpipe", *words[every_file:]]
    walk = Walk()
    threading.setprofile(walk.watch)
    sys.setprofile(walk.watch)
    status = 0
    try:
        run_command()
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.setprofile(None)
        print(walk.report(every_file=every_file), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
