"""ctl: the operator's commands, and the embedded system they start and stop."""
