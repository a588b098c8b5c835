"""CSV files, static plots, a Chrome trace and one self-contained HTML page from facts.

Nothing here imports torch: a report can be made on another machine than the one that measured.

- `records`: measured results, as any command fills them
- `csvs`, `trace`: files for programs
- `plots`, `step_plots`, `experiment_plots`, `figures`, `palette`: static plots
- `html`, `answer`, `payload`, `embed`: the page, its first lines, the data of its charts
- `traffic`: transfers to a store and back
- `summary`, `notebook`, `environment`: what the library itself shows: text, notebooks, when and with what
- `held`, `around`, `explain`: who holds the peak; the graph around an activation; one decision in words
- `times`, `words`: where the time goes; how numbers are written
"""
