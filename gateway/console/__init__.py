"""The console: one page that shows the cluster to its operators, and what the page reads."""
