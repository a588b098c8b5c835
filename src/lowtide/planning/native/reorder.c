/* Moves that change the place of a run, and random events to begin a move at. */

/* The event that `e` comes before when it moves by some steps; -1 where it would leave the sequence. */
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

/* Move a remat to another place. */
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
    insert_remat(state, op, target);
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
            /* remats of what this run makes must stay behind it */
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

/* A random event with more live bytes than the budget. */
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
