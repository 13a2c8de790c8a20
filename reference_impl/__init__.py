"""The reference implementation of vLLM's forward context.

Read the modules in the order of the specification's steps: `registry` (1), `kv_cache` (2), `context` (3 and 5),
`layers.attention` and `ops` (4 and 6), `backends`.
"""
