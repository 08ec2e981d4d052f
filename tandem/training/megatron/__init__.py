"""Megatron-Core as a training engine: the only package that imports Megatron-Core and its bridge."""
