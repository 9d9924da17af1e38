"""What leaves the KV cache of one prompt and its answer, step by step, for people to look at.

`record` runs a model, `Recording` is what it saw; page, plot and terminal show it.
"""

from pyinertia.inspect.recording import Recording, Step, record

__all__ = ["Recording", "Step", "record"]
