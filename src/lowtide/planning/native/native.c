/* The inner loops of planning: annealing of sequences of runs, and minimum cuts.

   A sequence has every first run and any number of remats. A run reads the latest earlier block of each storage
   that it needs, so that a remat can be inserted or removed anywhere. The change of live bytes is counted at once:
   it only concerns the runs between two touches of a storage. No decision depends on the clock or on addresses: the
   same input gives the same result.

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
