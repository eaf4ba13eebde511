"""A connector's directory of KV blocks: listed, verified, pruned. Needs no server and no vLLM."""
