"""Compares the tactics of a program's layers within the program.

Alone, a layer finds its weights in the cache and runs after itself. In a network they come from memory, and other kernels run before
and after it. So the nearest rivals of a group of equal layers are tried in CUDA graphs of the whole program, in turns with the tactics
that are chosen so far, and stay where they are shown to be faster. Between the layers torch's kernels run uncompiled.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

from optpipe.backends.torch_layers.tuning import compare_in_turns, is_faster, run_layers
from optpipe.kernels import steps
from optpipe.kernels.operators import launch_step
from optpipe.kernels.tactics import (
    LIBRARIES,
    Operands,
    Tactic,
    tactics_from_text,
    text_from_tactics,
)
from optpipe.kernels.tuner import (
    Choice,
    capture_launches,
    describe_operands,
    rank_tactics,
    time_replay,
)

BUDGET_S = 5.0
"""For each batch size; the longest groups come first."""
NEAR, APART, APART_US = 1.6, 1.05, 5.0
"""Up to NEAR times the fastest tactic's time alone another one is a rival, but not beyond APART times it and APART_US: what the cache
and the neighbors change is a few microseconds of each launch. The fastest call of a library always is a rival."""
MOST_RIVALS = 3
CONFIDENCE = 0.999
"""For one comparison; a build makes up to a hundred."""
LEAST_SHARE = 0.01
"""The share of all layers' isolated time below which a group is left as it is."""
LEAST_US = 2000.0
"""The shortest timing; a shorter program runs several times in it."""


@dataclass
class _Group:
    """Layers of equal steps and shapes."""

    ranked: tuple[Choice, ...]
    size: int
    """The batch size of its data, by which the operator finds its tactic."""
    nodes: list[Any] = field(default_factory=list)

    @property
    def microseconds(self) -> float:
        return len(self.nodes) * self.ranked[0][1]

    def list_rivals(self) -> Iterator[Choice]:
        (_, best), *others = self.ranked
        first = next((choice for choice in others if choice[0].kernel in LIBRARIES), None)
        limit = min(NEAR * best, APART * best + APART_US)
        near = [choice for choice in others if choice[1] <= limit and choice is not first]
        yield from [choice for choice in (first, *near) if choice is not None][:MOST_RIVALS]


def settle_tactics(
    program: Any, drawn: Mapping[int, tuple[Any, ...]], chosen: Mapping[int, dict[Any, Choice]]
) -> dict[str, dict[str, Any]]:
    """Replaces tactics of a tuned GraphModule on the GPU, and in `chosen`, by those that make the whole faster.

    `chosen` are the layers' choices by batch size, as `choose_tactics` returns them. Returns by batch size what was tried and changed,
    or why nothing was.
    """
    settled = {}
    for size, inputs in drawn.items():
        began = time.monotonic()
        groups = _group_layers(program, inputs)
        try:
            compared = _Comparison(program, inputs, chosen[size], began + BUDGET_S)
        except Exception as error:  # noqa: BLE001 - torch and the driver raise many types
            settled[str(size)] = {"why_not": _name_error(error)}
            continue
        for group in groups:
            compared.try_rivals(group)
        settled[str(size)] = compared.describe() | {"seconds": round(time.monotonic() - began, 1)}
    program.recompile()
    return settled


def _name_error(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:120]


def _group_layers(program: Any, inputs: Iterable[Any]) -> list[_Group]:
    """Groups of layers with rivals, the longest first."""
    groups: dict[Any, _Group] = {}

    def note(node: Any, step: steps.Step, given: Operands) -> Any:
        key = describe_operands(step, given)
        if key not in groups:
            groups[key] = _Group(rank_tactics(step, given), given.data.shape[0])
        groups[key].nodes.append(node)
        return launch_step(step, given, groups[key].ranked[0][0])

    run_layers(program, inputs, note)
    total = sum(group.microseconds for group in groups.values())
    long = (group for group in groups.values() if group.microseconds >= LEAST_SHARE * total)
    return sorted(long, key=lambda group: -group.microseconds)


class _Comparison:
    """The program at one batch size: the tactics that are chosen, and a replay with them."""

    def __init__(
        self, program: Any, inputs: Iterable[Any], chosen: dict[Any, Choice], ends: float
    ) -> None:
        self.program, self.inputs, self.chosen, self.ends = program, inputs, chosen, ends
        self.tried = self.left = 0
        self.changes: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.replay = self._capture({})
        self.replay()
        self.runs = ceil(LEAST_US / time_replay(self.replay))

    def try_rivals(self, group: _Group) -> None:
        """Tries the group's rivals, and keeps each that is faster than what is chosen then."""
        for rival in group.list_rivals():
            if time.monotonic() > self.ends:
                self.left += 1
                continue
            try:
                replay = self._capture(dict.fromkeys(group.nodes, rival[0]))
            except Exception as error:  # noqa: BLE001 - also where memory is short for two graphs
                self.refused.append(f"{rival[0].kernel}: {_name_error(error)}")
                continue
            speed = compare_in_turns(replay, self.replay, self._time, CONFIDENCE)
            self.tried += 1
            if is_faster(speed):
                before, _ = self.chosen[group.nodes[0]]
                self.replay = replay
                self._note_change(group, rival, before, (speed.value, *speed.ci))

    def _capture(self, instead: Mapping[Any, Tactic]) -> Callable[[], None]:
        """A CUDA graph of the program, with other tactics for some nodes."""

        def launch(node: Any, step: steps.Step, given: Operands) -> Any:
            return launch_step(step, given, instead.get(node) or self.chosen[node][0])

        return capture_launches(partial(run_layers, self.program, self.inputs, launch), 1)

    def _time(self, replay: Callable[[], None]) -> float:
        def repeat() -> None:
            for _ in range(self.runs):
                replay()

        return time_replay(repeat)

    def _note_change(
        self, group: _Group, rival: Choice, before: Tactic, speed: Iterable[float]
    ) -> None:
        for node in group.nodes:
            self.chosen[node] = rival
            known = tactics_from_text(node.args[6])
            node.update_arg(6, text_from_tactics({**known, group.size: rival[0]}))
        self.changes.append(
            {
                "layer": str(group.nodes[0]),
                "layers": len(group.nodes),
                "before": str(before).strip(),
                "after": str(rival[0]).strip(),
                "speed": [round(ratio, 4) for ratio in speed],
            }
        )

    def describe(self) -> dict[str, Any]:
        """How many rivals were tried, how many were left when the time was up, and the changes, each with the whole program's speed."""
        said = {"refused": self.refused} if self.refused else {}
        return {"tried": self.tried, "left": self.left, "changes": self.changes, **said}
