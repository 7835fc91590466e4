"""From the option texts of compare, signoff and run to values, once, at the edge."""

from collections.abc import Sequence
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.signoff.policy import Policy, policy_from_toml


def policy_from_file(path: Path) -> Policy:
    """Reads `--policy`."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"cannot read policy {path}: {error.strerror}; run optpipe signoff --init for a template"
        ) from error
    return policy_from_toml(source, str(path))


def waivers_from_options(names: Sequence[str], reasons: Sequence[str]) -> dict[str, str]:
    """Reads `--waive` with `--because`: one reason for all, or one each."""
    if not names and not reasons:
        return {}
    if not names:
        raise BadInputError("--because requires --waive CRITERION")
    given = list(reasons) * len(names) if len(reasons) == 1 else list(reasons)
    if len(given) != len(names) or not all(reason.strip() and reason.isprintable() for reason in given):
        raise BadInputError("--waive requires a one-line --because TEXT, once for all or once per --waive")
    return dict(zip(names, given, strict=True))
