"""Many prompts, many documents: continuous batching over one context.

slots.py is the engine-facing part, schedule.py says what runs when, text.py knows text; generate.py
and documents.py put them together.
"""

from pyinertia.batch.documents import Summary, summarise
from pyinertia.batch.generate import Completion, generate_many

__all__ = ["Completion", "Summary", "generate_many", "summarise"]
