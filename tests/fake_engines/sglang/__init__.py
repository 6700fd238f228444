"""A stand-in for SGLang, which has no build for a CPU: put on the path of an environment, it is its `sglang`."""
