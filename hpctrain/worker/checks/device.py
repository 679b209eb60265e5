"""Checks of one device by itself: matrix products, attention kernels, and compression against `torch.topk`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain.base.errors import HpctrainError
from hpctrain.base.units import format_si
from hpctrain.compress.codecs.integers import IntegerCode
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.select.selectors import select_with_values
from hpctrain.records.history.selfcheck import CheckOrder, CheckResult
from hpctrain.worker.measure.rates import DeviceTimer

REPEATS = 5
NUMBERS = {"cpu": 4_000_000, "cuda": 64_000_000}
"""Kind of device -> numbers in the gradient that is compressed: more than fit into the caches."""
DENSITY = 0.01
"""Share of the gradient's numbers that the selection picks."""
ATTENTION_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Dtype -> largest allowed error of attention: the difference from fp64, as a share of the largest value in fp64.
The limit is the dtype's precision (2^-24, 2^-9, 2^-12) times the accumulated rounding of a softmax over 256 keys."""
KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def check_device(order: CheckOrder) -> CheckResult:
    """Multiply matrices on the device, in a process that the fork server forked, and return the device's name as the
    figure. CUDA works there only if it was not used before the fork.

    Raises:
        HpctrainError: the product is wrong.
    """
    device = torch.device(order.device)
    x = torch.ones(256, 256, device=device)
    if float((x @ x).sum()) != 256.0**3:
        raise HpctrainError("a product of matrices of ones is wrong")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    return CheckResult(figure=f"computes on {name}", expected="a right product")


def check_attention(order: CheckOrder) -> CheckResult:
    """Compare each attention kernel of torch, forward and backward, with the same attention in fp64, and return each
    kernel's largest difference, as a share of the largest value in fp64.

    Raises:
        HpctrainError: a kernel's error is above `ATTENTION_ERROR`, or no kernel runs on the device.
    """
    device = torch.device(order.device)
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16]
    ran: dict[str, float] = {}
    for name, kernel in KERNELS.items():
        for dtype in dtypes:
            error = _attention_error(device, dtype, kernel)
            if error is None:
                continue
            if error > ATTENTION_ERROR[dtype]:
                raise HpctrainError(f"kernel {name} in {dtype} is off by {error:.2g} of the largest value")
            ran[name] = max(error, ran.get(name, 0.0))
    if not ran:
        raise HpctrainError("no attention kernel runs here")
    figure = ", ".join(f"{name} {error:.1g}" for name, error in ran.items())
    return CheckResult(
        figure=f"error by kernel: {figure}",
        expected=" or ".join(f"≤ {ATTENTION_ERROR[d]:g} in {str(d)[6:]}" for d in dtypes),
    )


def _attention_error(device: torch.device, dtype: torch.dtype, kernel: SDPBackend) -> float | None:
    """Return the error of causal attention by `kernel` in `dtype`, compared with attention in fp64: the largest
    difference in the output or a gradient, as a share of that tensor's largest value in fp64. None if the kernel does
    not run on this device."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (2, 4, 256, 64)
    tensors = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(3)]
    exact = _attend([tensor.double() for tensor in tensors], SDPBackend.MATH)
    try:
        computed = _attend(tensors, kernel)
    except RuntimeError:  # torch: "No available kernel"
        return None
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(computed, exact, strict=True))


def _attend(tensors: list[Tensor], kernel: SDPBackend) -> list[Tensor]:
    """Return the output of causal attention, then the gradients of query, key and value.

    Args:
        tensors: query, key and value.
        kernel: the kernel that computes the attention.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with sdpa_kernel(kernel):
        query, key, value = leaves
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    output.sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check_compression(order: CheckOrder) -> CheckResult:
    """Time hpctrain's selection of the largest values, `torch.topk` and the encoding of the 8-bit codec on one
    gradient, as multiples of the time to copy the gradient. The verdict is slow if `torch.topk` is at least as fast as
    hpctrain's selection.

    Raises:
        HpctrainError: hpctrain's selection picked less than half or more than twice the wanted numbers.
    """
    timer = DeviceTimer(torch.device(order.device))
    values = torch.randn(NUMBERS[order.device], device=timer.device).mul_(1e-5)
    target = torch.empty_like(values)
    k = round(DENSITY * values.numel())
    codec = QuantizedBucketCodec(IntegerCode(8))
    message = torch.empty(1, codec.bytes_of(values.numel()), dtype=torch.uint8, device=timer.device)
    copy_s = _seconds(timer, lambda: target.copy_(values))
    topk_s = _seconds(timer, lambda: values.abs().topk(k, sorted=False))
    select_s = _seconds(timer, lambda: select_with_values(values, k, "sampled"))
    encode_s = _seconds(timer, lambda: codec.encode([0], [values], message))
    chosen = select_with_values(values, k, "sampled")[0].numel()
    if not 0.5 * k <= chosen <= 2 * k:
        raise HpctrainError(f"the selection took {chosen} of {values.numel()} numbers where {k} were asked for")
    figure = (
        f"of a copy ({format_si(2 * values.nbytes / copy_s, 'B/s')}): selecting 1 % {select_s / copy_s:.1f}, "
        f"torch.topk {topk_s / copy_s:.1f}, writing 8 bits {encode_s / copy_s:.1f}"
    )
    return CheckResult(figure=figure, expected="faster than torch.topk", verdict="ok" if select_s < topk_s else "slow")


def _seconds(timer: DeviceTimer, work: Callable[[], object]) -> float:
    """Return the median seconds of `work` on the device over `REPEATS` calls, after one warm-up call."""
    samples = []
    for _ in range(REPEATS + 1):
        timer.finish()
        start = time.perf_counter()
        work()
        timer.finish()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])
