"""Communication, tensor cores, data loading and groups of kernels, recognised by the names of events."""

import re
from collections.abc import Callable
from enum import StrEnum
from functools import cache


class Mode(StrEnum):
    TB = "tb"  # the numbers of the removed torch-tb-profiler plugin, its faults included, to compare with old reports
    FIXED = "fixed"  # communication by kernel name, every step adding up to 100 %


# -- lists of the plugin; mode `tb` uses exactly these ---------------------------------------------------------------

_TB_COLLECTIVES = ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
TB_COMMUNICATION = frozenset(f"{library}:{name}" for library in ("nccl", "gloo") for name in _TB_COLLECTIVES)
_TB_TENSOR_CORES = (
    "h884|s884|h1688|s1688|hmma|i8816|16816|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|conv2d_c1_k1"
    "|direct_group|xmma_implicit_gemm|xmma_sparse_conv|xmma_warp_specialized_implicit_gemm|xmma_gemm|xmma_sparse_gemm"
    "|c1688"
)
TENSOR_CORE_OPERATORS = frozenset(
    [f"aten::{n}" for n in (
        "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm",
        "addmv", "addr", "matmul", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
        "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
        "rnn_relu_cell", "cudnn_convolution_transpose_backward", "cudnn_convolution_backward_weight", "addmm_",
        "cudnn_convolution_transpose_backward_weight", "cudnn_convolution_transpose_backward_input",
        "cudnn_convolution_backward_input", "cudnn_convolution_backward",
    )]
    + ["CudnnConvolutionBackward", "BmmBackward0", "CudnnConvolutionTransposeBackward", "MmBackward", "AddmvBackward",
       "MvBackward", "AddmmBackward", "AddbmmBackward"]
)  # fmt: skip

# -- patterns of mode `fixed` ----------------------------------------------------------------------------------------

# Anchored at the start of a word: a compute kernel with "nccl" inside another word is not a collective.
_COMMUNICATION_KERNEL = re.compile(
    r"(?:^|[^A-Za-z])(?:nccl|rccl|msccl|oneccl|hccl|nvshmem|rocshmem)|deep_ep::|cross_device_reduce"
    r"|(?:one|two)_shot_all_reduce|multimem_(?:all_|one_shot_)|multimem_reduce|symm_mem",
    re.IGNORECASE,
)
# `nccl:all_reduce` is the range a library marks around a collective; `c10d::allreduce_` is the operator that starts it.
_COLLECTIVE_RANGE = re.compile(r"^(?:nccl|rccl|gloo|mpi|ucc|xccl|hccl):(?!:)", re.IGNORECASE)
_COLLECTIVE_OPERATOR = re.compile(r"^(?:_?c10d(?:_functional)?|symm_mem)::|^record_param_comms$")
_TENSOR_CORE_KERNELS = {
    Mode.TB: re.compile(_TB_TENSOR_CORES),
    # Tensor cores of Volta to Blackwell, AMD's matrix cores (Tensile writes MI32x32 for the matrix instruction,
    # Composable Kernel xdl, AOTriton's attention attn_fwd and bwd_kernel_dq), and Inductor's templates, which are
    # matrix products and attention.
    Mode.FIXED: re.compile(
        _TB_TENSOR_CORES + r"|tensorop|wgmma|utcmma|nvjet|sm(?:80|86|89|90|100)_xmma|sm(?:90|100).*gemm"
        r"|warpspecialized|flash_(?:fwd|bwd)|flash::|fmha|cudnn.*sdpa|mfma|wmma|^Cijk_.*_MI\d+x\d+|_bf16_.*gemm"
        r"|gemm_bf16|_xdl|^triton_tem_|attn_fwd|bwd_kernel_(?:dk_dv|dq|fuse)",
        re.IGNORECASE,
    ),
}

# What a kernel does, for kernels of NVIDIA (cuBLAS, cuDNN, CUTLASS) and AMD (Tensile, Composable Kernel, AOTriton,
# MIOpen) alike. The first row that applies decides; a kernel without a row is in the group "other".
_GROUP_RULES = tuple(
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        ("collective", _COMMUNICATION_KERNEL.pattern),
        # Inductor lists the fused operators: an in-place copy of a quotient by a square root is an Adam step.
        ("optimizer", r"multi_tensor_apply|lpnorm|adam|adagrad|fused_?sgd|^triton_for_|^triton_.*copy__.*_sqrt"),
        ("attention", r"fmha|flash_(?:fwd|bwd|attn)|flash::|sdpa|attn_(?:fwd|bwd)|bwd_kernel_(?:dk_dv|dq|fuse)"
                      r"|bwd_preprocess|attention|cudnn::fusion::(?:compute_dot_do_o|convert_dq)"),
        # Convolutions are matrix products too. FBGEMM's kernels for embeddings are not.
        ("GEMM", r"(?<!fb)gemm|gemv|nvjet|cutlass|xmma|^Cijk_|_xdl|mfma|wmma|splitK|^triton_tem_|conv(?!ert)|scudnn"
                 r"|cask_cudnn|epilogue::|winograd|im2col|[dw]grad_"),
        ("norm and element-wise", r"(?:layer|rms|batch|group|instance)_?norm|softmax|bn_[fb]w|GammaBeta|^triton_poi_|^triton_.*rsqrt"),
        ("reduction", r"reduce|^triton_(?:red|per)_|RowwiseMoments|compute_grad_weight|sum_and_scatter"),
        ("copy", r"copy|fill_?(?:functor|buffer|kernel)|CatArray|transpose|permute|gather|scatter|index_|indexSelect"
                 r"|nchwToNhwc|nhwcToNchw"),
        ("norm and element-wise", r"elementwise|dropout|silu|gelu|swiglu|rope|rotary|distribution|scalePacked"),
    )
)  # fmt: skip
OTHER_KERNELS = "other"
KERNEL_GROUPS = (*dict.fromkeys(group for group, _ in _GROUP_RULES), OTHER_KERNELS)


@cache
def kernel_group(name: str) -> str:
    """One of KERNEL_GROUPS."""
    return next((group for group, pattern in _GROUP_RULES if pattern.search(name)), OTHER_KERNELS)


def is_communication_kernel(name: str) -> bool:
    """NCCL, RCCL and the other libraries put their name into the names of their device kernels."""
    return _COMMUNICATION_KERNEL.search(name) is not None


def is_collective_range(name: str) -> bool:
    return _COLLECTIVE_RANGE.match(name) is not None


def is_communication_operator(name: str) -> bool:
    """Host ranges and operators of collectives; on a CPU-only trace there is nothing else."""
    return is_collective_range(name) or _COLLECTIVE_OPERATOR.match(name) is not None


def is_data_loading(name: str) -> bool:
    return name.startswith("enumerate(DataPipe)#") or (
        name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__")
    )


def tensor_core_test(mode: Mode) -> Callable[[str], bool]:
    return lambda name: _TENSOR_CORE_KERNELS[mode].search(name) is not None


def is_lightning(name: str) -> bool:
    """Ranges that PyTorch Lightning's profiler puts around hooks and modules; the plugin left them out."""
    return name.startswith(("[pl][profile]", "[pl][module]"))


def is_wrapper(name: str) -> bool:
    """Operators that only hold others; the tables leave them out."""
    wrapper = name in ("DataParallel.forward", "DistributedDataParallel.forward") or name.startswith("Optimizer.")
    return wrapper or is_data_loading(name) or is_lightning(name)
