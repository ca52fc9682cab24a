"""How many rows PyTorch's GEMMs get, so that a row's bits are the same for any number of them."""

ROW_TILE = 16
"""oneDNN and MKL pick other kernels, with other orders of sums, for a few small row counts; over
multiples of 16 a row's bits are the same for any count."""


def padded_rows(num_rows: int, tile: int = ROW_TILE) -> int:
    """The next multiple of `tile`."""
    return -(-num_rows // tile) * tile
