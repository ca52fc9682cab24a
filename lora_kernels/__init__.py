"""Low-rank updates of a ragged batch: ``y += scaling * (x @ A.T) @ B.T``, another A, B per row."""
