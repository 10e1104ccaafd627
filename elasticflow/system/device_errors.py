"""Texts of accelerators' errors, as torch and NCCL pass them on, and the class of failure that each belongs to.

The texts of CUDA's runtime are those of `cudaGetErrorString` (CUDA 13.0), which HIP's follow; the names of libraries' states
are those in the libraries of torch 2.14 for CUDA 13.0 (cuBLAS 13.1, cuDNN 9.24, NCCL 2.30). Triton's
`gpuAssert` (third_party/nvidia/backend/driver.c, and amd's) passes on the same texts.
"""

from __future__ import annotations

import re
from typing import Literal

DeviceErrorClass = Literal["device", "oom", "crash", "user_error"]

# `CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED` is cuDNN's own; UR is the layer below XPU.
_NO_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU) (?:driver )?(?:error: )?out of memory|Cuda failure (?:2\b|(?:\d+ )?'out of memory')"
    r"|\b(?:CU|HIP|ROC|MIOPEN)[A-Z]*_(?:STATUS_)?(?:ALLOC_FAILED|INTERNAL_ERROR_\w+_ALLOCATION_FAILED)\b"
    r"|\bmiopenStatusAllocFailed\b|\brocblas_status_memory_error\b|\bUR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b"
    r"|Triton Error \[(?:CUDA|HIP)\]: .*\bout of memory"
)
# Two spellings of NCCL: until 2.29, and from 2.30 on.
_SHARED_DEVICE = re.compile(r"Duplicate GPU detected|Multiple Ranks are using the same GPU", re.IGNORECASE)
# A library's state, after a name in capitals or in the style of ROCm.
_LIBRARY = re.compile(
    r"\b(?:CU|HIP|ROC)[A-Z]+_STATUS_(\w+)|\bCUFFT_(\w+)|\brocblas_status_(\w+)|\bmiopenStatus(\w+)"
)
_FAILED_INSIDE = re.compile(
    r"exec(?:ution)?_?failed|internal_?error|not_?initialized|mapping_?error|setup_?failed|unknown_?error",
    re.IGNORECASE,
)
_RUNTIME = re.compile(
    r"(?:CUDA|HIP) (?:driver |kernel )?error: (.+)|Cuda failure (?:\d+ )?'(.+)'"
    r"|Triton Error \[(?:CUDA|HIP)\]: (.+)"
    r"|Unexpected error from (?:cuda|hip)GetDeviceCount\(\).*Error \d+: (.+)"
)
_ELSEWHERE = re.compile(
    r"(?:CUDA|HIP) driver initialization failed|(?:CUDA|HIP) unknown error|No (?:CUDA|HIP) GPUs are available|NVRM: Xid"
    r"|\b(?:UR|ZE)_RESULT_ERROR_(?:DEVICE_LOST|DEVICE_REQUIRES_RESET|DEVICE_IN_LOW_POWER_STATE)\b"
)
# A kernel's own fault, as SIGSEGV is a program's: its code is wrong, or the device is. Nothing tells which.
_KERNEL_FAULT = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|invalid program counter|hardware stack error"
    r"|operation not supported on global/shared address space"
)
# The same call fails in the same way on any healthy device. "initialization error" is CUDA used after a fork.
_OF_THE_CODE = re.compile(
    r"device-side assert|invalid|\bPTX\b|driver version is insufficient|no kernel image|too many (?:resources|blocks)"
    r"|not supported|unsupported|not permitted|captur|peer access|initialization error|stub library|not loaded"
    r"|already (?:mapped|acquired|registered)|does not correspond to a registered|forward compatibility"
)


def class_of_device_error(text: str) -> DeviceErrorClass | None:
    """Return the class of the failure that *text* tells of, or None if it is no error of an accelerator.

    `device`: the device, or its driver, failed. `oom`: its memory is full. `crash`: a kernel faulted. `user_error`: the call was
    wrong, and would be on any device.
    """
    if _NO_MEMORY.search(text):
        return "oom"
    if is_shared_device(text):
        return "user_error"
    if library := _LIBRARY.search(text):
        return "device" if _FAILED_INSIDE.match(library[library.lastindex or 0]) else "user_error"
    if (runtime := _RUNTIME.search(text)) is None:
        return "device" if _ELSEWHERE.search(text) else None
    if is_kernel_fault(text):
        return "crash"
    return "user_error" if _OF_THE_CODE.search(runtime[runtime.lastindex or 0]) else "device"


def is_shared_device(text: str) -> bool:
    """Return whether NCCL says that two ranks use one device, which it refuses."""
    return _SHARED_DEVICE.search(text) is not None


def is_kernel_fault(text: str) -> bool:
    """Return whether a kernel faulted on a device: the job's kernel is wrong, or the device is."""
    runtime = _RUNTIME.search(text)
    return runtime is not None and _KERNEL_FAULT.search(runtime[runtime.lastindex or 0]) is not None
