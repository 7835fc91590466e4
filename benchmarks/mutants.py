"""Makes damaged dossiers from those of record, and asks both verifiers about each: the long form of the test of the same name.

usage: mutants.py FOLDER [COUNT]     2,000 by default; FOLDER/mutants.txt has the cases that are done, and a stopped run goes on there
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integration.test_fuzzing_dossiers import find_wrong

SHARES = {"gallery/fail": 0.975, "digits-cpu": 0.02, "resnet50-h100": 0.004, "resnet50-h200": 0.001}
PART = 25


def main() -> int:
    folder, count = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if sys.argv[2:] else 2000
    folder.mkdir(parents=True, exist_ok=True)
    log, wrong = folder / "mutants.txt", 0
    log.touch()
    done = set(log.read_text().splitlines())
    for name, share in SHARES.items():
        cases = range(max(1, round(count * share)))
        for first in cases[::PART]:
            part = cases[first : first + PART]
            if (mark := f"{name} {part}") in done:
                continue
            for said in find_wrong(name, part, folder / f"{len(done)}"):
                wrong += 1
                print(said, flush=True)
            done.add(mark)
            with log.open("a") as file:
                file.write(f"{mark}\n")
    print(f"{count} mutants, {wrong} wrong in this run")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
