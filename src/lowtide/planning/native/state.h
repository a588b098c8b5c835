/* What is planned, and a sequence of runs as it is searched. */

/* See `Problem` in lowtide/planning/search/problem.py. Lists of lists are flat, with a `_ptr` of starts. */
typedef struct {
    int32_t num_first, num_ops, num_storages, num_views;
    const int32_t *read_ptr, *reads;   /* by op: storages */
    const int32_t *make_ptr, *makes;   /* by op: storages */
    const int32_t *remat_ptr, *remats;     /* by storage: ops that make it anew */
    const int32_t *vread_ptr, *vreads; /* by op: views */
    const int32_t *view_ptr, *views;   /* by storage: views of it */
    const double *seconds, *view_seconds;
    const int64_t *workspace;
    const int32_t *slot;
    const uint8_t *optional, *may_move;
    const int64_t *nbytes;
    const uint8_t *pinned;
    const uint8_t *read_classes, *make_classes; /* like `reads` and `makes`: classes of readers, a bit each */
    const uint8_t *classes;                     /* by storage: all of its classes */
    int64_t static_bytes;
} Problem;

/* Of a sequence: bytes above the budget, summed over its runs; peak; seconds added. */
typedef struct {
    int64_t excess, peak;
    double seconds;
} Figures;

#define LARGEST (INT64_MAX / 4)

enum { HEAD = 0, TAIL = 1, CHUNK = 64, FILLED = 48, MAX_GATHERED = 48 };

/* One run of a sequence, by its place. HEAD and TAIL are before and after all runs. */
typedef struct {
    int32_t op, place; /* place: among the events that can be drawn */
    int32_t chunk, index;
} Event;

/* Some events in the order they run. */
typedef struct {
    int32_t events[CHUNK];
    int64_t held[CHUNK];
} Chunk;

/* A chunk as a whole; spans stand side by side in the order they run, since most changes pass through many. An
   event holds its own `held` bytes and `all`; `least` and `most` are bounds of the former, not always tight. */
typedef struct {
    int64_t all, least, most;
    int32_t chunk, count;
} Span;

/* Where an event reads or makes a storage, for which classes of readers. */
typedef struct {
    int32_t event;
    uint8_t is_read, classes;
} Touch;

typedef struct {
    Touch *items; /* in the order of the events */
    int32_t count, room;
} Touches;

typedef struct {
    int32_t event, op, before, inserted;
} Change;

typedef struct {
    const Problem *p;
    uint64_t random;
    Event *events;
    Chunk *chunks;
    Span *spans;
    int32_t *places;          /* by chunk, its span */
    Touches *touches;         /* by storage */
    int32_t *spare, *spare_chunks, *again, *first_event, *maker, *candidates, *gathered;
    int64_t *own;             /* by op: bytes that it makes, and its workspace */
    double *weights;          /* running sums of the bytes of `candidates` */
    uint32_t *mark, *view_mark, stamp, view_stamp;
    Change *journal;
    Change *since;            /* what was changed since the best sequence */
    int64_t num_since, since_room;
    int num_events, num_spare, num_chunks, num_spare_chunks, num_spans, num_again, num_candidates, num_changes, num_gathered, room, failed;
    int64_t budget, excess, tail_held; /* tail_held: bytes after the last run */
    double seconds;
} State;
