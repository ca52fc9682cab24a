"""Low-rank updates of a ragged batch: ``y += scaling * (x @ A.T) @ B.T``, another A, B per row.

`LoraBatch` says which rows belong to which adapter slot (once a step), `LoraTable` what the slots
hold for one projection (written only when an adapter comes or goes), `add_lora` applies it.
"""

from lora_kernels.batch import LoraBatch
from lora_kernels.ops import add_lora
from lora_kernels.table import LoraTable
from lora_kernels.weights import LoraSlice, LoraWeights

__all__ = ["LoraBatch", "LoraSlice", "LoraTable", "LoraWeights", "add_lora"]
