"""Damaged dossiers, made from those of record: never a traceback, a hang, or a disagreement of the two verifiers.

benchmarks/mutants.py makes 2,000 of them; these are some of each.

Every hash is put right, so that the damage is judged for what it means. Most mutants are of the smallest dossier. The format
leaves two things to optpipe: sentences of the verdict, and the views of a profile on which no criterion rests.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.records import PROSE
from optpipe.signoff.verify import check_dossier
from tests.fakes.dossier_mutants import Mutants
from tests.fakes.dossiers import examine
from tests.integration.test_fuzzing import limit_time

REPORTS = Path(__file__).parents[2] / "reports"
COUNTS = {"gallery/fail": 120, "digits-cpu": 8, "resnet50-h100": 2, "resnet50-h200": 1}


def judge_by_optpipe(folder: Path) -> tuple[bool, object]:
    """Whether the dossier is intact, and its verdict or what is wrong."""
    try:
        checked = check_dossier(folder)
    except BadInputError as error:
        return False, [str(error)]
    intact = not checked.problems and checked.verdict is not None
    return intact, str(checked.verdict.verdict) if intact and checked.verdict else checked.problems


def judge_by_verifier(folder: Path) -> tuple[bool, object]:
    found, verdict = examine(folder)
    return not found.differs, found.differs or verdict


WORDS = {*PROSE, "notes", "expires_if", "between", "inside"}
VIEWS = re.compile(
    r"measurements\.json: .*\b(parts_ns|low|high|note|confidence|evidence|energy_why_not)\b"
    r"|evaluate\.json: .*\b(classes\[|score_shift)"
    r"|preprocess\.json: .*\bverdict\b"
    r"|comparison\.json: ratio: (p_value|change|smallest_visible)\b"
)


def drop_words(value: object) -> object:
    """A document without its sentences, which optpipe renders (the head of the format)."""
    if isinstance(value, dict):
        return {key: drop_words(each) for key, each in value.items() if key not in WORDS}
    return [*map(drop_words, value)] if isinstance(value, list) else value


def is_left_to_optpipe(problems: object) -> bool:
    """Whether every problem is about a sentence of the verdict, or a view (the head of the format)."""
    return isinstance(problems, tuple | list) and all(
        (str(each).startswith("verdict.json: ") and WORDS & set(re.findall(r"[a-z_]+", str(each))))
        or str(each).startswith("profile.json: ")
        or VIEWS.match(str(each))
        for each in problems
    )


def says_the_same(name: str, folder: Path) -> bool:
    """Whether the verdict of a mutant differs from the honest one in sentences alone."""
    stored = [(each / "verdict.json").read_bytes() for each in (REPORTS / name, folder)]
    honest, changed = (drop_words(json.loads(each)) for each in stored)
    return honest == changed


def describe_mutant(case: int, mutants: Mutants, name: str) -> str:
    """What is wrong with the verifiers on one mutant; empty if nothing is."""
    folder, damage = mutants.make(name, random.Random(case))
    try:
        with limit_time():
            mine, theirs = judge_by_optpipe(folder), judge_by_verifier(folder)
        left = not mine[0] and is_left_to_optpipe(mine[1]) and says_the_same(name, folder)
    except BaseException as error:  # noqa: BLE001 - whatever comes this far is a finding
        return f"case {case}, {damage}: {type(error).__name__}: {error}"
    else:
        agree = mine == theirs or not (mine[0] or theirs[0])
        if agree or (left and theirs == mutants.honest[name]):
            return ""
        return f"case {case}, {damage}: optpipe says {mine}, the verifier {theirs}"
    finally:
        mutants.restore(name)


def find_wrong(name: str, cases: Iterable[int], folder: Path) -> Iterator[str]:
    """What is wrong with the verifiers on these mutants of a dossier of record, one line each."""
    mutants = Mutants({name: REPORTS / name}, folder)
    mutants.honest[name] = judge_by_verifier(REPORTS / name)
    assert judge_by_optpipe(REPORTS / name) == mutants.honest[name]
    return filter(None, (describe_mutant(case, mutants, name) for case in cases))


@pytest.mark.parametrize("name", COUNTS)
def test_mutants_are_refused_or_accepted_by_both(name: str, tmp_path: Path) -> None:
    wrong = [*find_wrong(name, range(COUNTS[name]), tmp_path)]
    assert not wrong, f"{len(wrong)} of {COUNTS[name]}\n" + "\n".join(wrong)
