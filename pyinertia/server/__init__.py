"""An OpenAI-compatible server on the parts of `llama_cpp.server`; it needs the extra `server`."""
