"""What a run says of itself, computed again from its raw files by the functions that computed it first.

Bench: every figure, VALID or INVALID, and comparisons, from samples and the machine's rows. Profile: every figure, from the tables of the
trace and the layers' costs. Preprocess: the outputs' error, agreement and verdict, from the rows of every image. Evaluate:
accuracy, drop and agreement, from every prediction. A run whose raw files were too large for a dossier has no figures there.
"""

from optpipe.evaluate.recompute import find_evaluation_disagreements
from optpipe.measure.pair import find_pair_disagreements
from optpipe.measure.recompute import find_bench_disagreements
from optpipe.preprocess.recompute import find_preprocessing_disagreements
from optpipe.profile.recompute import find_profile_disagreements
from optpipe.workspace.runs import Run


def find_untrue_figures(run: Run) -> list[str]:
    """Where the record of `run` does not follow from the raw files that are there, one line each."""
    found = {
        "bench": find_bench_disagreements,
        "profile": find_profile_disagreements,
        "preprocess": find_preprocessing_disagreements,
        "evaluate": find_evaluation_disagreements,
    }[run.kind](run)
    pairs = find_pair_disagreements(run) if run.kind == "bench" else ()
    return [f"runs/{run.run_id}/{problem}" for problem in (*found, *pairs)]
