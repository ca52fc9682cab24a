"""How many rows PyTorch's GEMMs get, so that a row's bits do not depend on their number."""

ROW_TILE = 16
"""For some small row counts oneDNN and MKL pick kernels that sum in another order. For multiples of
16, a row's bits are the same for any count."""


def padded_rows(num_rows: int, tile: int = ROW_TILE) -> int:
    """The next multiple of `tile`."""
    return -(-num_rows // tile) * tile
