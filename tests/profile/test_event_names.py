"""Event names of several generations and makers."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.profile.event_names import (
    KERNEL_GROUPS,
    Mode,
    is_communication_kernel,
    is_communication_operator,
    is_data_loading,
    kernel_group,
    tensor_core_test,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", True), ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("void ncclKernel_SendRecv()", True), ("_Z38ncclDevKernel_Generic_4", True), ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>) [clone .kd]", True),
        ("mscclKernel_Sum_float_Simple_false", True), ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", True), ("two_shot_all_reduce_kernel", True),
        ("nvshmemi_transfer", True),
        ("hipLaunchKernel_gemm", False), ("void at::native::reduce_kernel<512, 1>", False), ("syncclause_kernel", False), ("blockAllReduceSum", False),
    ],
)  # fmt: skip
def test_communication_kernels(name, expected):
    assert is_communication_kernel(name) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nccl:_all_gather_base", True), ("gloo:all_reduce", True), ("c10d::allreduce_", True), ("_c10d_functional::all_gather_into_tensor", True),
     ("record_param_comms", True), ("aten::mm", False), ("nccl::not_a_range", False)],
)  # fmt: skip
def test_communication_operators(name, expected):
    assert is_communication_operator(name) is expected


@pytest.mark.parametrize(
    ("name", "tb", "fixed"),
    [
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", True, True), ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn", True, True),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", False, True), ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", True, True),
        ("sm90_xmma_gemm_bf16", True, True), ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", False, True),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN", False, True), ("Cijk_Ailk_Bljk_SB_MT64x64x8_SE_K1", False, False),
        ("volta_sgemm_128x64_nn", False, False), ("void layer_norm_grad_gamma_beta_kernel<float>", False, False), ("triton_poi_fused_add_0", False, False),
        ("triton_tem_fused_mm_3", False, True), ("attn_fwd.kd", False, True), ("bwd_kernel_dk_dv", False, True), ("bwd_preprocess", False, False),
        ("void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<", False, True),
    ],
)  # fmt: skip
def test_tensor_cores(name, tb, fixed):
    assert tensor_core_test(Mode.TB)(name) is tb
    assert tensor_core_test(Mode.FIXED)(name) is fixed


def test_data_loading():
    assert is_data_loading("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    assert is_data_loading("enumerate(DataPipe)#Mapper")
    assert not is_data_loading("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.close")


KERNEL_NAMES = [
    row.split("\t") for row in (Path(__file__).parent / "data" / "kernel_names.tsv").read_text().splitlines()
]


def test_kernels_of_every_vendor_fall_into_the_same_groups():
    wrong = [(device, group, name) for device, group, name in KERNEL_NAMES if kernel_group(name) != group]
    assert not wrong
    groups = {device: {g for d, g, _ in KERNEL_NAMES if d == device} for device in ("MI250", "ROCm", "H200", "A100")}
    assert groups["MI250"] == {"GEMM", "norm and element-wise", "reduction", "copy", "optimizer"}
    assert groups["MI250"] | groups["ROCm"] == set(KERNEL_GROUPS) - {"other"}
    assert groups["H200"] | groups["A100"] == set(KERNEL_GROUPS)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("convert_fp8_kernel", "other"), ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>", "reduction"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm and element-wise"), ("triton_tem_fused_flex_attention_2", "attention"),
        ("void fbgemm_gpu::permute_indices_weights_kernel<false, int>", "copy"), ("void (anonymous namespace)::elementwise_kernel_with_index<int>", "norm and element-wise"),
    ],
)  # fmt: skip
def test_names_that_resemble_another_group(name, group):
    assert kernel_group(name) == group
