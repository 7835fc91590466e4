"""NVML of a host whose GPUs are not there: on PYTHONPATH it makes a process believe in an idle NVIDIA L4."""

from types import SimpleNamespace


class Driver:
    """What it does not support raises, as the real one does; `processes` run on the first GPU."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = NVML_CLOCK_MEM = 0

    def __init__(self, count, name, capability, gib, watts):
        self.processes, self.nvmlDeviceGetCount = (), lambda: count
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlSystemGetDriverVersion, self.nvmlSystemGetProcessName = (
            lambda: "580.1",
            lambda _: b"/usr/bin/python3",
        )
        self.nvmlDeviceGetHandleByIndex, self.nvmlDeviceGetHandleByUUID = (
            int,
            lambda uuid: int(uuid[-1]),
        )
        self.nvmlDeviceGetUUID, self.nvmlDeviceGetName = "GPU-{}".format, lambda _: name
        self.nvmlDeviceGetCudaComputeCapability = lambda _: capability
        self.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(total=gib << 30)
        self.nvmlDeviceGetPciInfo = lambda _: SimpleNamespace(busId=b"00000000:FF:00.0")
        self.nvmlDeviceGetEnforcedPowerLimit = lambda _: watts * 1000

    def nvmlDeviceGetMigMode(self, _handle):
        raise self.NVMLError

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.processes if handle == 0]


__getattr__ = Driver(1, "NVIDIA L4", (8, 9), 24, 72).__getattribute__
