"""A stand-in for an SGLang server: another process, real HTTP, real logits of a model, and its quirks."""
