"""The inner loops of planning, in C: annealing and minimum cuts.

Compiled, because a move of the search takes microseconds there and a hundred times as long in Python; as a
plain library behind ctypes, so that one build serves every version of Python. A wheel brings it along; in
a checkout it is built when first needed, which takes a second and a C compiler. There is no other way to
plan: without it, planning is refused.

- `library`: finds the library, or builds it, and calls it
- `build`: compiles it
- `native.c`: the library's source, which includes the files below
- `state.h`, `sequence.c`, `touches.c`: a sequence of runs and what it holds
- `changes.c`, `evict.c`, `reorder.c`: runs put in and taken out, and the moves of the search made of these
- `begin.c`, `anneal.c`: from an order of ops to a better one
- `min_cut.c`: minimum cuts
"""
