"""What the decoder computes with on GPUs: attention, its fused neighbours and sampling, in Triton.

Nothing is imported here: only what runs a kernel loads Triton.
"""
