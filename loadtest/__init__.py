"""Load tests, the paper's experiments, and what both are made of. See docs/loadtest.md."""
