"""A Ray cluster on this machine whose nodes have labels."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from optpipe.sweep.slots import list_slots

KINDS = ("cpu-a", "cpu-b", "cpu-b")
_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


def start_cluster(kinds=KINDS):
    """A head that runs nothing and a node of one processor for each of `kinds`; `RAY_ADDRESS` leads to it.

    Without kinds it is a head of one processor without labels, as `ray start --head` starts it.
    """
    os.environ |= {
        "PYTHONPATH": str(Path(__file__).parents[2] / "pipeline"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_worker_niceness": "0",
        "RAY_health_check_period_ms": "1000",  # a node that died is known after five of them, not after 15 s
    }
    from ray.cluster_utils import Cluster

    ports = choose_ports()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": int(not kinds), "include_dashboard": False, **ports},
    )
    os.environ["RAY_ADDRESS"] = cluster.address
    return cluster, [add_node(cluster, kind) for kind in kinds]


def add_node(cluster, kind, gpus=0, **more):
    """One more node, of an invented kind and this machine's environment; `more` are further labels, or other values."""
    labels = {"optpipe/kind": kind, "optpipe/fingerprint": list_slots()[0].fingerprint, **more}
    return cluster.add_node(num_cpus=1, num_gpus=gpus, labels=labels, **choose_ports())


def choose_ports(*more):
    """Ports for a node's agents: a node that is not told them gives them 15 s to start, which is too short on a busy machine."""
    names = (*_PORTS, *more)
    sockets = [socket.socket() for _ in names]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return dict(zip(names, ports, strict=True))


def list_tasks(program):
    """Ids of the processes that run `program` on the cluster that RAY_ADDRESS leads to, and of their Ray workers."""
    ours, found = f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}".encode(), {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (path / "cmdline").read_bytes().split(b"\0")
            if program.encode() in told and ours in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = int(
                    (path / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return {
        child: worker for child, worker in found.items() if worker > 1
    }  # else its worker has just died
