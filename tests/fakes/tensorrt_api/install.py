"""Lays out a folder from which `import tensorrt` works; README.md beside this file says what is real of it."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")


def find_missing() -> str | None:
    """What this machine lacks for it; None where everything is here."""
    for wheel in ("tensorrt-cu13-bindings", "tensorrt-rtx-cu13"):
        try:
            metadata.version(wheel)
        except metadata.PackageNotFoundError:
            return f"the wheel {wheel}"
    return None if shutil.which("cc") else "a C compiler"


def install(folder: Path) -> None:
    """Compiles the forwarding libraries into `folder` and copies the bindings beside them."""
    (folder / "lib").mkdir(parents=True)
    for name in LIBRARIES:
        file = f"lib{name}.so.11"
        flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{file}", "-o", str(folder / "lib" / file)]
        subprocess.run(["cc", *flags, str(HERE / "shim.c"), "-ldl"], check=True)
    bindings = metadata.distribution("tensorrt-cu13-bindings")
    shutil.copytree(str(bindings.locate_file("tensorrt_bindings")), folder / "site/tensorrt")
    info = (
        folder / f"site/tensorrt_cu13-{bindings.version}.dist-info"
    )  # the package that users install
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tensorrt-cu13\nVersion: {bindings.version}\n"
    )


def make_environment(folder: Path) -> Mapping[str, str]:
    """The variables under which a new process imports `tensorrt` from `folder`."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    assert spec is not None
    assert spec.submodule_search_locations
    libraries = [str(folder / "lib"), *spec.submodule_search_locations]
    paths = [str(folder / "site"), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ),
    }
