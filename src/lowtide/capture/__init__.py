"""From a model and a batch to graphs and facts; the only package that touches torch's private hooks."""
