"""A toy agent for the tests of `ctl up`."""
