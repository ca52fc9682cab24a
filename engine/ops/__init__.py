"""What a decoder computes with: PyTorch's operators, or the compiled kernels of engine/native."""

from engine.ops.choose import choose_ops
from engine.ops.protocol import DecoderOps, LinearOp, RotationOp
from engine.ops.torch_ops import TorchOps

__all__ = ["DecoderOps", "LinearOp", "RotationOp", "TorchOps", "choose_ops"]
