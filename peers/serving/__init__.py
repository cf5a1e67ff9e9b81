"""A run as an endpoint: an engine that writes with its newest versions, and the OpenAI-compatible API around it."""
