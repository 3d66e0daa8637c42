"""GGUF files, as llama.cpp writes them: their header, the model in it, and how it stores the weights."""
