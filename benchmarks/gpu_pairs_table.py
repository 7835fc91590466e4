"""A short table of what `gpu_fp8.sh` and `gpu_int8_torch.sh` have measured so far.

usage: python benchmarks/gpu_pairs_table.py OUTPUT_DIRECTORY
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any


def main(out: Path) -> None:
    """Builds with the share of MACs that is proven, then what was measured beside torch.compile, then pairs."""
    for path in sorted(out.glob("build*.json")):
        for each in json.loads(path.read_text(encoding="utf-8"))["artifacts"]:
            proof, snr = each["precision_proof"], (each["parity"] or {}).get("snr_db")
            print(
                f"{path.stem}: {each['backend']} {each['precision']}, {proof['reason']}, SNR {snr or float('nan'):.1f} dB"
            )
    rows = out / "compile-rows.json"
    for row in json.loads(rows.read_text(encoding="utf-8")) if rows.is_file() else ():
        times = f"{row['ms']:.3f} ms, torch.compile {row['compiled_ms']:.3f} ms"
        speed = f"{row['speed']:.3f} ({row['speed_ci'][0]:.3f} to {row['speed_ci'][1]:.3f}) times as fast"
        print(f"compile: {row['build']} batch {row['batch']}: {times}, {speed}")
    for path in sorted(out.glob("pair-*.json*")):
        with suppress(json.JSONDecodeError):  # a process that was killed wrote half of it
            document = json.loads(path.read_text(encoding="utf-8"))
            if "comparison" in document:
                print(f"{path.name.partition('.')[0]}: {describe_pair(document)}")


def describe_pair(document: dict[str, Any]) -> str:
    """The medians, and how many times as fast the contender is; of a comparison that was interrupted the medians so far."""
    found = document["comparison"]
    if found is None:
        taken: dict[str, list[float]] = {}
        for each in document["measurements"]:
            if each["latency_ns"]:
                taken.setdefault(each["subject"]["precision"], []).append(
                    each["latency_ns"]["median"]
                )
        times = [
            f"{name} {median(each) / 1e6:.3f} ms of {len(each)} processes"
            for name, each in taken.items()
        ]
        return f"{', '.join(times)}; interrupted"
    ratio, (low, high) = found["ratio"]["value"], found["ratio"]["ci"]
    times = [
        f"{document[side]} {median(found[f'{side}_ns']) / 1e6:.3f} ms"
        for side in ("baseline", "contender")
    ]
    speed = f"{1 / ratio:.3f} ({1 / high:.3f} to {1 / low:.3f}) times as fast"
    return f"{', '.join(times)}; {speed}; {found['invalid_processes']} processes INVALID"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
