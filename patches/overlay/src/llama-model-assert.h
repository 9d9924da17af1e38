#pragma once

// The last include where a model file is read: what a file says is no reason to end the process.
// GGML_ASSERT and GGML_ABORT throw, and llama_model_load_from_file catches.

#include "llama-impl.h"

#include <stdexcept>

#undef  GGML_ABORT
#define GGML_ABORT(...) throw std::runtime_error(format(__VA_ARGS__))
