"""Runtime options and processors as a command line takes them, and the settings in which runs differ."""

from collections.abc import Iterable, Mapping


def format_option(value: object) -> str:
    """An option's value as `--option` takes it: `2`, `true`, `HEURISTIC`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_cpus(cpus: Iterable[int]) -> str:
    """Processors as `--affinity` takes them: `0,4-7`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def find_differing_settings(settings: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Names whose values differ among `settings`, in alphabetical order."""
    known = list(settings)
    names = sorted({name for chosen in known for name in chosen})
    return tuple(name for name in names if len({chosen.get(name) for chosen in known}) > 1)


def format_settings(settings: Mapping[str, str], names: Iterable[str]) -> str:
    """`spinning=false threads=2`: the `settings` among `names`."""
    return " ".join(f"{name}={settings[name]}" for name in names if name in settings)
