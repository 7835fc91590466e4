"""What is seen of the processors: all of the machine, or those that a worker may use."""

import os

from optpipe.measure.machine import MachineSampler, read_busy_ticks


def test_the_processors_add_up_to_the_machine():
    every = os.cpu_count() or 1
    before, parts, after = read_busy_ticks(), read_busy_ticks(range(every)), read_busy_ticks()
    assert before - 8 * every <= parts <= after + 8 * every, "each of seven counters is rounded for itself"
    assert read_busy_ticks([]) == 0
    assert read_busy_ticks([0]) <= after


def test_work_on_other_processors_is_not_seen():
    nobody = MachineSampler(os.getpid(), cpus=[])
    assert sum(value * value for value in range(300_000)) > 0
    assert nobody.sample()["other_cpu_cores"] == 0.0
