/* The inner loops of planning: annealing of sequences of runs, and minimum cuts.

   A sequence holds every first run and any number of runs that bring blocks back. Every one of them reads
   the latest earlier block of what it needs, so that putting such a run in or taking it out is always
   valid. What that changes is counted at once: it only concerns the runs between two touches of a storage.
   Nothing here decides by the clock or by addresses: the same input gives the same result.

   The library is this one file to the compiler, so that functions can be inlined wherever they are used; each
   file uses only what those before it have.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"
#include "sequence.c"
#include "touches.c"
#include "changes.c"
#include "evict.c"
#include "reorder.c"
#include "begin.c"
#include "anneal.c"
#include "min_cut.c"
