"""What an engine on a device computes with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.device.cuda_device import CudaDevice
from engine.device.device import Device, HostDevice
from engine.models.decoder_config import DecoderConfig
from engine.ops import DecoderOps
from engine.sampling.launched import LaunchingSampler
from lora_kernels.device_batch import DeviceLoraBatch, batch_bytes
from lora_kernels.device_kernels import DeviceKernels, device_kernels, rank_rows
from lora_kernels.device_table import MAX_SLICES
from lora_kernels.tiles import pick_variant

if TYPE_CHECKING:  # benchmarks on foreign machines have no library for grammars
    from engine.grammar.grammars import Grammars


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """A device, its operations, and the sizes that follow from the number and rank of adapters."""

    device: Device
    make_ops: Callable[[int], DecoderOps]
    """(length of the longest sequence) -> the operations that the decoder uses."""
    make_sampler: "Callable[[DecoderConfig, Grammars | None], LaunchingSampler]"
    max_loras: int
    max_lora_rank: int
    architecture: int | None = None
    """Compute capability x 10; None: the device's own."""

    @property
    def pool_rows(self) -> int:
        """Rank rows of each pool."""
        return rank_rows(self.max_loras, self.max_lora_rank)

    def kernels(self) -> DeviceKernels:
        """Makers of adapter tables and weights."""
        return device_kernels(
            self.device.torch_device,
            max_rank=self.max_lora_rank,
            pool_rows=self.pool_rows,
            pin=self.device.pin,
        )

    def ragged_batch(self, max_rows: int, dtype: torch.dtype) -> DeviceLoraBatch:
        """A batch for eager steps of up to `max_rows` rows."""
        return self._batch(max_rows, dtype, is_static=False)

    def static_batch(self, num_rows: int, dtype: torch.dtype) -> DeviceLoraBatch:
        """A batch for graphs of decode steps, tuned for rows of as many adapters as possible."""
        return self._batch(num_rows, dtype, is_static=True)

    def batch_bytes(self, num_rows: int) -> int:
        """Bytes of device memory that a batch for `num_rows` rows holds."""
        return batch_bytes(
            num_rows,
            max_slices=MAX_SLICES,
            max_rank=self.max_lora_rank,
            batch_invariant=False,
        )

    def _batch(self, num_rows: int, dtype: torch.dtype, *, is_static: bool) -> DeviceLoraBatch:
        segments = max(1, min(num_rows, self.max_loras))
        variant = pick_variant(num_rows, segments, batch_invariant=False)
        return DeviceLoraBatch(
            num_rows,
            segments,
            max_slices=MAX_SLICES,
            max_rank=self.max_lora_rank,
            dtype=dtype,
            device=self.device.torch_device,
            batch_invariant=False,
            variant=variant if is_static else None,
            architecture=self.architecture,
        )


def cuda_setup(*, max_loras: int, max_lora_rank: int) -> DeviceSetup:
    """The first CUDA device; raises ConfigError where there is none."""
    device = CudaDevice()
    there = device.torch_device
    return DeviceSetup(device, _triton_ops(there), _device_sampler(there), max_loras, max_lora_rank)


def interpreter_setup(*, max_loras: int, max_lora_rank: int) -> DeviceSetup:
    """The GPU's code path on a CPU, with kernels in Triton's interpreter: very slow, for tests.

    Set TRITON_INTERPRET=1 in the environment before Triton is imported.
    """
    device = HostDevice()
    return DeviceSetup(
        device,
        _triton_ops(device.torch_device),
        _device_sampler(device.torch_device),
        max_loras,
        max_lora_rank,
        architecture=90,
    )


def _triton_ops(device: torch.device) -> Callable[[int], DecoderOps]:
    def make(max_positions: int) -> DecoderOps:
        # Late, so that an engine on a CPU does not load Triton.
        from engine.triton.ops import TritonOps

        return TritonOps(device, max_positions=max_positions)

    return make


def _device_sampler(
    device: torch.device,
) -> "Callable[[DecoderConfig, Grammars | None], LaunchingSampler]":
    def make(config: DecoderConfig, grammars: "Grammars | None") -> LaunchingSampler:
        from engine.triton.sampler import DeviceSampler

        return DeviceSampler(config.vocab_size, config.eos_token_ids, device, grammars)

    return make
