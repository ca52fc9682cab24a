"""What a decoder computes with: PyTorch's operators, or the compiled kernels of engine/native."""

from engine.ops.choose import choose_device_ops, choose_ops
from engine.ops.protocol import DecoderOps, Draw, LinearOp, RotationOp
from engine.ops.torch_ops import TorchOps

__all__ = [
    "DecoderOps",
    "Draw",
    "LinearOp",
    "RotationOp",
    "TorchOps",
    "choose_device_ops",
    "choose_ops",
]
