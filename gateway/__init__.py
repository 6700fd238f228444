"""The OpenAI-compatible front door: each model's requests go to its ready replicas."""
