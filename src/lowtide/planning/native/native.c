/* The inner loops of planning: annealing of sequences of runs, and minimum cuts.

   A sequence holds every first run and any number of runs that bring blocks back. Every one of them reads
   the latest earlier block of what it needs, so that putting such a run in or taking it out is always
   valid. What that changes is counted at once: it only concerns the runs between two touches of a storage.
   Nothing here decides by the clock or by addresses: the same input gives the same result.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* See `Problem` in lowtide/planning/anneal/problem.py. Lists of lists are flat, with a `_ptr` of starts. */
typedef struct {
    int32_t num_first, num_ops, num_storages, num_views;
    const int32_t *read_ptr, *reads;   /* by op: storages */
    const int32_t *make_ptr, *makes;   /* by op: storages */
    const int32_t *way_ptr, *ways;     /* by storage: ops that bring it back */
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

#define LARGEST (INT64_MAX / 4)

enum { HEAD = 0, TAIL = 1, CHUNK = 64, FILLED = 48, MAX_GATHERED = 48 };

/* One run of a sequence, by where it stands. HEAD and TAIL stand before and after all runs. */
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

static double draw(State *state) {
    uint64_t x = state->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    state->random = x;
    return (double)((x * UINT64_C(2685821657736338717)) >> 11) * (1.0 / 9007199254740992.0);
}

static int pick(State *state, int count) {
    const int found = (int)(draw(state) * count);
    return found < count ? found : count - 1;
}

static int64_t over(const State *state, int64_t held) { return held > state->budget ? held - state->budget : 0; }

static Span *span_of(const State *state, int e) {
    return &state->spans[state->places[state->events[e].chunk]];
}

static int64_t held_at(const State *state, int e) {
    return state->chunks[state->events[e].chunk].held[state->events[e].index] + span_of(state, e)->all;
}

static int next_of(const State *state, int e) {
    const Span *span = span_of(state, e);
    const int index = state->events[e].index + 1;
    return index < span->count ? state->chunks[span->chunk].events[index] : state->chunks[span[1].chunk].events[0];
}

static int prev_of(const State *state, int e) {
    const Span *span = span_of(state, e);
    const int index = state->events[e].index - 1;
    if (index >= 0) return state->chunks[span->chunk].events[index];
    return state->chunks[span[-1].chunk].events[span[-1].count - 1];
}

/* Whether one event runs before another. */
static int is_before(const State *state, int e, int other) {
    const Event *one = &state->events[e], *two = &state->events[other];
    if (one->chunk == two->chunk) return one->index < two->index;
    return state->places[one->chunk] < state->places[two->chunk];
}

/* Add `nbytes` to the events of a span from index `from` to before `to`; what that adds to the excess. */
static int64_t add_within(const State *state, Span *span, int from, int to, int64_t nbytes) {
    int64_t *held = state->chunks[span->chunk].held;
    const int64_t budget = state->budget - span->all;
    const int64_t most = span->most, least = span->least;
    int64_t excess = 0;
    if (nbytes > 0) span->most += nbytes;
    else span->least += nbytes;
    if (most <= budget && span->most <= budget) {
        for (int i = from; i < to; i++) held[i] += nbytes;
        return 0;
    }
    if (least >= budget && span->least >= budget) {
        for (int i = from; i < to; i++) held[i] += nbytes;
        return nbytes * (to - from);
    }
    for (int i = from; i < to; i++) {
        const int64_t before = held[i], after = before + nbytes;
        held[i] = after;
        excess += (after > budget ? after - budget : 0) - (before > budget ? before - budget : 0);
    }
    return excess;
}

/* The same for all events of a span: at once where all of them are below the budget, or all above. */
static int64_t add_to_all(const State *state, Span *span, int64_t nbytes) {
    const int64_t budget = state->budget - span->all;
    if (span->most <= budget && span->most + nbytes <= budget) {
        span->all += nbytes;
        return 0;
    }
    if (span->least >= budget && span->least + nbytes >= budget) {
        span->all += nbytes;
        return nbytes * span->count;
    }
    const int64_t excess = add_within(state, span, 0, span->count, nbytes);
    const int64_t *held = state->chunks[span->chunk].held;
    int64_t least = LARGEST, most = -LARGEST;
    for (int i = 0; i < span->count; i++) {
        least = held[i] < least ? held[i] : least;
        most = held[i] > most ? held[i] : most;
    }
    span->least = least, span->most = most;
    return excess;
}

/* Add `nbytes` to all events after `first` up to `last`. */
static void add_between(State *state, int first, int last, int64_t nbytes) {
    if (last == TAIL) {
        state->tail_held += nbytes;
        last = prev_of(state, TAIL);
    }
    Span *span = span_of(state, first), *end = span_of(state, last);
    int from = state->events[first].index + 1;
    if (span != end) {
        state->excess += add_within(state, span, from, span->count, nbytes);
        for (span++; span != end; span++) state->excess += add_to_all(state, span, nbytes);
        from = 0;
    }
    state->excess += add_within(state, end, from, state->events[last].index + 1, nbytes);
}

/* Let the spans from a place on, and their chunks, stand elsewhere. */
static void move_spans(State *state, int from, int by) {
    memmove(state->spans + from + by, state->spans + from, (size_t)(state->num_spans - from) * sizeof(Span));
    state->num_spans += by;
    for (int place = from + by; place < state->num_spans; place++) state->places[state->spans[place].chunk] = place;
}

/* A span without events behind another one. */
static Span *new_span(State *state, int behind) {
    const int chunk = state->num_spare_chunks ? state->spare_chunks[--state->num_spare_chunks] : state->num_chunks++;
    move_spans(state, behind + 1, 1);
    Span *made = &state->spans[behind + 1];
    made->chunk = chunk, made->count = 0;
    state->places[chunk] = behind + 1;
    return made;
}

/* Move the last events of a span, from index `from` on, to the end of another one. */
static void shift(State *state, Span *source, int from, Span *target) {
    const Chunk *mine = &state->chunks[source->chunk];
    Chunk *other = &state->chunks[target->chunk];
    if (!target->count) target->all = source->all, target->least = LARGEST, target->most = -LARGEST;
    for (int i = from; i < source->count; i++) {
        const int e = mine->events[i], index = target->count++;
        const int64_t held = mine->held[i] + source->all - target->all;
        other->events[index] = e, other->held[index] = held;
        state->events[e].chunk = target->chunk, state->events[e].index = index;
        if (held < target->least) target->least = held;
        if (held > target->most) target->most = held;
    }
    source->count = from;
}

/* Let event `e` stand right behind another one, with its bytes. */
static void link(State *state, int e, int behind, int64_t held) {
    Span *span = span_of(state, behind);
    int index = state->events[behind].index + 1;
    const int place = state->places[span->chunk];
    if (place + 2 == state->num_spans && index >= FILLED && index == span->count) { /* at the end, where whole sequences grow */
        span = new_span(state, place);
        span->all = 0, span->least = LARGEST, span->most = -LARGEST;
        index = 0;
    } else if (span->count == CHUNK) {
        new_span(state, place);
        shift(state, &state->spans[place], CHUNK / 2, &state->spans[place + 1]);
        span = span_of(state, behind), index = state->events[behind].index + 1;
    }
    Chunk *mine = &state->chunks[span->chunk];
    for (int i = span->count++; i > index; i--) {
        mine->events[i] = mine->events[i - 1], mine->held[i] = mine->held[i - 1];
        state->events[mine->events[i]].index = i;
    }
    held -= span->all;
    mine->events[index] = e, mine->held[index] = held;
    state->events[e].chunk = span->chunk, state->events[e].index = index;
    if (held < span->least) span->least = held;
    if (held > span->most) span->most = held;
}

/* Let a span have the events of the next one, too, where both have few. */
static int join(State *state, int place) {
    Span *span = &state->spans[place];
    if (span[1].count && span->count + span[1].count > CHUNK / 2) return 0;
    const int chunk = span[1].chunk;
    shift(state, &span[1], 0, span);
    move_spans(state, place + 2, -1);
    state->spare_chunks[state->num_spare_chunks++] = chunk;
    return 1;
}

static void unlink_event(State *state, int e) {
    Span *span = span_of(state, e);
    Chunk *mine = &state->chunks[span->chunk];
    const int place = state->places[span->chunk];
    span->count--;
    for (int i = state->events[e].index; i < span->count; i++) {
        mine->events[i] = mine->events[i + 1], mine->held[i] = mine->held[i + 1];
        state->events[mine->events[i]].index = i;
    }
    if (place > 0 && join(state, place - 1)) return;
    if (place + 2 < state->num_spans) join(state, place);
}

/* The place of the first touch of a storage at or after an event. */
static int touch_at(const State *state, int storage, int event) {
    const Touches *mine = &state->touches[storage];
    int low = 0, high = mine->count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (is_before(state, mine->items[middle].event, event)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int is_read_at(const Touches *mine, int i) { return i < mine->count && mine->items[i].is_read; }

static int event_before(const Touches *mine, int i) { return i > 0 ? mine->items[i - 1].event : HEAD; }

/* What the views take that are read of the block around place `i` of a storage, if it was brought back. */
static double views_around(State *state, int storage, int i) {
    const Problem *p = state->p;
    const Touches *mine = &state->touches[storage];
    if (p->view_ptr[storage] == p->view_ptr[storage + 1]) return 0.0;
    while (i >= 0 && (i >= mine->count || mine->items[i].is_read)) i--;
    if (i < 0 || state->events[mine->items[i].event].op < p->num_first) return 0.0;
    state->view_stamp++;
    for (i++; is_read_at(mine, i); i++) {
        if (mine->items[i].event == TAIL) continue;
        const int op = state->events[mine->items[i].event].op;
        for (int j = p->vread_ptr[op]; j < p->vread_ptr[op + 1]; j++) state->view_mark[p->vreads[j]] = state->view_stamp;
    }
    double seconds = 0.0;
    for (int j = p->view_ptr[storage]; j < p->view_ptr[storage + 1]; j++)
        if (state->view_mark[p->views[j]] == state->view_stamp) seconds += p->view_seconds[p->views[j]];
    return seconds;
}

static void put_touch(State *state, int storage, int i, int event, int is_read, int classes) {
    Touches *mine = &state->touches[storage];
    if (mine->count == mine->room) {
        const int room = 2 * mine->room + 4;
        Touch *items = realloc(mine->items, (size_t)room * sizeof(Touch));
        if (!items) {
            state->failed = 1;
            return;
        }
        mine->items = items, mine->room = room;
    }
    memmove(mine->items + i + 1, mine->items + i, (size_t)(mine->count - i) * sizeof(Touch));
    mine->items[i].event = event, mine->items[i].is_read = (uint8_t)is_read, mine->items[i].classes = (uint8_t)classes;
    mine->count++;
}

static void drop_touch(State *state, int storage, int i) {
    Touches *mine = &state->touches[storage];
    memmove(mine->items + i, mine->items + i + 1, (size_t)(mine->count - i - 1) * sizeof(Touch));
    mine->count--;
}

/* Whether some of what brings a storage back serves some of its readers only. Each of them reads the latest
   block that serves it, so that several blocks are held side by side. */
static int is_split(const State *state, int storage) { return state->p->classes[storage] != 1; }

/* The place of the first or the last read that the block made at place `i` serves; `i` where there is none. The
   touch at place `without` does not count. */
static int served_by(const Touches *mine, int i, int is_first, int without) {
    int open = mine->items[i].classes, found = i;
    for (int j = i + 1; j < mine->count && open; j++) {
        if (j == without) continue;
        if (!mine->items[j].is_read) open &= ~mine->items[j].classes;
        else if (mine->items[j].classes & open) {
            found = j;
            if (is_first) break;
        }
    }
    return found;
}

/* What the views take that are read of all blocks of a split storage. What serves some readers is a view itself. */
static double split_views(State *state, int storage) {
    const Problem *p = state->p;
    const Touches *mine = &state->touches[storage];
    double seconds = 0.0;
    for (int i = 0; i < mine->count; i++) {
        if (mine->items[i].is_read || mine->items[i].classes != p->classes[storage]) continue;
        if (state->events[mine->items[i].event].op < p->num_first) continue;
        int open = mine->items[i].classes;
        state->view_stamp++;
        for (int j = i + 1; j < mine->count && open; j++) {
            if (!mine->items[j].is_read) open &= ~mine->items[j].classes;
            else if ((mine->items[j].classes & open) && mine->items[j].event != TAIL) {
                const int op = state->events[mine->items[j].event].op;
                for (int k = p->vread_ptr[op]; k < p->vread_ptr[op + 1]; k++)
                    state->view_mark[p->vreads[k]] = state->view_stamp;
            }
        }
        for (int k = p->view_ptr[storage]; k < p->view_ptr[storage + 1]; k++)
            if (state->view_mark[p->views[k]] == state->view_stamp) seconds += p->view_seconds[p->views[k]];
    }
    return seconds;
}

/* Count the bytes that the touch at place `i` of a split storage changes, as it comes (1) or goes (-1). */
static void count_touch(State *state, int storage, int i, int sign) {
    const Touches *mine = &state->touches[storage];
    const int64_t nbytes = sign * state->p->nbytes[storage];
    for (int j = 0; j <= i; j++) {
        if (mine->items[j].is_read) continue;
        const int with = served_by(mine, j, 0, -1), without = j == i ? i : served_by(mine, j, 0, i);
        const int one = mine->items[without].event, two = mine->items[with].event;
        if (with > without) add_between(state, one, two, nbytes);
        else if (with < without) add_between(state, two, one, -nbytes);
    }
}

/* Let an event touch a split storage. */
static void put_split(State *state, int storage, int e, int is_read, int classes) {
    const int i = touch_at(state, storage, e);
    state->seconds -= split_views(state, storage);
    put_touch(state, storage, i, e, is_read, classes);
    count_touch(state, storage, i, 1);
    state->seconds += split_views(state, storage);
}

static void drop_split(State *state, int storage, int e) {
    const int i = touch_at(state, storage, e);
    state->seconds -= split_views(state, storage);
    count_touch(state, storage, i, -1);
    drop_touch(state, storage, i);
    state->seconds += split_views(state, storage);
}

/* Let `op` run right before event `before`; the new event. */
static int insert(State *state, int op, int before) {
    const Problem *p = state->p;
    Event *events = state->events;
    const int e = state->num_spare ? state->spare[--state->num_spare] : state->num_events++;
    const int64_t passing =
        before == TAIL ? state->tail_held : held_at(state, before) - state->own[events[before].op];
    events[e].op = op;
    link(state, e, prev_of(state, before), passing + state->own[op]);
    state->excess += over(state, passing + state->own[op]);
    state->seconds += p->seconds[op];
    for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1]; j++) {
        const int s = p->makes[j];
        if (is_split(state, s)) {
            put_split(state, s, e, 0, p->make_classes[j]);
            continue;
        }
        const int i = touch_at(state, s, e);
        state->seconds -= views_around(state, s, i - 1);
        if (is_read_at(&state->touches[s], i)) add_between(state, event_before(&state->touches[s], i), e, -p->nbytes[s]);
        put_touch(state, s, i, e, 0, 1);
        state->seconds += views_around(state, s, i - 1) + views_around(state, s, i);
    }
    for (int j = p->read_ptr[op]; j < p->read_ptr[op + 1]; j++) {
        const int s = p->reads[j];
        if (is_split(state, s)) {
            put_split(state, s, e, 1, p->read_classes[j]);
            continue;
        }
        const int i = touch_at(state, s, e);
        state->seconds -= views_around(state, s, i - 1);
        if (!is_read_at(&state->touches[s], i)) add_between(state, event_before(&state->touches[s], i), e, p->nbytes[s]);
        put_touch(state, s, i, e, 1, 1);
        state->seconds += views_around(state, s, i);
    }
    if (op < p->num_first) {
        state->first_event[op] = e;
    } else {
        events[e].place = state->num_again;
        state->again[state->num_again++] = e;
    }
    return e;
}

static void take_out(State *state, int e) {
    const Problem *p = state->p;
    Event *events = state->events;
    const int op = events[e].op;
    for (int j = p->read_ptr[op]; j < p->read_ptr[op + 1]; j++) {
        const int s = p->reads[j];
        if (is_split(state, s)) {
            drop_split(state, s, e);
            continue;
        }
        const int i = touch_at(state, s, e);
        state->seconds -= views_around(state, s, i);
        drop_touch(state, s, i);
        state->seconds += views_around(state, s, i - 1);
        if (!is_read_at(&state->touches[s], i)) add_between(state, event_before(&state->touches[s], i), e, -p->nbytes[s]);
    }
    for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1]; j++) {
        const int s = p->makes[j];
        if (is_split(state, s)) {
            drop_split(state, s, e);
            continue;
        }
        const int i = touch_at(state, s, e);
        state->seconds -= views_around(state, s, i - 1) + views_around(state, s, i);
        drop_touch(state, s, i);
        state->seconds += views_around(state, s, i - 1);
        if (is_read_at(&state->touches[s], i)) add_between(state, event_before(&state->touches[s], i), e, p->nbytes[s]);
    }
    state->excess -= over(state, held_at(state, e));
    state->seconds -= p->seconds[op];
    unlink_event(state, e);
    if (op < p->num_first) {
        state->first_event[op] = -1;
    } else {
        const int last = state->again[--state->num_again];
        state->again[events[e].place] = last;
        events[last].place = events[e].place;
    }
    events[e].op = -1;
    state->spare[state->num_spare++] = e;
}

static void note(State *state, int event, int op, int before, int inserted) {
    Change *change = &state->journal[state->num_changes++];
    change->event = event, change->op = op, change->before = before, change->inserted = inserted;
}

static int full(const State *state) {
    return state->num_changes > 400 || state->num_events - state->num_spare > state->room - 100;
}

/* Put a run in, and before it what a recipe keeps from the forward pass, where that does not run yet. */
static void bring(State *state, int op, int before) {
    const Problem *p = state->p;
    for (int j = p->read_ptr[op]; j < p->read_ptr[op + 1]; j++) {
        const int keeper = state->maker[p->reads[j]];
        if (keeper < 0 || !p->optional[keeper] || state->first_event[keeper] >= 0) continue;
        int next = keeper + 1;
        while (next < p->num_first && state->first_event[next] < 0) next++;
        const int place = next < p->num_first ? state->first_event[next] : TAIL;
        note(state, insert(state, keeper, place), keeper, place, 1);
    }
    note(state, insert(state, op, before), op, before, 1);
}

/* Whether an event brings something back, or keeps something, that nobody reads. */
static int is_needless(const State *state, int e) {
    const Problem *p = state->p;
    const int op = state->events[e].op;
    if (!p->optional[op]) return 0;
    for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1]; j++) {
        const Touches *mine = &state->touches[p->makes[j]];
        const int i = touch_at(state, p->makes[j], e);
        if (is_split(state, p->makes[j]) ? served_by(mine, i, 1, -1) > i : is_read_at(mine, i + 1)) return 0;
    }
    return 1;
}

static void discard(State *state, int e);

/* Discard what brings a storage back for nobody, before its place `i`: the latest, or of a split one any. */
static void discard_before(State *state, int storage, int i) {
    for (i--; i >= 0 && !full(state); i--) {
        const Touches *mine = &state->touches[storage];
        if (i >= mine->count || mine->items[i].is_read) continue;
        if (is_needless(state, mine->items[i].event)) discard(state, mine->items[i].event);
        if (!is_split(state, storage)) return;
    }
}

/* Take an event out and with it all that only it needed. */
static void discard(State *state, int e) {
    const Problem *p = state->p;
    const int op = state->events[e].op;
    const int next = next_of(state, e);
    note(state, e, op, next, 0);
    take_out(state, e);
    for (int j = p->read_ptr[op]; j < p->read_ptr[op + 1] && !full(state); j++)
        discard_before(state, p->reads[j], touch_at(state, p->reads[j], next));
}

/* After a run was put in: discard those before it whose blocks it took the readers of. */
static void discard_behind(State *state, int e) {
    const Problem *p = state->p;
    const int op = state->events[e].op;
    if (op < 0) return; /* discarded in the meantime */
    for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1] && !full(state); j++)
        discard_before(state, p->makes[j], touch_at(state, p->makes[j], e));
}

static void take_back(State *state, const Change *changes, int64_t count) {
    while (count) {
        const Change change = changes[--count];
        if (change.inserted) take_out(state, change.event);
        else insert(state, change.op, change.before);
    }
}

static void undo(State *state) {
    take_back(state, state->journal, state->num_changes);
    state->num_changes = 0;
}

/* Remember how a move leads away from the best sequence. */
static void remember(State *state) {
    if (state->num_since + state->num_changes > state->since_room) {
        const int64_t room = 2 * state->since_room + 1024;
        Change *since = realloc(state->since, (size_t)room * sizeof(Change));
        if (!since) {
            state->failed = 1;
            return;
        }
        state->since = since, state->since_room = room;
    }
    memcpy(state->since + state->num_since, state->journal, (size_t)state->num_changes * sizeof(Change));
    state->num_since += state->num_changes;
}

/* Whether `op` may run again right before an event. */
static int may_stand(const State *state, int before, int op) {
    const Problem *p = state->p;
    while (before != TAIL && state->events[before].op >= p->num_first) before = next_of(state, before);
    return before != TAIL && p->slot[state->events[before].op] == p->slot[op];
}

/* The classes of readers of a storage that an op serves. */
static int classes_served(const State *state, int storage, int op) {
    const Problem *p = state->p;
    for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1]; j++)
        if (p->makes[j] == storage) return p->make_classes[j];
    return 0;
}

/* Some op that brings a storage back for some classes of readers; -1 where none does. */
static int some_way(State *state, int storage, int classes) {
    const Problem *p = state->p;
    const int32_t *ways = p->ways + p->way_ptr[storage];
    const int count = p->way_ptr[storage + 1] - p->way_ptr[storage];
    if (!is_split(state, storage)) return ways[pick(state, count)];
    int fitting = 0;
    for (int i = 0; i < count; i++) fitting += !(classes & ~classes_served(state, storage, ways[i]));
    if (!fitting) return -1;
    int left = pick(state, fitting);
    for (int i = 0;; i++)
        if (!(classes & ~classes_served(state, storage, ways[i])) && !left--) return ways[i];
}

/* Whether a storage is there at event `at` for some class of readers, or made between that and `target`. */
static int is_there_for(const State *state, int storage, int at, int target, int class) {
    const Touches *mine = &state->touches[storage];
    for (int i = touch_at(state, storage, at); i < mine->count; i++) {
        if (!(mine->items[i].classes & class)) continue;
        return mine->items[i].is_read || mine->items[i].event == at || is_before(state, mine->items[i].event, target);
    }
    return 0;
}

/* The same for all of some classes. */
static int is_there(const State *state, int storage, int at, int target, int classes) {
    if (is_split(state, storage)) {
        for (int class = 1; class <= classes; class *= 2)
            if ((classes & class) && !is_there_for(state, storage, at, target, class)) return 0;
        return 1;
    }
    const Touches *mine = &state->touches[storage];
    int i = touch_at(state, storage, at);
    if (i < mine->count && mine->items[i].event == at) return 1;
    if (is_read_at(mine, i)) return 1;
    for (; i < mine->count && is_before(state, mine->items[i].event, target); i++)
        if (!mine->items[i].is_read) return 1;
    return 0;
}

/* Gather `op` behind what it needs and is not there, each only once. */
static void gather(State *state, int at, int target, int op, int depth, double chain) {
    const Problem *p = state->p;
    state->mark[op] = state->stamp;
    for (int j = p->read_ptr[op]; j < p->read_ptr[op + 1]; j++) {
        const int s = p->reads[j];
        if (depth + state->num_gathered >= MAX_GATHERED) break;
        if (p->way_ptr[s] == p->way_ptr[s + 1] || is_there(state, s, at, target, p->read_classes[j]) || draw(state) > chain)
            continue;
        const int way = some_way(state, s, p->read_classes[j]);
        if (way < 0 || state->mark[way] == state->stamp || !may_stand(state, target, way)) continue;
        gather(state, at, target, way, depth + 1, chain);
    }
    state->gathered[state->num_gathered++] = op;
}

/* Bring a storage back right before an event, and what that needs and is not there at event `at` either, each by
   the chance `chain`; the classes of readers that this serves. */
static int bring_all(State *state, int storage, int classes, int at, int target, double chain) {
    if (target == TAIL) return 0;
    const int way = some_way(state, storage, classes);
    if (way < 0 || !may_stand(state, target, way)) return 0;
    state->stamp++;
    state->num_gathered = 0;
    gather(state, at, target, way, 0, chain);
    const int first = state->num_changes;
    for (int j = 0; j < state->num_gathered; j++) bring(state, state->gathered[j], target);
    const int last = state->num_changes;
    for (int j = first; j < last && !full(state); j++) {
        const int e = state->journal[j].event;
        if (!state->journal[j].inserted || state->events[e].op != state->journal[j].op) continue;
        if (is_needless(state, e)) discard(state, e);
        else discard_behind(state, e);
    }
    return classes_served(state, storage, way);
}

/* Free all blocks of a split storage that are idle at event `at`; whether there was any. */
static int free_split(State *state, int storage, int at, double chain) {
    const Touches *mine = &state->touches[storage];
    const int i = touch_at(state, storage, at);
    int open = state->p->classes[storage], idle = 0;
    if (i == 0 || (i < mine->count && mine->items[i].event == at)) return 0;
    for (int j = i; j < mine->count; j++) {
        if (mine->items[j].is_read) idle |= mine->items[j].classes & open;
        open &= ~mine->items[j].classes;
    }
    if (!idle) return 0;
    while (idle && !full(state)) {
        int j = touch_at(state, storage, at);
        while (j < mine->count && !(mine->items[j].is_read && (mine->items[j].classes & idle))) j++;
        if (j == mine->count) break;
        const int served = bring_all(state, storage, mine->items[j].classes & idle, at, mine->items[j].event, chain);
        if (!served) break;
        idle &= ~served;
    }
    return 1;
}

/* Free a block that is idle at event `at`: bring it back right before it is read next. */
static void evict(State *state, int at, double chain) {
    if (!state->num_candidates) return;
    const double most = state->weights[state->num_candidates - 1];
    const int by_size = draw(state) < 0.7;
    for (int tries = 0; tries < 40; tries++) {
        int chosen;
        if (by_size) {
            const double where = draw(state) * most;
            int low = 0, high = state->num_candidates - 1;
            while (low < high) {
                const int middle = (low + high) / 2;
                if (state->weights[middle] <= where) low = middle + 1;
                else high = middle;
            }
            chosen = state->candidates[low];
        } else {
            chosen = state->candidates[pick(state, state->num_candidates)];
        }
        if (is_split(state, chosen)) {
            if (free_split(state, chosen, at, chain)) return;
            continue;
        }
        const Touches *mine = &state->touches[chosen];
        const int i = touch_at(state, chosen, at);
        if (i == 0 || !is_read_at(mine, i) || mine->items[i].event == at) continue;
        if (bring_all(state, chosen, 1, at, mine->items[i].event, chain)) return;
    }
}

/* The event to stand before when moving by some steps from `e`; -1 where it would leave the sequence. */
static int by_steps(const State *state, int e, int steps) {
    for (; steps > 0 && e != TAIL; steps--) e = next_of(state, e);
    for (; steps < 0 && e != HEAD; steps++) e = prev_of(state, e);
    return e == HEAD ? -1 : e;
}

static int some_steps(State *state) {
    const double chance = draw(state);
    const int steps = 1 + (int)((state->num_events - state->num_spare) * chance * chance * chance * chance);
    return draw(state) < 0.5 ? steps + 1 : -steps;
}

/* Whether all that `op` reads has been made before an event. */
static int is_made_before(const State *state, int op, int before) {
    const Problem *p = state->p;
    for (int j = p->read_ptr[op]; j < p->read_ptr[op + 1]; j++) {
        const Touches *mine = &state->touches[p->reads[j]];
        int i = 0;
        while (i < mine->count && mine->items[i].is_read) i++;
        if (i == mine->count || !is_before(state, mine->items[i].event, before)) return 0;
    }
    return 1;
}

/* Move a run that brings something back to another place. */
static void move_again(State *state, int e) {
    const Problem *p = state->p;
    const int op = state->events[e].op;
    int target = -1;
    if (draw(state) < 0.5) { /* right before it is first read */
        for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1]; j++) {
            const Touches *mine = &state->touches[p->makes[j]];
            const int made = touch_at(state, p->makes[j], e);
            const int i = is_split(state, p->makes[j]) ? served_by(mine, made, 1, -1) : made + 1;
            if (!is_read_at(mine, i)) continue;
            const int reader = mine->items[i].event;
            if (target < 0 || is_before(state, reader, target)) target = reader;
        }
    } else {
        target = by_steps(state, e, some_steps(state));
    }
    if (target < 0 || target == TAIL || target == e || target == next_of(state, e)) return;
    if (!may_stand(state, target, op) || !is_made_before(state, op, target)) return;
    note(state, e, op, next_of(state, e), 0);
    take_out(state, e);
    bring(state, op, target);
    discard_behind(state, state->journal[state->num_changes - 1].event);
}

/* Move a first run to another place between what it reads and what reads it. */
static void move_first(State *state, int e) {
    const Problem *p = state->p;
    const int op = state->events[e].op;
    int steps = some_steps(state), target = e;
    while (steps) {
        const int passed = steps > 0 ? target : prev_of(state, target);
        if (passed == TAIL || passed == HEAD) break;
        if (passed != e) {
            const int other = state->events[passed].op;
            if (other < p->num_first && !p->may_move[other]) break;
            int blocked = 0;
            if (steps > 0) {
                for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1] && !blocked; j++)
                    for (int k = p->read_ptr[other]; k < p->read_ptr[other + 1] && !blocked; k++)
                        blocked = p->makes[j] == p->reads[k];
            } else if (other < p->num_first) {
                for (int j = p->make_ptr[other]; j < p->make_ptr[other + 1] && !blocked; j++)
                    for (int k = p->read_ptr[op]; k < p->read_ptr[op + 1] && !blocked; k++)
                        blocked = p->makes[j] == p->reads[k];
            }
            /* runs that bring back what this one makes must stay behind it */
            for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1] && !blocked && steps > 0; j++)
                for (int k = p->make_ptr[other]; k < p->make_ptr[other + 1] && !blocked; k++)
                    blocked = p->makes[j] == p->makes[k];
            if (blocked) break;
        }
        target = steps > 0 ? next_of(state, target) : passed;
        steps += steps > 0 ? -1 : 1;
    }
    if (target == e || target == next_of(state, e)) return;
    note(state, e, op, next_of(state, e), 0);
    take_out(state, e);
    note(state, insert(state, op, target), op, target, 1);
}

static int some_event(State *state) {
    const int again = pick(state, state->p->num_first + state->num_again);
    return again < state->p->num_first ? state->first_event[again] : state->again[again - state->p->num_first];
}

/* Some event that holds more than the budget. */
static int some_excess(State *state) {
    for (int tries = 0; tries < 24; tries++) {
        const int e = some_event(state);
        if (e >= 0 && over(state, held_at(state, e))) return e;
    }
    const int start = some_event(state);
    const Event *from = &state->events[start < 0 ? HEAD : start];
    int place = state->places[from->chunk], i = start < 0 ? 0 : from->index;
    for (int left = state->num_spans; left >= 0; left--) {
        const Span *span = &state->spans[place];
        const Chunk *mine = &state->chunks[span->chunk];
        if (span->most + span->all > state->budget)
            for (; i < span->count; i++)
                if (mine->held[i] + span->all > state->budget && mine->events[i] > TAIL) return mine->events[i];
        place = (place + 1) % state->num_spans;
        i = 0;
    }
    return -1;
}

static int64_t peak_of(const State *state) {
    int64_t peak = 0;
    for (int place = 0; place < state->num_spans; place++) {
        const Span *span = &state->spans[place];
        const Chunk *mine = &state->chunks[span->chunk];
        for (int i = 0; i < span->count; i++)
            if (mine->events[i] > TAIL && mine->held[i] + span->all > peak) peak = mine->held[i] + span->all;
    }
    return peak;
}

static int write_order(const State *state, int32_t *order) {
    int length = 0;
    for (int place = 0; place < state->num_spans; place++) {
        const Chunk *mine = &state->chunks[state->spans[place].chunk];
        for (int i = 0; i < state->spans[place].count; i++)
            if (mine->events[i] > TAIL) order[length++] = state->events[mine->events[i]].op;
    }
    return length;
}

static int begin(State *state, const Problem *p, const int32_t *order, int length, int room, int64_t budget, uint64_t seed) {
    memset(state, 0, sizeof(State));
    state->p = p;
    state->random = UINT64_C(88172645463325252) + seed * UINT64_C(2862933555777941757);
    state->budget = budget;
    state->room = room;
    const size_t ops = (size_t)p->num_ops + 1, storages = (size_t)p->num_storages + 1, events = (size_t)room + 512;
    const size_t chunks = events / 8 + 8; /* two neighbours have more than CHUNK / 2 events */
    state->events = calloc(events, sizeof(Event));
    state->chunks = calloc(chunks, sizeof(Chunk));
    state->spans = calloc(chunks, sizeof(Span));
    state->places = calloc(chunks, sizeof(int32_t));
    state->spare_chunks = malloc(chunks * sizeof(int32_t));
    state->touches = calloc(storages, sizeof(Touches));
    state->spare = malloc(events * sizeof(int32_t));
    state->again = malloc(events * sizeof(int32_t));
    state->first_event = malloc(ops * sizeof(int32_t));
    state->maker = calloc(storages, sizeof(int32_t));
    state->candidates = malloc(storages * sizeof(int32_t));
    state->weights = malloc(storages * sizeof(double));
    state->gathered = malloc((MAX_GATHERED + 2) * sizeof(int32_t));
    state->own = calloc(ops, sizeof(int64_t));
    state->mark = calloc(ops, sizeof(uint32_t));
    state->view_mark = calloc((size_t)p->num_views + 1, sizeof(uint32_t));
    state->journal = malloc(1024 * sizeof(Change));
    if (!(state->events && state->chunks && state->spans && state->places && state->spare_chunks && state->touches && state->spare && state->again && state->first_event && state->maker &&
          state->candidates && state->weights && state->gathered && state->own && state->mark && state->view_mark &&
          state->journal))
        return 0;
    for (int i = 0; i < 8; i++) draw(state);
    for (int s = 0; s < p->num_storages; s++) state->maker[s] = -1;
    for (int op = 0; op < p->num_ops; op++) {
        state->own[op] = p->workspace[op];
        state->first_event[op] = -1;
        for (int j = p->make_ptr[op]; j < p->make_ptr[op + 1]; j++) {
            state->own[op] += p->nbytes[p->makes[j]];
            if (op < p->num_first) state->maker[p->makes[j]] = op;
        }
    }
    double weight = 0.0;
    for (int s = 0; s < p->num_storages; s++) {
        if (p->pinned[s] || p->way_ptr[s] == p->way_ptr[s + 1]) continue;
        weight += (double)p->nbytes[s] + 1e-3;
        state->weights[state->num_candidates] = weight;
        state->candidates[state->num_candidates++] = s;
    }
    state->num_events = 2;
    state->events[HEAD].op = state->events[TAIL].op = -1;
    state->num_chunks = state->num_spans = 2;
    for (int e = HEAD; e <= TAIL; e++) {
        state->events[e].chunk = state->spans[e].chunk = state->places[e] = e;
        state->chunks[e].events[0] = e, state->spans[e].count = 1;
    }
    state->tail_held = p->static_bytes;
    for (int s = 0; s < p->num_storages; s++) {
        if (!p->pinned[s]) continue;
        put_touch(state, s, 0, TAIL, 1, p->classes[s]);
        state->tail_held += p->nbytes[s];
    }
    for (int i = 0; i < length && !state->failed; i++) {
        const int op = order[i];
        if (p->optional[op] && op < p->num_first) continue; /* comes with what reads it */
        if (op >= p->num_first) bring(state, op, TAIL);
        else insert(state, op, TAIL);
        state->num_changes = 0;
    }
    /* From the last to the first, so that whatever only a needless run needs is needless, too. */
    for (int e = prev_of(state, TAIL); e != HEAD;) {
        const int prev = prev_of(state, e);
        if (is_needless(state, e)) take_out(state, e);
        e = prev;
    }
    return !state->failed;
}

static void end(State *state) {
    for (int s = 0; state->touches && s < state->p->num_storages; s++) free(state->touches[s].items);
    free(state->events), free(state->chunks), free(state->spans), free(state->places), free(state->spare_chunks), free(state->touches), free(state->spare);
    free(state->again), free(state->first_event);
    free(state->maker), free(state->candidates), free(state->weights), free(state->gathered), free(state->own);
    free(state->mark), free(state->view_mark), free(state->journal), free(state->since);
}

/* The figures of a sequence: excess over the budget, peak, and seconds added. Runs that nobody needs count for
   nothing. `order` gets those that are left, `held` what each holds. Their number, or -1 without memory. */
int lowtide_evaluate(const Problem *p, int32_t *order, int length, int64_t budget, int64_t *held, int64_t *excess,
                     int64_t *peak, double *seconds) {
    State state;
    int left = -1;
    if (begin(&state, p, order, length, length + p->num_first + 8, budget, 1)) {
        left = write_order(&state, order);
        *excess = state.excess, *peak = peak_of(&state), *seconds = state.seconds;
        for (int e = next_of(&state, HEAD); e != TAIL; e = next_of(&state, e)) *held++ = held_at(&state, e);
    }
    end(&state);
    return left;
}

/* Anneal the sequence in `order`, which has `room` places; the best one met takes its place: first by
   excess, then by seconds, of those that add at least `least_seconds`. Ends before all `moves` where one within
   the budget adds no more than `enough_seconds`. Its length, or -1 without memory. */
int lowtide_anneal(const Problem *p, int32_t *order, int length, int room, int64_t budget, int64_t moves, double heat,
                   uint64_t seed, double least_seconds, double enough_seconds, double reorder, int64_t *excess,
                   int64_t *peak, double *seconds) {
    State state;
    if (!begin(&state, p, order, length, room, budget, seed)) {
        end(&state);
        return -1;
    }
    int64_t largest = 1;
    for (int s = 0; s < p->num_storages; s++)
        if (p->nbytes[s] > largest) largest = p->nbytes[s];
    int is_best = 0; /* whether the best sequence was met by the last move */
    int64_t best_excess = state.excess;
    double best_seconds = state.seconds;
    double price = heat / (double)largest, temperature = heat;
    for (int64_t move = 0; move < moves && !state.failed; move++) {
        if (!best_excess && best_seconds <= enough_seconds) break;
        if (move % 64 == 0) temperature = heat * pow(10.0, -3.0 * (double)move / (double)moves);
        const int64_t old_excess = state.excess;
        const double old_seconds = state.seconds;
        const double kind = draw(&state);
        state.num_changes = 0;
        if (reorder > 0.0 && draw(&state) < reorder) {
            const int op = pick(&state, p->num_first);
            if (p->may_move[op] && state.first_event[op] >= 0) move_first(&state, state.first_event[op]);
        } else if (state.excess > 0 && kind < 0.6) {
            const int at = some_excess(&state);
            if (at >= 0) evict(&state, at, 0.8);
        } else if (kind < 0.8) {
            if (state.num_again) discard(&state, state.again[pick(&state, state.num_again)]);
            if (draw(&state) < 0.5 && state.excess > 0 && !full(&state)) { /* and free another block instead */
                const int at = some_excess(&state);
                if (at >= 0) evict(&state, at, 0.8);
            }
        } else if (kind < 0.95) {
            if (state.num_again) move_again(&state, state.again[pick(&state, state.num_again)]);
        } else {
            const int at = some_event(&state);
            if (at >= 0) evict(&state, at, 0.5);
        }
        if (!state.num_changes) continue;
        const double worse = state.seconds - old_seconds + price * (double)(state.excess - old_excess);
        const int stays = !full(&state) && (worse <= 0.0 || draw(&state) < exp(-worse / temperature));
        if (stays && state.seconds >= least_seconds &&
            (state.excess < best_excess || (state.excess == best_excess && state.seconds < best_seconds * (1 - 1e-12)))) {
            best_excess = state.excess, best_seconds = state.seconds;
            state.num_since = 0;
            is_best = 1;
        } else if (stays && !is_best) {
            remember(&state);
        } else {
            undo(&state); /* also the first move away from a new best one: a second look at what is near it */
            state.seconds = old_seconds; /* sums of many small numbers drift */
            is_best = 0;
        }
        if (move % 100 == 99) price *= state.excess > 0 ? 1.3 : 0.8;
    }
    if (!state.failed) take_back(&state, state.since, state.num_since);
    const int failed = state.failed, best_length = failed ? 0 : write_order(&state, order);
    *excess = best_excess, *peak = failed ? 0 : peak_of(&state), *seconds = best_seconds;
    end(&state);
    return failed ? -1 : best_length;
}

/* Dinic's maximum flow from vertex 0 to vertex 1. Arc `i` goes from tails[i] to heads[i]. Marks in `reached`
   the vertices on the source's side of a minimum cut. The flow, or -1 without memory. */
int64_t lowtide_min_cut(int num_vertices, int num_arcs, const int32_t *tails, const int32_t *heads,
                        const int64_t *capacities, uint8_t *reached) {
    const int n = num_vertices;
    int32_t *start = calloc((size_t)n + 2, sizeof(int32_t)), *arc = malloc((size_t)(2 * num_arcs + 1) * sizeof(int32_t));
    int32_t *level = malloc((size_t)n * sizeof(int32_t)), *queue = malloc((size_t)n * sizeof(int32_t));
    int32_t *place = malloc((size_t)n * sizeof(int32_t)), *path = malloc((size_t)(n + 1) * sizeof(int32_t));
    int64_t *left = malloc((size_t)(2 * num_arcs + 1) * sizeof(int64_t));
    int64_t flow = -1;
    if (start && arc && level && queue && place && path && left) {
        flow = 0;
        /* arc 2i is arc i of the input, 2i + 1 its reverse */
        for (int i = 0; i < num_arcs; i++) {
            start[tails[i] + 1]++, start[heads[i] + 1]++;
            left[2 * i] = capacities[i], left[2 * i + 1] = 0;
        }
        for (int v = 0; v < n; v++) start[v + 1] += start[v];
        memcpy(place, start, (size_t)n * sizeof(int32_t));
        for (int i = 0; i < num_arcs; i++) {
            arc[place[tails[i]]++] = 2 * i;
            arc[place[heads[i]]++] = 2 * i + 1;
        }
        for (;;) {
            for (int v = 0; v < n; v++) level[v] = -1;
            int head = 0, tail = 0;
            queue[tail++] = 0, level[0] = 0;
            while (head < tail) {
                const int v = queue[head++];
                for (int j = start[v]; j < start[v + 1]; j++) {
                    const int to = arc[j] & 1 ? tails[arc[j] >> 1] : heads[arc[j] >> 1];
                    if (left[arc[j]] > 0 && level[to] < 0) level[to] = level[v] + 1, queue[tail++] = to;
                }
            }
            if (level[1] < 0) break;
            memcpy(place, start, (size_t)n * sizeof(int32_t));
            int depth = 0, v = 0;
            for (;;) {
                if (v == 1) {
                    int64_t most = INT64_MAX;
                    int tight = 0;
                    for (int j = depth - 1; j >= 0; j--)
                        if (left[path[j]] <= most) most = left[path[j]], tight = j;
                    for (int j = 0; j < depth; j++) left[path[j]] -= most, left[path[j] ^ 1] += most;
                    flow += most;
                    depth = tight;
                    v = path[tight] & 1 ? heads[path[tight] >> 1] : tails[path[tight] >> 1];
                    continue;
                }
                int went = 0;
                for (; place[v] < start[v + 1]; place[v]++) {
                    const int a = arc[place[v]];
                    const int to = a & 1 ? tails[a >> 1] : heads[a >> 1];
                    if (left[a] > 0 && level[to] == level[v] + 1) {
                        path[depth++] = a, v = to, went = 1;
                        break;
                    }
                }
                if (went) continue;
                if (v == 0) break;
                level[v] = -1; /* leads nowhere */
                depth--;
                v = path[depth] & 1 ? heads[path[depth] >> 1] : tails[path[depth] >> 1];
                place[v]++;
            }
        }
        for (int v = 0; v < n; v++) reached[v] = level[v] >= 0;
    }
    free(start), free(arc), free(level), free(queue), free(place), free(path), free(left);
    return flow;
}
