"""NVML of a host with one GPU that is not there: on PYTHONPATH it makes a process believe in an idle NVIDIA L4."""

from types import SimpleNamespace

UUID = "GPU-pretended"


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 1


def nvmlDeviceGetHandleByIndex(_index):
    return 0


def nvmlDeviceGetHandleByUUID(_uuid):
    return 0


def nvmlDeviceGetUUID(_handle):
    return UUID


def nvmlDeviceGetName(_handle):
    return "NVIDIA L4"


def nvmlDeviceGetCudaComputeCapability(_handle):
    return 8, 9


def nvmlDeviceGetMemoryInfo(_handle):
    return SimpleNamespace(total=24 << 30)


def nvmlSystemGetDriverVersion():
    return "580.95.05"


def nvmlDeviceGetPciInfo(_handle):
    raise NVMLError


def nvmlDeviceGetEnforcedPowerLimit(_handle):
    return 72_000


def nvmlDeviceGetMigMode(_handle):
    raise NVMLError


def nvmlDeviceGetComputeRunningProcesses(_handle):
    return []
