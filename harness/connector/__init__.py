"""The bundled vLLM KV connector: device KV to host DRAM to a directory of files, and back."""
