"""Control-plane activities: what a job or a pass does outside workflows. `worker.py` puts them on its worker."""
