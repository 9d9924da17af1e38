"""PDF: the text of its pages, if it has any."""

from __future__ import annotations

import io
import logging

from pyinertia.documents.document import DocumentError


def text(data: bytes, encoding: str) -> str:
    """Return the text of all pages; a PDF has its own encoding.

    Raises:
        DocumentError: pypdf is not installed, or the file is damaged, locked or without text.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, PyPdfError
    except ImportError as error:
        msg = "PDF needs pypdf; pip install 'pyinertia[documents]'"
        raise DocumentError(msg) from error
    if b"%PDF-" not in data[:1024]:
        msg = "not a PDF, whatever its name says; rename it"
        raise DocumentError(msg)
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it repairs much, and tells all of it
    try:
        pdf = PdfReader(io.BytesIO(data))
        if pdf.is_encrypted and not pdf.decrypt(""):
            msg = "locked with a password; unlock it first, as `qpdf --decrypt` does"
            raise DocumentError(msg)
        pages = [page.extract_text() for page in pdf.pages]
    except DependencyError as error:
        msg = f"locked in a way that needs a library ({error}); unlock it first"
        raise DocumentError(msg) from error
    except PyPdfError as error:
        msg = f"a damaged PDF ({error}); print it to a new one"
        raise DocumentError(msg) from error
    if not pages:
        msg = "a PDF without pages; leave it out"
        raise DocumentError(msg)
    whole = "\n\n".join(page.strip() for page in pages).strip()
    if not whole:
        msg = f"a PDF of {len(pages)} pages without text (scanned?); run OCR on it first"
        raise DocumentError(msg)
    return whole
