"""CSV files, static plots, a Chrome trace and one self-contained HTML page, from facts.

Nothing here imports torch: a report can be made on another machine than the one that measured.

- `results`: records of measurements and of their environment, for any command
- `style`: labels, colours and numbers; figures for plots
- `times`: the time of a step by op and module; transfers to a store and back
- `resting`: what rests on a store between its uses, and the traffic of a step
- `module_summary`: by module, what a plan keeps, packs, recomputes and offloads
- `live_tensors`: the live ranges of all tensors, packed
- `explanation`: what a plan does with one activation, and the graph around it
- `answer`: the first lines of the page: fit, cost, exactness
- `page_packing`: numbers, strings and JSON inside of a page
- `payload`: the data of the page's charts
- `page_parts`: templates, scripts and policy of all pages
- `html`: the page
- `side_by_side`, `diff_page`: two runs, as figures and changes, and as a page
- `step_plots`, `experiment_plots`, `plots`: static plots of a step, of experiments, all into a folder
- `pareto_plot`: planners against each other, above the proven bound
- `exports`: CSV files and the Chrome trace, for other programs
- `notebook`: a profile, a plan or a verification as text and as SVG
"""
