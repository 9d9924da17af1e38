"""Documents: found, opened and turned into text. Knows nothing of models.

find.py says which files there are, reading.py opens them safely, and each format has its own file
and one line in formats.py.
"""

from pyinertia.documents.document import Document, DocumentError, shown
from pyinertia.documents.find import STDIN, Source, find
from pyinertia.documents.formats import FORMATS, has_lines, suffixes
from pyinertia.documents.reading import read

__all__ = [
    "FORMATS",
    "STDIN",
    "Document",
    "DocumentError",
    "Source",
    "find",
    "has_lines",
    "read",
    "shown",
    "suffixes",
]
