"""CSV files, static plots, a Chrome trace and one self-contained HTML page from facts.

Nothing here imports torch: a report can be made on another machine than the one that measured.
"""
