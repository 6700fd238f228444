"""A toy gateway for the tests of `ctl up`."""
