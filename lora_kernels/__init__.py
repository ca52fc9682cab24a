"""Low-rank updates of a ragged batch: ``y += scaling * (x @ A.T) @ B.T``, with A and B by row.

- `LoraBatch`: which rows belong to which adapter slot; made once for each step.
- `LoraTable`: what the slots hold for one projection; written only when an adapter comes or goes.
- `add_lora`: applies both.
- `AffineTable`, `EmbeddingTable`: the same for updates that only few adapters have.
- `choose_cpu_kernels`: picks the CPU path, which makes the tables and fuses the weights.
"""

from lora_kernels.batch import LoraBatch
from lora_kernels.column_affine import AffineTable, ColumnAffine
from lora_kernels.cpu_kernels import CpuKernels, choose_cpu_kernels
from lora_kernels.embedding import EmbeddingLora, EmbeddingTable
from lora_kernels.ops import add_lora
from lora_kernels.table import LoraTable
from lora_kernels.weights import LoraSlice, LoraWeights

__all__ = [
    "AffineTable",
    "ColumnAffine",
    "CpuKernels",
    "EmbeddingLora",
    "EmbeddingTable",
    "LoraBatch",
    "LoraSlice",
    "LoraTable",
    "LoraWeights",
    "add_lora",
    "choose_cpu_kernels",
]
