"""Calls of tools and reasoning: which tools a request offers, how models write calls, how their text is read."""
