"""Golden traces, one per phenomenon, each small enough to be worked out by hand. Times in microseconds."""

from tests.golden.nsys_export import THREAD, Recording

GEMM = "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas"
SGEMM = "ampere_sgemm_128x64_tn"
RELU = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::launch_clamp_scalar>(int)"
)


def launch_bound() -> Recording:
    """Three iterations of four 2 µs kernels, each launched 20 µs after the other: the GPU works a tenth of the time."""
    trace = Recording()
    for iteration in range(3):
        begin = 100 * iteration
        trace.range("iter", begin, begin + 90)
        for number in range(4):
            at = begin + 20 * number
            trace.kernel(GEMM, at + 6, at + 8, launch=(at + 1, at + 5))
    return trace


def gpu_bound() -> Recording:
    """Three iterations in which one launch each keeps the GPU busy for 90 of 100 µs."""
    trace = Recording()
    for iteration in range(3):
        begin = 100 * iteration
        trace.range("iter", begin, begin + 99)
        trace.kernel(GEMM, begin + 6, begin + 96, launch=(begin + 1, begin + 5))
    return trace


def graph_replay() -> Recording:
    """Two replays of a CUDA graph of three kernels: one launch for all, 1 µs between nodes."""
    trace = Recording()
    for iteration in range(2):
        begin = 100 * iteration
        trace.range("iter", begin, begin + 99)
        launch = trace.call("cudaGraphLaunch_v10000", begin + 1, begin + 5)
        for number in range(3):
            at = begin + 6 + 21 * number
            trace.kernel(GEMM, at, at + 20, launch, node=number + 1)
    return trace


def synchronizing() -> Recording:
    """10 µs of kernel, then 30 µs in which the host is still inside the call that waited for it; twice."""
    trace = Recording()
    for iteration in range(2):
        begin = 50 * iteration
        trace.range("iter", begin, begin + 48)
        trace.kernel(GEMM, begin + 5, begin + 15, launch=(begin + 1, begin + 4))
        trace.call("cudaStreamSynchronize_v3020", begin + 5, begin + 45)
    return trace


def copying() -> Recording:
    """A pageable copy of 1 MB for 60 µs before each 20 µs of kernel, and none of it beside the kernel."""
    trace = Recording()
    for iteration in range(2):
        begin = 100 * iteration
        trace.range("iter", begin, begin + 95)
        trace.copy(begin + 5, begin + 65, 1_000_000, launch=(begin + 1, begin + 4))
        trace.kernel(GEMM, begin + 65, begin + 85, launch=(begin + 4, begin + 8))
    return trace


def overlapping() -> Recording:
    """Kernels of two streams share 10 µs, and a copy runs beside the first for 20 µs."""
    trace = Recording()
    trace.copy(10, 30, 1_000, launch=(0, 1), source=1)
    trace.kernel(GEMM, 10, 40, launch=(1, 2), stream=7)
    trace.kernel(RELU, 30, 60, launch=(2, 3), stream=8)
    return trace


def host_busy() -> Recording:
    """200 µs of host work before each launch: longer than any launch takes."""
    trace = Recording()
    for iteration in range(3):
        begin = 300 * iteration
        trace.range("iter", begin, begin + 290)
        trace.kernel(GEMM, begin + 210, begin + 280, launch=(begin + 200, begin + 205))
    return trace


def gaps_of_many_lengths() -> Recording:
    """Four iterations of 400 µs, of which 5 % are 20 µs: gaps of 10, 25 and 60 µs between kernels of 100 µs, launched ahead."""
    trace = Recording()
    for iteration in range(4):
        begin = 400 * iteration
        trace.range("iter", begin, begin + 395)
        for number, start in enumerate((5, 115, 240, 400)):
            launch = (begin + 0.5 + number, begin + 1 + number)
            trace.kernel(
                GEMM, begin + start, begin + start + (100 if number < 3 else 5), launch=launch
            )
    return trace


def missed_tensor_cores(iterations: int = 2) -> Recording:
    """Two layers by name: one on Tensor Cores (30 µs), one fp32 product beside them (60 µs)."""
    trace = Recording()
    for iteration in range(iterations):
        begin = 200 * iteration
        trace.range("iter", begin, begin + 190)
        trace.range("conv1", begin + 1, begin + 20)
        trace.kernel(GEMM, begin + 10, begin + 40, launch=(begin + 2, begin + 5))
        trace.range("fc", begin + 21, begin + 60)
        trace.kernel(SGEMM, begin + 40, begin + 100, launch=(begin + 25, begin + 30))
    return trace


def changing_kernel_count() -> Recording:
    """Iterations with two, three and one kernels: not the same work."""
    trace = Recording()
    for iteration, kernels in enumerate((2, 3, 1)):
        begin = 100 * iteration
        trace.range("iter", begin, begin + 90)
        for number in range(kernels):
            at = begin + 20 * number
            trace.kernel(GEMM, at + 6, at + 16, launch=(at + 1, at + 5))
    return trace


def opaque_graph() -> Recording:
    """CUDA graphs traced as one row each: no kernels to be seen."""
    trace = Recording()
    trace.range("iter", 0, 90)
    trace.graph(10, 80)
    trace.range("iter", 100, 190)
    trace.graph(110, 180)
    return trace


def lost_events() -> Recording:
    """Ten launches, five kernels."""
    trace = Recording()
    for number in range(10):
        at = 20 * number
        if number % 2:
            trace.kernel(GEMM, at + 6, at + 16, launch=(at + 1, at + 5))
        else:
            trace.call("cudaLaunchKernel_v7000", at + 1, at + 5)
    return trace


def without_gpu() -> Recording:
    """Only NVTX ranges, as on a machine without a GPU."""
    trace = Recording()
    trace.range("optpipe.measure", 0, 300)
    for iteration in range(3):
        trace.range("optpipe.iteration", 100 * iteration, 100 * iteration + 95)
    return trace


def two_threads() -> Recording:
    """The launching thread is never in a waiting call; another thread waits all the time, and is no cause."""
    trace = Recording()
    trace.call("cudaStreamSynchronize_v3020", 0, 100, thread=THREAD + 1)
    trace.range("iter", 0, 40)
    trace.range("iter", 50, 90)
    trace.kernel(GEMM, 10, 20, launch=(5, 8))
    trace.kernel(GEMM, 60, 70, launch=(55, 58))
    return trace


def setup_ahead_of_numbered_iterations() -> Recording:
    """Somebody's own program: 900 µs of setup, a first iteration of 300 µs, then three of 90 µs with three short kernels each."""
    trace = Recording()
    trace.kernel(RELU, 850, 852, launch=(840, 845))
    for number, (begin, end) in enumerate(((900, 1200), (1200, 1290), (1300, 1390), (1400, 1490))):
        trace.range(f"iteration {number}", begin, end)
        for at in (begin, begin + 30, begin + 60):
            trace.kernel(GEMM, at + 6, at + 8, launch=(at + 1, at + 5))
    return trace
