"""How many workers of which role, and whether to split at all: ``baton profile`` and ``baton plan``."""
