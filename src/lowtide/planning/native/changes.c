/* Insert and remove runs, with all runs that depend on them; undo. */

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

/* Insert a run, and before it the runs on demand that it reads, where they do not run yet. */
static void insert_remat(State *state, int op, int before) {
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

/* Whether an event is a remat or a run on demand whose blocks no event reads. */
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

/* Discard needless remats of a storage before its place `i`: the latest one, or any of a split storage. */
static void discard_before(State *state, int storage, int i) {
    for (i--; i >= 0 && !full(state); i--) {
        const Touches *mine = &state->touches[storage];
        if (i >= mine->count || mine->items[i].is_read) continue;
        if (is_needless(state, mine->items[i].event)) discard(state, mine->items[i].event);
        if (!is_split(state, storage)) return;
    }
}

/* Remove an event and all events that only it needed. */
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
