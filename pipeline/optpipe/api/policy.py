"""A release policy in Python, as the canonical text of the same policy in TOML."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from optpipe.api.arguments import check_arguments
from optpipe.api.door import speak_of_arguments
from optpipe.core.errors import BadInputError
from optpipe.core.suggestions import suggest_names

if TYPE_CHECKING:
    from optpipe.signoff.policy import Criterion
    from optpipe.signoff.policy import Policy as ParsedPolicy

Table = Mapping[str, Any]
Limits = Annotated[
    Table | Sequence[Table], "a table, such as {'p99': '10 ms', 'batch_size': 1}, or a list of them"
]


class Policy:
    """Limits that a build must meet: a policy file, or its tables as keyword arguments.

    The tables and keys are those of a policy file (docs/reference/files.md); a list of mappings is an array of tables. The same
    limits, in any order, have the same text and the same hash, which a verdict records.

    Raises BadInputError that names the argument, the key, and a correction.

    >>> import optpipe as op
    >>> policy = op.Policy(latency={"p99": "10 ms", "batch_size": 1}, accuracy={"maximum_drop": "1 point"})
    >>> [criterion.name for criterion in policy.criteria]
    ['latency.p99.b1', 'accuracy.maximum_drop']
    >>> policy.sha256 == op.Policy(accuracy={"maximum_drop": "1 point"}, latency={"batch_size": 1, "p99": "10 ms"}).sha256
    True
    """

    @check_arguments
    @speak_of_arguments()
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        model: str | None = None,
        confidence: str | None = None,
        build: Table | None = None,
        evidence: Table | None = None,
        environment: Table | None = None,
        **limits: Limits,
    ) -> None:
        from optpipe.signoff.policy import policy_from_file

        given: dict[str, Any] = {
            "name": name,
            "model": model,
            "confidence": confidence,
            "build": build,
            "evidence": evidence,
            "environment": environment,
            **limits,
        }
        given = {key: value for key, value in given.items() if value is not None}
        if path is not None:
            if given:
                raise BadInputError(
                    f"Policy: {next(iter(given))} and the file {path} exclude each other\nwrite it into the file"
                )
            self._parsed = policy_from_file(Path(path))
        else:
            self._parsed = _parse(given)

    @property
    def name(self) -> str:
        return self._parsed.name

    @property
    def criteria(self) -> "tuple[Criterion, ...]":
        """The limits, in the order in which they are judged."""
        return self._parsed.criteria

    @property
    def toml(self) -> str:
        """Its text, as a policy file has it."""
        return self._parsed.source.decode()

    @property
    def sha256(self) -> str:
        return self._parsed.sha256

    def parsed(self) -> "ParsedPolicy":
        """The policy as optpipe's own functions take it."""
        return self._parsed

    @check_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it as a file, such as for `optpipe signoff --policy`. Raises BadInputError if there is one already."""
        target = Path(path)
        if target.exists():
            raise BadInputError(f"{target} already exists; choose another name")
        target.write_bytes(self._parsed.source)
        return target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and other.sha256 == self.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        limits = ", ".join(f"{criterion.name} {criterion.limit}" for criterion in self.criteria)
        return f"Policy({self.name!r}, {limits})"


def _parse(given: Mapping[str, Any]) -> "ParsedPolicy":
    from optpipe.core.metrics.sections import explain_no_limit
    from optpipe.signoff.policy import TABLES, policy_from_toml

    tables = [key for key in TABLES if key]
    for key in given:
        if key not in (*tables, *TABLES[""]):
            hint = suggest_names(key, tables, otherwise=f"tables are {', '.join(tables)}")
            hint = explain_no_limit(key) or hint
            raise BadInputError(f"Policy has no table {key!r}; {hint}")
    return policy_from_toml(render_toml(given).encode(), "Policy", lines=False)


def render_toml(document: Mapping[str, Any]) -> str:
    """The canonical text of a policy: `schema = 1`, keys and tables in alphabetical order, one key a line."""
    plain = {"schema": 1} | {key: value for key, value in document.items() if not _is_table(value)}
    lines = [f"{_show_key(key)} = {_show(value, key)}" for key, value in sorted(plain.items())]
    for name, value in sorted((key, value) for key, value in document.items() if _is_table(value)):
        several = isinstance(value, list | tuple)
        texts = ["\n".join(_render_table(table, name)) for table in (value if several else [value])]
        head = f"[[{name}]]" if several and len(texts) > 1 else f"[{name}]"
        lines += [f"\n{head}\n{text}" for text in sorted(texts)]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)
    )


def _render_table(table: Mapping[str, Any], name: str) -> list[str]:
    return [f"{_show_key(key)} = {_show(value, f'{name}.{key}')}" for key, value in _sort(table)]


def _sort(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(table.items(), key=lambda item: str(item[0]))


def _show_key(key: Any) -> str:
    if not isinstance(key, str):
        raise BadInputError(f"Policy: the key {key!r} is a {type(key).__name__}; keys are strings")
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else json.dumps(key)


def _show(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        if isinstance(value, float):
            return repr(value)
        return (
            json.dumps(str(value), ensure_ascii=False)
            if isinstance(value, str)
            else str(int(value))
        )
    if isinstance(value, list | tuple) and _is_table(value):
        return f"[{', '.join(_show(item, where) for item in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_show_key(key)} = {_show(item, where)}" for key, item in _sort(value))
        return f"{{ {inner} }}" if inner else "{}"
    raise BadInputError(
        f"Policy: {where}={value!r} is a {type(value).__name__}\ngive a number, or a string with its unit, such as '10 ms'"
    )


def resolve_policy(policy: "Policy | str | os.PathLike[str]") -> Policy:
    """A Policy of a path. Raises BadInputError for anything else."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str | os.PathLike):
        return Policy(policy)
    raise BadInputError(
        f"policy: expected a Policy or the path of a file, not a {type(policy).__name__}"
    )
