"""Python runs this at its start in the processes of `gpu_auto.py --side-by-side`, and in those that they start: `gpu_alone.py`."""

import os

if os.environ.get("GPU_ALONE"):
    from gpu_alone import install_turns

    install_turns()
