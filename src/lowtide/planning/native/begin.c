/* From an order of ops to a sequence, and from a sequence to its order and its peak. */

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
        if (p->pinned[s] || p->remat_ptr[s] == p->remat_ptr[s + 1]) continue;
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
        if (op >= p->num_first) insert_remat(state, op, TAIL);
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
