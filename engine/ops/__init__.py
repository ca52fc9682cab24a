"""What a decoder computes with: PyTorch's operators, or the compiled kernels of engine/native."""

from engine.ops.choose import choose_ops
from engine.ops.protocol import DecoderOps, Draw, HeadNorms, LinearOp, RotationOp, StoringRotation
from engine.ops.torch_ops import TorchOps

__all__ = [
    "DecoderOps",
    "Draw",
    "HeadNorms",
    "LinearOp",
    "RotationOp",
    "StoringRotation",
    "TorchOps",
    "choose_ops",
]
