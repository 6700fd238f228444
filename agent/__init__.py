"""The agent of one node: it starts, watches and stops engine processes, and speaks for the node to Temporal."""
