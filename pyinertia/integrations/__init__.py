"""`pyinertia.Llama` where other libraries have llama-cpp-python's; each file needs one of them."""
