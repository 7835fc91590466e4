"""2,000 damaged dossiers, made from those of record: never a traceback, a hang, or a disagreement of the two verifiers.

Every hash is put right, so that the damage is judged for what it means. Most mutants are of the smallest dossier. optpipe also
refuses words, types and sums of a record on which no verdict rests; there, the independent verifier's verdict must be the honest
one.
"""

import random
from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError
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


def describe_mutant(case: int, mutants: Mutants, name: str) -> str:
    """What is wrong with the verifiers on one mutant; empty if nothing is."""
    folder, damage = mutants.make(name, random.Random(case))
    try:
        with limit_time():
            mine, theirs = judge_by_optpipe(folder), judge_by_verifier(folder)
    except BaseException as error:  # noqa: BLE001 - whatever comes this far is a finding
        return f"case {case}, {damage}: {type(error).__name__}: {error}"
    finally:
        mutants.restore(name)
    stated = " file of " not in damage or damage.endswith("errors.parquet")
    informative = stated and theirs == mutants.honest[name]
    if mine != theirs and (mine[0] or theirs[0]) and not (informative and not mine[0]):
        return f"case {case}, {damage}: optpipe says {mine}, the verifier {theirs}"
    return ""


@pytest.mark.parametrize("name", COUNTS)
def test_mutants_are_refused_or_accepted_by_both(name: str, tmp_path: Path) -> None:
    mutants = Mutants({name: REPORTS / name}, tmp_path)
    mutants.honest[name] = judge_by_verifier(REPORTS / name)
    assert judge_by_optpipe(REPORTS / name) == mutants.honest[name]
    cases = range(COUNTS[name])
    wrong = [said for case in cases if (said := describe_mutant(case, mutants, name))]
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)
