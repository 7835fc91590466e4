"""The trace of a real H200, ResNet-50 FP16 (tests/golden/traces/README.md), and kernel names of every library, sorted by hand."""

import sqlite3
from contextlib import closing
from typing import Any

import polars as pl
import pytest
from tests.unit.trace.conftest import SAMPLE, Judged, judge

from optpipe.core.records import json_from_record, record_from_json
from optpipe.core.verdict import Verdict
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.bottleneck import LimitingFactor
from optpipe.trace.details import details_from_trace
from optpipe.trace.document_details import draw_metrics
from optpipe.trace.kernels import KernelKind, classify_kernel, uses_tensor_cores
from optpipe.trace.loops import describe_loop
from optpipe.trace.modules import make_module_tree
from optpipe.trace.read import trace_from_folder
from optpipe.trace.report import TraceProfile
from optpipe.trace.sources import Source, SourceState


def _query(sql: str) -> list[Any]:
    with closing(sqlite3.connect(SAMPLE)) as connection:
        return connection.execute(sql).fetchall()


def test_totals_are_the_exports_to_the_nanosecond(sample: Judged) -> None:
    expected = _query(
        'SELECT s.value, COUNT(*), SUM(k."end" - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s '
        "ON s.id = k.demangledName GROUP BY s.value"
    )
    assert sorted(sample.whole.kernels.select("name", "count", "total_ns").rows()) == sorted(
        expected
    )
    (total,) = _query('SELECT SUM("end" - start) FROM CUPTI_ACTIVITY_KIND_RUNTIME')[0]
    assert sample.whole.api["total_ns"].sum() == total
    assert {"cudaLaunchKernel", "cuLaunchKernelEx"} <= set(sample.whole.api["name"].to_list())


def test_eager_iterations_are_launch_bound_and_the_replay_is_not(sample: Judged) -> None:
    assert sample.bottleneck.verdict is LimitingFactor.LAUNCH
    assert sample.findings[0].rule == "launch-gaps"
    graph = judge(sample.whole.trace, "graph").bottleneck
    assert graph.verdict is LimitingFactor.GPU  # no graph of the model, no counters


def test_five_iterations_of_282_kernels_and_a_replay(sample: Judged) -> None:
    iterations = sample.measured.iterations
    assert iterations["kernels"].to_list() == [282] * 5
    assert iterations["name"].cast(pl.String).unique().to_list() == ["iter"]
    assert sample.trace_quality.verdict is Verdict.PASS
    row = sample.whole.ranges.filter(pl.col("name") == "graph").row(0, named=True)
    assert (row["wall_ns"], row["kernels"], row["kernel_ns"]) == (771395, 282, 1019734)


def test_tensor_core_kernels_are_those_of_the_named_schemes(sample: Judged) -> None:
    """By hand: nvjet, xmma and cutlass tensorop kernels are all matrix kernels of the trace, and all on Tensor Cores."""
    by_hand = sample.measured.kernels.filter(pl.col("name").str.contains("nvjet|xmma|tensorop"))
    cores = sample.tensor_cores
    assert cores is not None
    assert cores.used_ns == by_hand["total_ns"].sum()
    assert cores.eligible == cores.used == by_hand.height
    assert cores.time_share == pytest.approx(0.3826, abs=1e-4)


def test_the_record_adds_up_and_comes_back_from_its_json(sample: Judged) -> None:
    for totals in (sample.profile.measured.totals,):
        assert totals.busy_ns + totals.idle_ns == totals.span_ns
        assert sum(totals.idle_by_cause.values()) == totals.idle_ns
    assert (
        record_from_json(json_from_record(sample.profile), TraceProfile, "profile")
        == sample.profile
    )


ON_TENSOR_CORES = [
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1_execute_kernel__5x_cudnn",
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32_stage3_warpsize2x2x1_tensor16x8x16_execute_kernel_trt",
    "nvjet_sm90_hsh_64x256_64x5_1x4_h_bz_TNN",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_128x128_32x5_nhwc_align8>(T1::Params)",
    "void cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4",
    "volta_h884gemm_64x64_ldg8_tn",
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
    "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn",
    "sm80_xmma_fprop_implicit_gemm_indexed_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_tilesize128x64x64_imma_execute_kernel_trt",
    "void cutlass::device_kernel<flash::FlashAttnFwd<cutlass::bfloat16_t>>",
    "fmha_v2_flash_attention_fp16_64_32_S_64_sm80_kernel",
    "cublasLt_hgmma_128x128",
    "wgmma_attention",  # optpipe's
]
ON_ORDINARY_UNITS = [
    "ampere_sgemm_128x64_tn",
    "volta_sgemm_32x32_sliced1x4_nn",
    "ampere_scudnn_128x64_relu_interior_nn_v1",
    "void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>(int)",
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc_tilesize128x64x8_stage3_warpsize2x2x1_g1_ffma_execute_kernel__5x_cudnn",
    "void cutlass__5x_cudnn::Kernel<cutlass_simt_sgemm_128x128_8x5_tn_align1>(T1::Params)",
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float>(int)",
    "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, float>",
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<c10::Half>>(int)",
    "void nchwToNhwcKernel<__half, __half, float, true, false>",
]


@pytest.mark.parametrize(
    ("name", "used"),
    [*((name, True) for name in ON_TENSOR_CORES), *((name, False) for name in ON_ORDINARY_UNITS)],
)
def test_where_a_kernel_computes(name: str, used: bool) -> None:
    assert uses_tensor_cores(name) is used


def test_a_triton_template_does_not_tell() -> None:
    assert uses_tensor_cores("triton_tem_fused_convolution_3") is None
    assert uses_tensor_cores("triton_poi_fused_relu_1") is False


@pytest.mark.parametrize(("name", "kind"), [
    ("void at::native::batch_norm_transform_input_channels_last_kernel<c10::Half>(int)", KernelKind.NORMALIZATION),
    ("void at::native::<unnamed>::max_pool_forward_nhwc<c10::Half, int>(int)", KernelKind.POOLING),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(int)>(int)", KernelKind.CAST),
    ("void op_generic_tensor_kernel<(int)4, __half>(cudnnTensorStruct, reducedDivisorArray, int)", KernelKind.ELEMENTWISE),
    ("void nhwcAddPaddingKernel<__half, __half>(int)", KernelKind.LAYOUT),
    ("nvjpeg::DCT::decode_kernel", KernelKind.IMAGE),
    ("void softmax_warp_forward<float>(int)", KernelKind.SOFTMAX),
    ("something_new", KernelKind.OTHER),
])  # fmt: skip
def test_kinds(name: str, kind: KernelKind) -> None:
    assert classify_kernel(name) is kind


def test_a_training_loop_with_all_sources_of_an_h200() -> None:
    whole = analysis_from_trace(trace_from_folder(SAMPLE.parent / "h200-training-loop"))
    granted = tuple(SourceState(source, recorded=True) for source in Source)
    found = details_from_trace(whole, None, granted)
    assert [state.name for state in found.sources if not state.recorded] == []
    assert found.os_calls is not None
    assert found.python is not None
    assert found.native is not None
    assert found.switches is not None
    assert any("training_loop.py:" in row.place for row in found.python.rows)
    assert {row.name.split(" [")[0] for row in found.metrics} >= {"SMs Active", "Tensor Active"}
    measured = select_measured_part(whole)
    loop = describe_loop(measured)
    assert loop is not None
    assert loop.data_wait_ns is not None
    assert loop.gpu_busy_ns is not None
    assert loop.iterations == 3
    assert 0.8 < loop.data_wait_ns.median / loop.period_ns.median < 1
    assert loop.gpu_busy_ns.median < 0.02 * loop.period_ns.median
    tree = make_module_tree(measured)
    assert tree is not None
    assert {row.path for row in tree.rows} >= {"1.0.conv", "1.3.norm"}
    [figure] = draw_metrics(measured, ())
    assert "SMs Active" in [name for name, *_ in figure.legend]
