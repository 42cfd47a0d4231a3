"""Processes of a whole cluster in one thread and in virtual time."""
