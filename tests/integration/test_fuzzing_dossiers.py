"""2,000 damaged dossiers, made from those of record: never a traceback, a hang, or a disagreement of the two verifiers.

Every hash is put right, so that the damage is judged for what it means. Most mutants are of the smallest dossier. The format
leaves two things to optpipe: sentences of the verdict, and the views of a profile on which no criterion rests.
"""

import json
import random
import re
from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.records import PROSE
from optpipe.signoff.verify import check_dossier
from tests.fakes.dossier_mutants import Mutants
from tests.fakes.dossiers import examine
from tests.integration.test_fuzzing import limit_time

REPORTS = Path(__file__).parents[2] / "reports"
COUNTS = {"gallery/fail": 1950, "digits-cpu": 40, "resnet50-h100": 8, "resnet50-h200": 2}


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


WORDS = {*PROSE, "notes", "expires_if"}


def drop_words(value: object) -> object:
    """A document without its sentences, which optpipe renders (the head of the format)."""
    if isinstance(value, dict):
        return {key: drop_words(each) for key, each in value.items() if key not in WORDS}
    return [*map(drop_words, value)] if isinstance(value, list) else value


def is_left_to_optpipe(problems: object) -> bool:
    """Whether every problem is about a sentence of the verdict, or a view of a profile's trace."""
    return isinstance(problems, tuple | list) and all(
        (str(each).startswith("verdict.json: ") and WORDS & set(re.findall(r"[a-z_]+", str(each))))
        or str(each).startswith("profile.json: ")
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


@pytest.mark.parametrize("name", COUNTS)
def test_mutants_are_refused_or_accepted_by_both(name: str, tmp_path: Path) -> None:
    mutants = Mutants({name: REPORTS / name}, tmp_path)
    mutants.honest[name] = judge_by_verifier(REPORTS / name)
    assert judge_by_optpipe(REPORTS / name) == mutants.honest[name]
    cases = range(COUNTS[name])
    wrong = [said for case in cases if (said := describe_mutant(case, mutants, name))]
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)
