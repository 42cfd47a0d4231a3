"""``baton bench``: what a client of any OpenAI endpoint sees under a workload. The command is in baton/bench.py."""
