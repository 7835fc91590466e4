"""The versions and the machine that a deployment's evidence holds for, and how this machine differs."""

from collections.abc import Iterator

from optpipe.backends.registry import BACKENDS
from optpipe.core.environment import Environment
from optpipe.deploy.records import Passport
from optpipe.deploy.signed_build import SignedBuild
from optpipe.workspace.environment import describe_environment

DALI = "nvidia-dali-cuda130"
ONNX_RUNTIME_IN_TRITON = {
    "1.17": "24.04",
    "1.18": "24.05 to 24.08",
    "1.19": "24.09 to 24.11",
    "1.20": "24.12 to 25.02",
    "1.21": "25.03 and 25.04",
    "1.22": "25.05 to 25.07",
    "1.23": "25.08 to 26.01",
    "1.24": "26.02 to 26.06",
    "1.27": "26.07",
}
"""The Triton releases that carry each ONNX Runtime, the newest last (Triton, docs/introduction/compatibility.md)."""


def passport_from_build(build: SignedBuild) -> Passport:
    """The passport of the machine that the dossier's measurements are from; the build's own where nothing was measured."""
    place = build.measured[-1].environment if build.measured else build.artifact.manifest.environment
    info = build.artifact.info
    package = BACKENDS[info.backend].package
    names = [package, *([DALI] if build.preprocessing else [])]
    version = place.get_fact(f"packages.{package}")
    cuda = place.packages.get("nvidia-cuda-runtime") or place.packages.get("torch") if info.device == "cuda" else None
    return Passport(
        cpu=place.cpu,
        gpus=place.gpus if info.device == "cuda" else (),
        packages={name: place.get_fact(f"packages.{name}") for name in names},
        cuda=cuda,
        triton=_explain_triton(info.backend, package, version),
    )


def _explain_triton(backend: str, package: str, version: str) -> str:
    if backend in ("tensorrt", "torch-tensorrt"):
        return f"an engine of {package} {version} loads only in a Triton release with the same version: see NVIDIA's support matrix"
    if backend == "onnxruntime":
        return find_triton_releases(version)
    if backend == "inductor":
        return f"the package needs a Triton release with platform torch_aoti and {package} {version}: see NVIDIA's support matrix"
    return (
        "Triton has no backend for this runtime: it is served by the Python backend, which needs optpipe on the server"
    )


def find_triton_releases(version: str) -> str:
    """Which Triton releases have the ONNX Runtime of `version`, or the newest known one where none has."""
    for series, releases in ONNX_RUNTIME_IN_TRITON.items():
        if version.startswith(f"{series}."):
            return f"Triton {releases} carries ONNX Runtime {series}"
    series, newest = next(reversed(ONNX_RUNTIME_IN_TRITON.items()))
    return (
        f"no Triton release up to {newest} carries ONNX Runtime {version} ({newest} has {series}): "
        "take a later one, or check an environment with the release's version by `optpipe signoff recheck --python ENV`"
    )


def find_passport_differences(passport: Passport, here: Environment | None = None) -> Iterator[str]:
    """How this machine differs from the passport, one line each."""
    place = describe_environment() if here is None else here
    if passport.gpus:
        yield from _compare_gpus(passport, place)
    elif passport.cpu != place.cpu:
        yield f"CPU: the evidence is from {passport.cpu}; this machine has {place.cpu}"
    for name, version in passport.packages.items():
        if (found := place.get_fact(f"packages.{name}")) != version:
            yield f"{name}: the evidence is from {version}; here: {found}"


def _compare_gpus(passport: Passport, place: Environment) -> Iterator[str]:
    then = passport.gpus[0]
    if not place.gpus:
        yield f"GPU: the evidence is from {then.name}; this machine has none"
        return
    now = place.gpus[0]
    for what, old, new in (
        ("GPU", then.name, now.name),
        ("compute capability", then.compute_capability, now.compute_capability),
        ("driver", then.driver, now.driver),
    ):
        if old != new:
            yield f"{what}: the evidence is from {old}; here: {new}"
