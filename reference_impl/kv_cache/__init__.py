"""Step 2: the runner binds the KV cache tensor. Read `spec`, `allocate`, `bind`."""
