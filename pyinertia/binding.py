"""llama_cpp, imported after its library was found and checked."""

from pyinertia import _native

_native.load()

import llama_cpp as llama_cpp  # noqa: E402
from llama_cpp.llama_cache import BaseLlamaCache as BaseLlamaCache  # noqa: E402
from llama_cpp.llama_cache import LlamaDiskCache as LlamaDiskCache  # noqa: E402
from llama_cpp.llama_cache import LlamaRAMCache as LlamaRAMCache  # noqa: E402
from llama_cpp.llama_grammar import LlamaGrammar as LlamaGrammar  # noqa: E402
from llama_cpp.llama_tokenizer import LlamaTokenizer as LlamaTokenizer  # noqa: E402
