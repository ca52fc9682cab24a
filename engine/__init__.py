"""Continuous batching over one base model and many LoRA adapters.

The scheduler side (scheduler, block manager, slots, fairness) is pure Python; the runner side
holds every tensor. `engine.messages` and `engine.client` are the seam to the service.
"""
