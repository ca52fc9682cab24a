"""Rotary position embeddings: the angles of every position."""

import torch


class RotaryTable:
    """Cosines and sines for every position, so that a position's are always the same bits."""

    def __init__(
        self,
        inv_freq: tuple[float, ...],
        scaling: float,
        max_positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(inv_freq, dtype=torch.float32))
        self.cos = angles.cos().mul_(scaling).to(device)
        """[max_positions, angles] float32; `angles` is half of the channels that are rotated."""
        self.sin = angles.sin().mul_(scaling).to(device)
