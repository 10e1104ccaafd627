"""Operations that torch cannot repeat, and what an error says to do about them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elasticflow.errors import StateError
from elasticflow.runtime.training import determinism

_REFUSED = (
    "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You can turn off "
    "determinism just for this operation, or you can use the 'warn_only=True' option, if that's acceptable for your application."
)


@pytest.mark.parametrize(
    ("operation", "remedy"),
    [
        ("put_", "use index_put_, or"),
        ("median CUDA with indices output", "use sort, or"),
        ("cumsum_cuda_kernel", "x.cpu().cumsum(dim).to(x.device)"),
        ("nll_loss2d_forward_out_cuda_template", "scores.movedim(1, -1).flatten(0, -2)"),
        ("upsample_bilinear2d_backward_out_cuda", "interpolate without antialias"),
        ("upsample_bicubic2d_backward_out_cuda", "interpolate(x.cpu(), ...)"),
        ("adaptive_avg_pool2d_backward_cuda", "avg_pool2d with kernel_size"),
        ("adaptive_max_pool2d_backward_cuda", "max_pool2d with kernel_size"),
        ("ctc_loss_backward_gpu", "ctc_loss(log_probs.cpu()"),
        ("reflection_pad2d_backward_cuda", "an index that mirrors"),
        ("grid_sampler_2d_backward_cuda", "the same operation on the CPU"),
        ("some_new_operation", "use another operation"),
    ],
)
def test_a_refused_operation_is_named_with_its_remedy(operation: str, remedy: str) -> None:
    """By the names under which torch refuses operations on CUDA, and in torch's words."""
    error = determinism.named(RuntimeError(_REFUSED.format(operation)))
    assert isinstance(error, StateError)
    assert f"cannot use {operation}: it may give other bits each time" in error.message
    assert remedy in str(error.remedy)
    assert str(error.remedy).endswith('or consistency = "batch"')


def test_flat_scores_have_the_same_loss() -> None:
    """The remedy for two-dimensional targets, with weights of classes and targets that are left out."""
    scores, target = torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4))
    target[0, 0] = -100
    weight = torch.rand(5)
    flat = functional.cross_entropy(scores.movedim(1, -1).flatten(0, -2), target.flatten(), weight)
    torch.testing.assert_close(flat, functional.cross_entropy(scores, target, weight))


@pytest.mark.parametrize(
    ("adaptive", "plain"),
    [
        (nn.AdaptiveAvgPool2d((2, 3)), nn.AvgPool2d((4, 3))),
        (nn.AdaptiveMaxPool2d((2, 3)), nn.MaxPool2d((4, 3))),
    ],
)
def test_pooling_with_a_kernel_is_the_adaptive_pooling(adaptive: nn.Module, plain: nn.Module) -> None:
    """Where the input's sides are multiples of the output's."""
    images = torch.randn(2, 3, 8, 9)
    torch.testing.assert_close(plain(images), adaptive(images))


def test_an_index_that_mirrors_pads_by_reflection() -> None:
    """Values and gradients; torch can repeat the gradient of an index."""
    found: list[tuple[Tensor, Tensor]] = []
    for pad in (
        lambda x: x[..., [2, 1, 0, 1, 2, 3, 4, 3, 2]],
        lambda x: functional.pad(x, (2, 2), mode="reflect"),
    ):
        row = torch.arange(5.0).reshape(1, 1, 5).requires_grad_()
        padded = pad(row)
        padded.pow(2).sum().backward()
        assert row.grad is not None
        found.append((padded.detach(), row.grad))
    torch.testing.assert_close(found[0], found[1])
