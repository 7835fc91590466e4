"""Parts of the documentation that are made from the code when the site is built, so none can be stale.

A line `<!-- make: NAME ARGUMENT -->` of a page is replaced by the Markdown that `make_NAME` returns.
"""

import ast
import inspect
import json
import re
import runpy
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec
import typer

import optpipe
from optpipe.build.doctor import list_options
from optpipe.cli.app import SCHEMA_VERSION, SECTIONS, app
from optpipe.core.errors import ExitStatus
from optpipe.measure import validity
from optpipe.models.sources.resolve import CARD_FIELDS
from optpipe.trace import rules

ROOT = Path(__file__).parents[1]
SCHEMAS = runpy.run_path(str(ROOT / ".ci" / "schemas.py"))
STATUSES = {
    ExitStatus.DONE: "Done. For a verdict: PASS.",
    ExitStatus.FAIL: "The verdict is FAIL. `verify`: a figure does not follow from the raw files. `store merge`: entries that differ.",
    ExitStatus.BAD_INPUT: "Wrong use or bad input. `verify`: a byte of the dossier has changed.",
    ExitStatus.MISSING: "A tool, driver, or GPU that the request needs is missing.",
    ExitStatus.STAGE_FAILED: "A stage failed on good input.",
    ExitStatus.INCONCLUSIVE: "The verdict is INCONCLUSIVE. `sweep`: an INVALID job. `verify`: another version wrote it differently.",
    ExitStatus.INTERRUPTED: "Interrupted. Finished work is kept.",
}

REPORTS: set[str] = set()
"""Files under reports/ that pages link to; `copy_reports` puts them into the site."""


def make_report(name: str) -> Iterator[str]:
    """A link to a report. Raises ValueError if it is not there."""
    if not (ROOT / "reports" / name).exists():
        raise ValueError(f"reports/{name} does not exist")
    REPORTS.add(name)
    yield f'<a href="reports/{name}">Open the report.</a>'


def make_notebook(name: str) -> Iterator[str]:
    """The cells of a tutorial notebook, which is stored without outputs and run by the tests."""
    text = (ROOT / "docs" / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        yield ""


def copy_reports(target: Path) -> None:
    for name in REPORTS:
        (target / "reports" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "reports" / name, target / "reports" / name)


def expand(page: str, text: str) -> str:
    """Replaces the marks of a page. Raises ValueError if a code of the tool has no entry, or an entry no code."""
    if page == "reference/codes":
        named, known = set(re.findall(r"make: code ([\w-]+)", text)), set(read_codes())
        if named != known:
            raise ValueError(
                f"reference/codes.md: missing {sorted(known - named)}, unknown {sorted(named - known)}"
            )
    return re.sub(
        r"<!-- make: (\w+) ?(\S*) -->",
        lambda mark: "\n".join(globals()[f"make_{mark[1]}"](mark[2])),
        text,
    )


def make_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = tuple(head)
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"
    yield ""


def make_cli(_: str) -> Iterator[str]:
    """Every command with its arguments and options, in the groups of `optpipe --help`."""
    root = typer.main.get_command(app)
    for group, verbs in SECTIONS.items():
        yield f"## {group}\n"
        for verb in verbs:
            yield from _describe_command(
                root.commands[verb], click.Context(root, info_name="optpipe"), verb, "###"
            )


def _describe_command(command: Any, parent: click.Context, name: str, level: str) -> Iterator[str]:
    context = type(command).context_class(command, info_name=name, parent=parent)
    yield f"{level} {context.command_path.removeprefix('optpipe ')}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    records = [each.get_help_record(context) for each in command.params if each.name != "help"]
    yield from make_table(
        ("Option", "Meaning"), [(f"`{each[0]}`", _escape(each[1])) for each in records if each]
    )
    for below, inner in getattr(command, "commands", {}).items():
        yield from _describe_command(inner, context, below, "####")


def _escape(text: str) -> str:
    return re.sub(r"([<>\[\]*_])", r"\\\1", text)


def make_library(_: str) -> Iterator[str]:
    """Every public class and function of `import optpipe`, from its docstrings."""
    for name in optpipe.__all__:
        public = getattr(optpipe, name)
        yield f"## {name}\n"
        if not (inspect.isclass(public) and issubclass(public, Exception)):
            yield f"```text\n{name}{inspect.signature(public)}\n```\n"
        yield _format_docstring(public)
        for below, member in vars(public).items() if inspect.isclass(public) else ():
            function = member.fget if isinstance(member, property) else member
            if below.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            yield f"### {name}.{below}\n"
            if function is member:
                yield f"```text\n{below}{inspect.signature(function)}\n```\n"
            yield _format_docstring(function)


def _format_docstring(documented: Any) -> str:
    """The text, with its examples as a block of Python."""
    text, *examples = inspect.cleandoc(documented.__doc__ or "").partition("\n>>> ")
    block = f"```pycon\n>>> {examples[1]}\n```\n" if examples[0] else ""
    return f"{_escape_plain(text)}\n\n{block}"


def _escape_plain(text: str) -> str:
    """Escapes what Markdown would read outside of code."""
    parts = text.split("`")
    return "`".join(each if place % 2 else _escape(each) for place, each in enumerate(parts))


def make_statuses(_: str) -> Iterator[str]:
    yield from make_table(
        ("Status", "Meaning"), [(f"`{int(each)}`", STATUSES[each]) for each in ExitStatus]
    )


def make_options(_: str) -> Iterator[str]:
    """The options of every backend."""
    for backend, options in list_options().items():
        yield f"## {backend}\n"
        rows = [
            (
                f"`{each.name}`",
                _escape(each.help)
                + ("; " + ", ".join(f"`{one}`" for one in each.choices)) * bool(each.choices),
                f"`{str(each.default).lower() if isinstance(each.default, bool) else each.default}`".replace(
                    "``", ""
                ),
                "build" if each.builds else "run",
            )
            for each in options
        ]
        yield from make_table(("Option", "Meaning", "Default", "Used by"), rows)


def make_policy(_: str) -> Iterator[str]:
    """Every section of a policy with its keys."""
    parts = SCHEMAS["make_policy_schema"]()["$defs"]
    top = parts["policy"]["properties"]
    rows = [
        (f"`{key}`", _describe_type(value, parts))
        for key, value in top.items()
        if not _find_table(value, parts)
    ]
    yield from make_table(("Key", "Value"), rows)
    for key, value in top.items():
        if table := _find_table(value, parts):
            yield f"### \\[{key}\\]\n\n{table['description']}\n"
            rows = [
                (f"`{name}`", _describe_type(each, parts))
                for name, each in table["properties"].items()
            ]
            yield from make_table(("Key", "Value"), rows)


def _find_table(value: Any, parts: Any) -> Any:
    last = value.get("anyOf", [value])[-1]
    found = parts.get(last.get("$ref", "").rpartition("/")[2], {})
    return found if "properties" in found else None


def _describe_type(value: Any, parts: Any) -> str:
    if "$ref" in value:
        value = parts[value["$ref"].rpartition("/")[2]]
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    example = "".join(
        f", such as `{msgspec.json.encode(each).decode()}`"
        for each in value.get("examples", ())[:1]
    )
    text = value.get("description", "").rstrip(".") or {"object": "a table of options"}.get(
        value.get("type"), f"{value.get('type', 'a string or a list')}"
    )
    return f"{text}{example}"


def make_card(_: str) -> Iterator[str]:
    """The chapters on cards and factories of models/README.md. Raises ValueError if they leave out a field."""
    text = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    chapters = text[text.index("## The card") : text.index("## pairs")]
    first = " ".join(re.findall(r"(?m)^\| (`[^|]+) \|", chapters))
    if missing := [each for each in CARD_FIELDS if not re.search(rf"`\[*{each}\b", first)]:
        raise ValueError(f"models/README.md does not explain {missing}")
    yield chapters.replace("## The card", "## Model card")


def make_documents(_: str) -> Iterator[str]:
    """The fields of each command's JSON document."""
    schemas = SCHEMAS["make_document_schemas"]()
    yield f"The current `schema_version` is {SCHEMA_VERSION}.\n"
    for command, document in schemas["documents"].items():
        yield f"### {command}\n"
        for kind in document["allOf"][1].get("anyOf", ()):
            for name in re.findall(r"#/\$defs/([\w.]+)", str(kind)):
                rows = [
                    (f"`{each}`", _name_type(value))
                    for each, value in schemas["$defs"][name]["properties"].items()
                ]
                yield from make_table((name, "Type"), rows)


def _name_type(value: Any) -> str:
    if "$ref" in value:
        return f"`{value['$ref'].rpartition('/')[2]}`"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(map(_name_type, value["anyOf"])))
    if value.get("type") == "array":
        return f"list of {_name_type(value.get('items') or {})}"
    return str(
        value.get("type", "") or ", ".join(f"`{each}`" for each in value.get("enum", ())) or "any"
    )


@cache
def read_codes() -> dict[str, tuple[str, str, str]]:
    """Effect, message, and remedy of every validity code, read from the calls that make it."""
    codes: dict[str, tuple[str, str, str]] = dict.fromkeys(validity.WITNESSED, ("note", "", ""))
    for path in sorted(Path(validity.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for scope in [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.Assign)]:
            texts: dict[str, str] = {}
            for node in ast.walk(scope):
                if isinstance(node, ast.Dict):  # the remedies of a failed worker
                    found = {
                        _read_text(key): _read_text(each)
                        for key, each in zip(node.keys, node.values, strict=True)
                    }
                    codes |= {
                        key: ("INVALID", "", each) for key, each in found.items() if key in codes
                    }
            for node in sorted(_walk_statements(scope), key=lambda each: each.lineno):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    texts[node.targets[0].id] = _read_text(node.value)
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                    "Reason",
                    "_invalidate",
                    "_note",
                ):
                    code, message, remedy = (
                        texts.get(getattr(each, "id", ""), _read_text(each))
                        for each in node.args[:3]
                    )
                    flag = next(
                        (each.value.value for each in node.keywords if each.arg == "invalidates"),
                        None,
                    )
                    invalid = node.func.id == "_invalidate" or flag is True
                    if re.fullmatch(r"[\w-]+", code) and not codes.get(code, ("",) * 3)[1]:
                        codes[code] = ("INVALID" if invalid else "note", message, remedy)
    return codes


def _walk_statements(scope: ast.AST) -> Iterator[Any]:
    return (each for each in ast.walk(scope) if isinstance(each, ast.Assign | ast.Call))


def _read_text(node: ast.AST | None) -> str:
    """The text of a literal, with `…` for each value inside; empty for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def make_code(code: str) -> Iterator[str]:
    """The heading of a code, its effect, its message, and its remedy."""
    effect, message, remedy = read_codes()[code]
    yield f"({code})=\n### {code}\n"
    text = f"**{effect}**" + (f": {_escape(message)}. " if message else ". ")
    yield text.replace("….", "…") + (f"Remedy: {_escape(remedy)}.\n" if remedy else "\n")


def make_findings(_: str) -> Iterator[str]:
    """Findings of a profile."""
    rows = [(f"`{each.name}`", each.find.__doc__ or "") for each in rules._RULES]
    yield from make_table(("Finding", "Meaning"), rows)
