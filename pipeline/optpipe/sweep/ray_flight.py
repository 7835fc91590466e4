"""A task that Ray has: what it has handed back so far, and why it was lost."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from optpipe.core.errors import StageError, first_line
from optpipe.core.records import record_from_json
from optpipe.sweep.plan import Work
from optpipe.sweep.ray_node import BEGUN, Reply

CLOCKS_S = 2.0
"""Clocks of hosts that differ by less are one clock."""


class LostError(StageError):
    """A worker, a node or a parcel was lost: another try may succeed."""


@dataclass
class Flight:
    """One task that was sent."""

    name: str
    work: Work
    build: bool
    stream: Any
    """A generator of what it hands back; through Ray Client a reference to the list."""
    attempts: tuple[str, ...] = ()
    claims: ExitStack = field(default_factory=ExitStack)
    sent: float = field(default_factory=monotonic)
    sent_s: float = field(default_factory=time)
    """When by this host's clock, in Unix seconds."""
    begun: bool = False
    reply: Reply | None = None
    chunks: list[bytes] = field(default_factory=list)
    clock_ahead_s: float = 0.0
    """How far the node's clock is ahead of this host's, at least; negative: behind."""

    def receive(self, *, streaming: bool) -> bool:
        """Takes the next item, or without streaming all of them. Returns whether all is here. Raises LostError."""
        import ray

        try:
            items = [ray.get(next(self.stream))] if streaming else ray.get(self.stream)
        except StopIteration:
            return True
        except ray.exceptions.RayTaskError as error:  # such as a disk of the node that is full
            raise LostError(f"its node failed: {type(error.cause).__name__}: {first_line(error.cause)}") from error
        except ray.exceptions.RayError as error:
            raise LostError(f"{type(error).__name__}: {first_line(error)}") from error
        for item in items:
            self._add(item)
        return not streaming

    def _add(self, item: bytes) -> None:
        if item == BEGUN:
            self.begun = True
        elif self.reply is None:
            self.reply = record_from_json(item, Reply, "a node")
            self.clock_ahead_s = bound_clock_difference(self.sent_s, self.reply.clock_s, time())
        else:
            self.chunks.append(item)


def bound_clock_difference(sent_s: float, replied_s: float, received_s: float) -> float:
    """Seconds that a node's clock is ahead of ours at least (negative: behind), by one reply: it was made after we sent and before
    we received. 0 where the clocks may agree to CLOCKS_S.
    """
    ahead, behind = replied_s - received_s, sent_s - replied_s
    return ahead if ahead > CLOCKS_S else -behind if behind > CLOCKS_S else 0.0
