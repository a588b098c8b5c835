/* The order of events, and the live bytes at each. Events are in chunks: bytes for all of a chunk are added once. */

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

/* Shift the spans from a place on. */
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

/* Put event `e` right behind another one, with its live bytes. */
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

/* Join a span with the next one where both have few events. */
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
