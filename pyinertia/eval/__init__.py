"""Evaluations that tell eviction policies apart, on any GGUF model: `pyinertia eval`."""
