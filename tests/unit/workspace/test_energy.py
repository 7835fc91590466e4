"""Energy by RAPL: packages alone, counters that wrap, and why there is none."""

import time
from pathlib import Path

import pytest

from optpipe.workspace.energy import EnergyReading, compute_energy_use, read_energy


def write_zone(powercap: Path, zone: str, name: str, microjoules: int, most: int = 10**12) -> Path:
    folder = powercap / zone
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in (
        ("name", name),
        ("energy_uj", microjoules),
        ("max_energy_range_uj", most),
    ):
        (folder / file).write_text(f"{text}\n")
    return folder


def test_packages_add_up_and_their_parts_do_not_count_twice(tmp_path: Path) -> None:
    def read(joules: int) -> EnergyReading:
        write_zone(tmp_path, "intel-rapl:0", "package-0", joules * 10**6)
        write_zone(tmp_path, "intel-rapl:1", "package-1", 2 * joules * 10**6)
        write_zone(tmp_path, "intel-rapl:0:0", "core", joules * 10**6)
        write_zone(tmp_path, "intel-rapl:2", "psys", 9 * joules * 10**6)
        return read_energy(tmp_path)

    found = compute_energy_use(read(100), read(105), iterations=5)
    assert found.cpu_j == pytest.approx(15)
    assert (found.iterations, found.cpu_why_not) == (5, "")


def test_a_counter_that_wraps_once(tmp_path: Path) -> None:
    readings = []
    for microjoules in (9_000_000, 1_000_000):
        write_zone(tmp_path, "intel-rapl:0", "package-0", microjoules, most=10_000_000_000)
        readings.append(read_energy(tmp_path))
    before, after = readings
    assert compute_energy_use(before, after).cpu_j == pytest.approx(10_000 - 8)


def test_a_time_in_which_the_counter_may_wrap_twice_has_no_energy(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1, most=1000)
    before = read_energy(tmp_path)
    time.sleep(0.01)
    found = compute_energy_use(before, read_energy(tmp_path))
    assert found.cpu_j is None
    assert "wrapped" in found.cpu_why_not


def test_the_reason_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no RAPL counter" in read_energy(tmp_path).cpu_why_not
    folder = write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (folder / "energy_uj").write_text("nonsense")
    assert str(folder) in read_energy(tmp_path).cpu_why_not
    read_text = Path.read_text

    def refuse(path: Path, **options: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    found = read_energy(tmp_path)
    assert "only root may read" in found.cpu_why_not
    assert compute_energy_use(found, found).cpu_why_not == found.cpu_why_not
