"""Experiments on one target: batch sizes, the trade-off curve, other methods, and the step run for real.

Each module has one experiment, as a function that tells its progress and returns frozen records;
the command line shows and writes them.
"""
