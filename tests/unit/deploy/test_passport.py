"""How a machine differs from the one of the evidence."""

from dataclasses import replace

from optpipe.core.entries import Environment, Gpu
from optpipe.deploy.passport import find_passport_differences
from optpipe.deploy.records import Passport

H200 = Gpu(0, "NVIDIA H200", "9.0", 1 << 37, "580.1")
PLACE = Environment(cpu="a CPU", gpus=(H200,), packages={"onnxruntime-gpu": "1.31.1", "numpy": "2.4"})
PASSPORT = Passport("a CPU", (H200,), {"onnxruntime-gpu": "1.31.1"}, "13.0", "")


def test_the_same_machine_has_no_differences_and_other_packages_do_not_matter():
    other = replace(PLACE, packages={"onnxruntime-gpu": "1.31.1", "numpy": "2.5"}, cpu="another CPU")
    assert list(find_passport_differences(PASSPORT, PLACE)) == []
    assert list(find_passport_differences(PASSPORT, other)) == [], "on a GPU the CPU does not decide"


def test_each_difference_is_one_line():
    a100 = replace(H200, name="NVIDIA A100", compute_capability="8.0", driver="570.2")
    found = list(find_passport_differences(PASSPORT, replace(PLACE, gpus=(a100,), packages={})))
    assert found == [
        "GPU: the evidence is from NVIDIA H200; here: NVIDIA A100",
        "compute capability: the evidence is from 9.0; here: 8.0",
        "driver: the evidence is from 580.1; here: 570.2",
        "onnxruntime-gpu: the evidence is from 1.31.1; here: none",
    ]
    assert list(find_passport_differences(PASSPORT, replace(PLACE, gpus=()))) == [
        "GPU: the evidence is from NVIDIA H200; this machine has none"
    ]
    on_cpu = replace(PASSPORT, gpus=(), cpu="another CPU")
    assert list(find_passport_differences(on_cpu, PLACE)) == [
        "CPU: the evidence is from another CPU; this machine has a CPU"
    ]
