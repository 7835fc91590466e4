"""Changes each value in the JSON of a dossier, one at a time, and asks both verifiers.

usage: leaves.py DOSSIER FOLDER [PART OF PARTS]     prints what one accepts and the other does not, or what both accept silently

Of leaves that differ in the number of a list or an ID alone, the first is changed.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes.dossier_leaves import Leaf, list_leaves
from tests.integration.test_every_leaf import sweep


def find_kind(leaf: Leaf) -> str:
    steps = ("*" if isinstance(each, int) else each for each in leaf.place)
    return re.sub(r"-[0-9A-Za-z-]+/|[0-9a-f]{12}", "*", "/".join((leaf.file, *steps)))


def main() -> int:
    source, folder = map(Path, sys.argv[1:3])
    part, parts = map(int, sys.argv[3:5]) if sys.argv[3:] else (0, 1)
    leaves = [*{find_kind(leaf): leaf for leaf in list_leaves(source)[::-1]}.values()]
    wrong = 0
    for said in sweep(source, folder, leaves[part::parts]):
        wrong += 1
        print(said, flush=True)
    print(f"{len(leaves[part::parts])} leaves, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
