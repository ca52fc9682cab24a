"""Print the roofline of the engine's Triton kernels, as docs/gpu-kernels.md has it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.triton.kernel_costs import LLAMA_3_8B, QWEN_2_5_05B, table

if __name__ == "__main__":
    for model in (LLAMA_3_8B, QWEN_2_5_05B):
        sys.stdout.write(f"{table(model)}\n\n")
