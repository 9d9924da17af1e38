"""Many prompts, many documents: continuous batching over one context.

slots.py is the engine-facing part, schedule.py says what runs when, text.py knows text; generate.py
and documents.py put them together. ray_engine.py has many processes do what documents.py does in
one, ray_worker.py is what each of them runs.
"""

from pyinertia.batch.documents import Summary, summarise
from pyinertia.batch.generate import Completion, generate_many

__all__ = ["Completion", "Summary", "generate_many", "summarise"]
