"""What a recording needs, tried before anything runs."""

from optpipe.core.events import Listener
from optpipe.core.wording import Argument
from optpipe.trace.counters import find_ncu
from optpipe.trace.nsys import ProfilePlan, probe_sources
from optpipe.trace.record import open_scratch_folder
from optpipe.trace.sources import SourceState
from optpipe.workspace.store import Store


def require_counters(plan: ProfilePlan, listener: Listener, *, on_gpu: bool) -> None:
    """Before anything runs: raises MissingError without ncu, and warns that a CPU has no counters."""
    if plan.kernels and on_gpu:
        find_ncu()
    elif plan.kernels:
        listener.warn(
            Argument("kernels", plan.kernels) + ": no GPU is used, so no kernel is counted"
        )


def grant_sources(
    plan: ProfilePlan, store: Store, listener: Listener, *, on_gpu: bool
) -> tuple[SourceState, ...]:
    """Tries each source that the plan asks for; what is refused is warned about, and the profile goes on without it."""
    if not plan.record:
        return ()
    with open_scratch_folder(store) as scratch, listener.step("try sources"):
        states = probe_sources(plan.record, scratch, on_gpu=on_gpu)
    for state in states:
        if not state.recorded:
            way = f"; what allows it: {state.remedy}" if state.remedy else ""
            listener.warn(f"{state.name} is not recorded: {state.why}{way}")
    return states
