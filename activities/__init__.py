"""Control-plane activities: what a job or a pass does outside workflows. The list is at the end of this package."""
