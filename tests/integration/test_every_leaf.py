"""Every value in the JSON of a dossier follows from another, or the format names it as a statement.

benchmarks/leaves.py changes every leaf; this is a seeded part of it. Section 11.1 of the format has the list.
"""

import random
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from optpipe.core.records import PROSE
from optpipe.signoff.verify import check_dossier
from tests.fakes.dossier_leaves import ABSENT, Leaf, change_leaf, change_value, list_leaves
from tests.fakes.dossiers import examine
from tests.integration.test_fuzzing_dossiers import is_left_to_optpipe

ROOT = Path(__file__).parents[2]
SEED, LEAVES = 20261129, 45


def read_statements() -> set[str]:
    """RECORD.KEY of each value that section 11.1 lists as a statement; `RECORD.*` for a whole record."""
    text = (ROOT / "docs" / "dossier-format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", text.partition("### 11.1")[2], re.MULTILINE)
    return {f"{record}.{key}" for record, keys in rows for key in re.findall(r"`([\w*]+)`", keys)}


def is_statement(leaf: Leaf, statements: set[str]) -> bool:
    """Also the prose of a run's records, which nobody compares (the head of the format)."""
    record, _, key = leaf.key.partition(".")
    is_prose = leaf.file.startswith(("runs/", "baseline/runs/")) and {key, *leaf.place} & {*PROSE}
    return bool({leaf.key, f"{record}.*"} & statements or is_prose)


def judge_change(folder: Path, leaf: Leaf, value: object, statements: set[str]) -> str:
    """What is wrong with the verifiers on a changed leaf; empty if nothing is."""
    change_leaf(folder, leaf, value)
    problems, differs = check_dossier(folder).problems, examine(folder)[0].differs
    where = f"{leaf.file}: {leaf.place} ({leaf.key}) {leaf.value!r}"
    if problems and differs:
        return ""
    if problems and is_left_to_optpipe(problems):
        return ""
    if problems or differs:
        return f"{where}: optpipe says {problems[:1]}, the verifier {differs[:1]}"
    return "" if is_statement(leaf, statements) else f"{where}: accepted, and no statement"


def sweep(
    source: Path, folder: Path, leaves: Iterable[Leaf], *, form: bool = False
) -> Iterator[str]:
    """What is wrong, after one leaf at a time was changed; with `form` also to null, and without its key."""
    statements = read_statements()
    shutil.copytree(source, folder)
    for leaf in leaves:
        changes: list[object] = [change_value(leaf.value)]
        if form:
            changes += [7 if leaf.value is None else None]
            changes += [ABSENT] if isinstance(leaf.place[-1], str) else []
        for value in changes:
            if wrong := judge_change(folder, leaf, value, statements):
                yield wrong
            for path in (source / leaf.file, *source.glob("SHA*"), *source.rglob("manifest.json")):
                shutil.copy(path, folder / path.relative_to(source))


def add_key(leaf: Leaf) -> Leaf:
    """A key that no record has, beside the leaf."""
    return leaf._replace(place=(*leaf.place[:-1], "more"))


def test_a_changed_leaf_is_refused_by_both_or_a_statement(tmp_path: Path) -> None:
    source = ROOT / "reports" / "gallery" / "fail"
    leaves = random.Random(SEED).sample(list_leaves(source), LEAVES)
    wrong = [*sweep(source, tmp_path / "one", leaves)]
    wrong += sweep(source, tmp_path / "two", leaves[:8], form=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", range(3))
def test_another_key_is_refused_by_both(tmp_path: Path, seed: int) -> None:
    source = Path(shutil.copytree(ROOT / "reports" / "gallery" / "fail", tmp_path / "one"))
    inside = [each for each in list_leaves(source) if isinstance(each.place[-1], str)]
    closed = [each for each in inside if not is_open(each)]
    change_leaf(source, add_key(random.Random(seed).choice(closed)), 1)
    assert check_dossier(source).problems
    assert examine(source)[0].differs


def is_open(leaf: Leaf) -> bool:
    """Whether its object is no record, but a map of names that the format does not close."""
    return leaf.key.partition(".")[2] != leaf.place[-1]
