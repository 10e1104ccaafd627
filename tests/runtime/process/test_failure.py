"""Exceptions of workers in classes and words."""

from __future__ import annotations

import errno
import resource
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticflow import StopTraining
from elasticflow.errors import DatasetError, NonFiniteLossError, StorageError
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.runtime.process import failure
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("label 11"), "user_error"),
        (DatasetError("no length"), "user_error"),
        (NonFiniteLossError("nan"), "nonfinite"),
        (StorageError("no room"), "storage"),
        (MemoryError(), "oom"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
        (OSError(errno.EMFILE, "Too many open files"), "user_error"),
        (
            RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:186] Too many open files"),
            "user_error",
        ),
        (
            RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:186] Too many open files in system"),
            "peer",
        ),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), "peer"),
        (dist.DistNetworkError("the store is gone"), "peer"),
        (StoreLostError("the keys are gone"), "peer"),
        (RuntimeError("[gloo/gloo/x.cc:1] Received data size doesn't match expected size"), "user_error"),
        (dist.DistBackendError("Detected mismatch between collectives on ranks. Rank 0 is"), "user_error"),
    ],
)
def test_class_of_an_exception(error: BaseException, kind: str) -> None:
    """The budget counts each under its cause; what a dead peer makes of the others is told apart."""
    assert kind == failure.classify(error)


def test_a_killed_process_of_the_scripts_own_loader_is_a_crash() -> None:
    """The kernel killed it for memory, say: the error of torch's loader names only the process, and its cause the signal."""
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    assert failure.classify(error) == "user_error"
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert failure.classify(error) == failure.classify(error.__cause__) == "crash"


ASYNC = "\nCUDA kernel errors might be asynchronously reported at some other API call. Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.7\n{}\nLast error:\n{}"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered" + ASYNC), "device"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure" + ASYNC), "device"),
        (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "device"),
        (torch.AcceleratorError("HIP error: unspecified launch failure"), "device"),
        (RuntimeError("Triton Error [CUDA]: uncorrectable ECC error encountered"), "device"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "crash"),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "user_error"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom"),
        (RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"), "oom"),
        (RuntimeError("No CUDA GPUs are available"), "device"),
        (torch.AcceleratorError("a text of another accelerator"), "device"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + ASYNC), "crash"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered" + ASYNC), "user_error"),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution"), "user_error"),
        (torch.AcceleratorError("CUDA error: invalid device ordinal" + ASYNC), "user_error"),
        (torch.AcceleratorError("CUDA error: out of memory" + ASYNC), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA driver error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom"),
        (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 20.00 MiB"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), "device"),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasSgemm`"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`"), "user_error"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), "user_error"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED"), "user_error"),
        (RuntimeError("cuFFT error: CUFFT_EXEC_FAILED"), "device"),
        (RuntimeError("miopenStatusUnknownError"), "device"),
        (RuntimeError("Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)"), "device"),
        (RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu."), "device"),
        (
            RuntimeError(
                "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
                "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
            ),
            "device",
        ),
        (RuntimeError("Found no NVIDIA driver on your system. Please check that"), "user_error"),
        (RuntimeError("NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus"), "device"),
        (
            dist.DistBackendError(
                NCCL.format(
                    "unhandled cuda error", "ncclUnhandledCudaError: ...", "Cuda failure 2 'out of memory'"
                )
            ),
            "oom",
        ),
        (
            dist.DistBackendError(
                NCCL.format(
                    "unhandled cuda error",
                    "ncclUnhandledCudaError: ...",
                    "Cuda failure 719 'unspecified launch failure'",
                )
            ),
            "device",
        ),
        (
            dist.DistBackendError(
                NCCL.format(
                    "remote process exited", "ncclRemoteError: A call failed", "socketPollConnect: refused"
                )
            ),
            "peer",
        ),
        (
            dist.DistBackendError(
                "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
            ),
            "user_error",
        ),
        (
            dist.DistBackendError("ncclInvalidUsage: Multiple Ranks are using the same GPU/Partition."),
            "user_error",
        ),
        (ValueError("CUDA error: out of memory"), "user_error"),
    ],
)
def test_class_of_an_accelerators_error(error: BaseException, kind: str) -> None:
    """Memory, a device that fails, a kernel's fault and a call that is wrong on any device are told apart.

    The texts are those of `cudaGetErrorString`, of torch's and NCCL's libraries; no device raised them here.
    """
    assert kind == failure.classify(error)


def test_two_workers_on_one_gpu_are_told_with_the_key_that_says_how_many() -> None:
    """NCCL speaks of ranks and of a bus id."""
    told = failure.describe(
        dist.DistBackendError("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000")
    )
    assert told.startswith("DistBackendError: two workers of a machine use the same GPU")
    assert "\n  help: set nodes.nproc_per_node" in told
    assert "--simulate-nodes or --scale simulate share the machine's GPUs: --set nodes.device=cpu" in told


def test_memory_that_torch_cannot_have_is_no_error_of_the_code() -> None:
    """Torch's allocator for main memory raises a RuntimeError (2.13) of which only the text tells."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert "oom" == failure.classify(caught.value)


def test_store_that_fails_is_no_error_of_the_code(tmp_path: Path) -> None:
    """Snapshots that cannot be read may be readable at the next try; a file of the job's own is another matter."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory") as caught:
        Storage(str(tmp_path)).read("file/inside")
    assert "storage" == failure.classify(caught.value)
    with pytest.raises(OSError, match="Not a directory") as caught:
        (tmp_path / "file" / "inside").read_bytes()
    assert "user_error" == failure.classify(caught.value)


def test_parameters_without_gradient_are_told_in_keys_of_the_job_file() -> None:
    """Torch's own text (2.13) speaks of a constructor the user never calls."""
    error = RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one. ..."
    )

    expected = (
        "RuntimeError: a parameter of the model got no gradient in the step before\n"
        "  help: if steps leave parameters out, set ddp.find_unused_parameters = true, "
        "in a script run.wrap(model, find_unused_parameters=True)"
    )
    assert expected == failure.describe(error)
    searched = RuntimeError(
        f"{error} Since `find_unused_parameters=True` is enabled, this likely  means that"
    )
    assert "set ddp.find_unused_parameters" not in failure.describe(searched)


def test_gradient_that_comes_twice_is_told_with_what_to_do() -> None:
    """Reentrant checkpoints that share parameters are what DistributedDataParallel cannot reduce."""
    told = failure.describe(
        RuntimeError("Expected to mark a variable ready only once. This error is caused by")
    )
    assert "use_reentrant=False" in told


def test_stop_where_ranks_cannot_agree_is_told_with_where_they_can() -> None:
    """An optimizer's hook on one rank has applied what the others have not."""
    told = failure.describe(StopTraining("good enough"))
    assert told.startswith(
        "StopTraining was raised where the ranks cannot agree on it: good enough\n  help: raise it"
    )


def test_a_limit_of_open_files_is_told_with_the_limit() -> None:
    """The next process would meet it, too, so that the remedy is at the command."""
    told = failure.describe(OSError(errno.EMFILE, "Too many open files", "labels.txt"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert told.startswith(
        f"OSError: [Errno 24] Too many open files: 'labels.txt'\n  help: this process may have {limit} files open"
    )


def test_other_errors_are_told_as_they_are() -> None:
    """Type and message, no traceback."""
    assert "KeyError: 'weights'" == failure.describe(KeyError("weights"))


def test_exception_that_cannot_speak_is_told_all_the_same() -> None:
    """What its `__str__` raises does not take its place."""

    class SpeechlessError(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    error = SpeechlessError()
    assert "user_error" == failure.classify(error)
    assert "SpeechlessError" in failure.describe(error)
    assert "no words" not in failure.describe(error)
    assert "SpeechlessError" in failure.text(error)


def test_exception_that_shows_all_its_data_is_shortened() -> None:
    """Its beginning and its end are kept: the agent could not send the whole."""
    error = ValueError(f"first {'x' * 20_000_000} last")
    for told in (failure.describe(error), failure.shortened(failure.text(error))):
        assert 21_000 > len(told)
        assert "ValueError: first x" in told
        assert "characters left out" in told
        assert told.rstrip().endswith("x last")


def test_a_part_of_a_sharded_model_that_is_called_by_itself_is_told() -> None:
    """Torch speaks of two kinds of tensors; the whole model gathers its parameters."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        assert model(torch.ones(1, 2)).shape == (1, 2)
        model.reshard()  # type: ignore[operator]  # the model has become an FSDPModule
        with pytest.raises(RuntimeError) as caught:
            model[0](torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    told = failure.describe(caught.value)
    assert told.startswith(
        "RuntimeError: code computes with parameters of a sharded model that are not gathered\n  help: call"
    )
