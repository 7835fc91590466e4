"""A fake of Triton's driver on a machine without a GPU: kernels are compiled for a Hopper GPU, and none can be launched."""

from contextlib import contextmanager

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from optpipe.kernels.triton import attention, convolutions, endings, gluon, images


class HopperDriver:
    """What Triton asks for ahead of a compilation."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_capability(self, device=None):
        return (9, 0)


@contextmanager
def pretend_hopper():
    before = driver._active
    forget_compiled()
    driver.set_active(HopperDriver())
    try:
        yield
    finally:
        driver._active = before
        forget_compiled()


def forget_compiled():
    """Triton keeps what a process compiled, or saw compiled, by device."""
    for module in (attention, convolutions, endings, gluon, images):
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
