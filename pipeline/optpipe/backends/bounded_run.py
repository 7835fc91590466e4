"""Bounds of one run of a stranger's graph in this process: time, and the memory that the machine has left.

A Loop may compute how often it runs, and no look at the file shows it. ONNX Runtime asks between two operators whether a
run shall end; a thread that watches the clock and the memory says so.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnxruntime_session import ort
from optpipe.core.errors import BadInputError, escape, is_out_of_memory
from optpipe.core.quantity import format_bytes

LONGEST_RUN_S = 300.0
"""The longest time that one call of a graph may take."""
LONGEST_RUN = "OPTPIPE_LONGEST_RUN_S"
"""The environment variable that gives more, or fewer, seconds."""
LEAST_MEMORY_SHARE = 0.05
"""The share of the machine's memory that must stay available."""
_NOTICEABLE_BYTES = 1 << 30
"""If this process has grown by less, another one is using the memory."""
_POLL_S = 0.1
_NODE = re.compile(r"while running (\S+) node\. Name:'([^']*)'")
"""ONNX Runtime's message about the operator that failed."""
_COMPUTED = ("Loop", "Scan")


@dataclass(slots=True)
class BoundedRun:
    """The options of a run, and why it was ended."""

    limit_s: float
    options: Any = field(default_factory=lambda: ort.RunOptions())
    ended: str = ""

    def watch(self, over: Event, read_model: Callable[[], Any]) -> None:
        """Asks the run to end once it takes too long or the memory runs out, until `over` is set.

        Values of a loop may double in each round: it may take a quarter of the memory that is left at the start.
        """
        begun, own_bytes = monotonic(), _read_own_bytes()
        room_bytes = max(_NOTICEABLE_BYTES, _read_memory("MemAvailable") // 4)
        loops: bool | None = None
        while not over.wait(_POLL_S):
            grown_bytes = _read_own_bytes() - own_bytes
            if monotonic() - begun > self.limit_s:
                self.ended = f"still runs after {self.limit_s:g} s"
            elif grown_bytes > _NOTICEABLE_BYTES and _is_memory_short():
                self.ended = f"has taken {format_bytes(grown_bytes)}, and little memory is left"
            elif grown_bytes > room_bytes and loops is None:
                loops = bool(_name_loops(read_model().graph))
            if grown_bytes > room_bytes and loops and not self.ended:
                self.ended = f"has taken {format_bytes(grown_bytes)} in its loops"
            if self.ended:
                self.options.terminate = True
                return


@contextmanager
def bound_run(read_model: Callable[[], Any]) -> Iterator[Any]:
    """Yields the options for one run of a graph; `read_model` gives the model if the run is ended.

    Raises BadInputError with the loops that may be the cause if the run takes longer than LONGEST_RUN_S, or more memory than
    there is.
    """
    run, over = BoundedRun(read_limit_s()), Event()
    watcher = Thread(
        target=run.watch, args=(over, read_model), name="optpipe: bounds of a run", daemon=True
    )
    watcher.start()
    try:
        yield run.options
    except Exception as error:
        if any(map(is_out_of_memory, filter(None, (error, error.__cause__)))):
            node = _NODE.search(str(error))
            place = f", in {escape(node[1])[:80]} '{escape(node[2])[:80]}'" if node else ""
            raise BadInputError(
                f"the graph needs more memory than there is{place}\n"
                "give it a smaller input, or a part of the model"
            ) from error
        if not run.ended:
            raise
        raise BadInputError(
            f"the graph {run.ended}{_name_loops(read_model().graph)}\n"
            f"give it fewer rounds or a smaller input, or more time by the variable {LONGEST_RUN}"
        ) from error
    finally:
        over.set()
        watcher.join()


def read_limit_s() -> float:
    """Seconds that one run may take. Raises BadInputError if the user's variable is no positive number."""
    text = os.environ.get(LONGEST_RUN, "")
    if not text:
        return LONGEST_RUN_S
    with suppress(ValueError):
        if isfinite(seconds := float(text)) and seconds > 0:
            return seconds
    raise BadInputError(f"{LONGEST_RUN}={escape(text)[:80]}: give a number of seconds, such as 600")


def _name_loops(graph: Any) -> str:
    """The loops of a graph, whose rounds only a run shows."""
    names = [
        f"{node.op_type} '{escape(node.name or ''.join(node.output[:1]))[:80]}'"
        for inner in iterate_graphs(graph)
        for node in inner.node
        if node.op_type in _COMPUTED
    ]
    return f"; it has {', '.join(names[:3])}" if names else ""


def _read_own_bytes() -> int:
    """Memory that this process occupies; 0 where Linux does not say."""
    with suppress(OSError, ValueError, IndexError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _is_memory_short() -> bool:
    total = _read_memory("MemTotal")
    return total > 0 and _read_memory("MemAvailable") < LEAST_MEMORY_SHARE * total


def _read_memory(name: str) -> int:
    """Bytes of the machine's memory by a name of `/proc/meminfo`; 0 where Linux does not say."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return 1024 * sizes[name]
    return 0
