"""The versions and the machine that a deployment's evidence holds for, and how this machine differs."""

from collections.abc import Iterator

from optpipe.backends.base import Serving
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import Environment
from optpipe.core.measurement import Options
from optpipe.deploy.records import Passport
from optpipe.deploy.signed_build import SignedBuild
from optpipe.workspace.environment import describe_environment

DALI = "nvidia-dali-cuda130"


def serving_from_build(build: SignedBuild, options: Options) -> Serving:
    """How servers run a signed-off artifact. Raises BadInputError for one that needs more than its files."""
    backend = BACKENDS[build.artifact.info.backend]
    return backend.serving(build.artifact.info, options, _get_place(build).get_fact(f"packages.{backend.package}"))


def _get_place(build: SignedBuild) -> Environment:
    """The machine that the dossier's measurements are from; the build's own where nothing was measured."""
    return build.measured[-1].environment if build.measured else build.artifact.manifest.environment


def passport_from_build(build: SignedBuild, serving: Serving) -> Passport:
    """The passport of the machine that the evidence is from."""
    place = _get_place(build)
    info = build.artifact.info
    package = BACKENDS[info.backend].package
    names = [package, *([DALI] if build.preprocessing else [])]
    cuda = place.packages.get("nvidia-cuda-runtime") or place.packages.get("torch") if info.device == "cuda" else None
    return Passport(
        cpu=place.cpu,
        gpus=place.gpus if info.device == "cuda" else (),
        packages={name: place.get_fact(f"packages.{name}") for name in names},
        cuda=cuda,
        triton=serving.requirement,
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
