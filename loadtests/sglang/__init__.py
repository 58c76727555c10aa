"""SGLang as the engine: events and CPU time per token."""
