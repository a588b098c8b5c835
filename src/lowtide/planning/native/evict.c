/* Moves that evict an idle block and rematerialize it before its next read. */

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

/* A random remat of a storage that serves some classes of readers; -1 where there is none. */
static int some_remat(State *state, int storage, int classes) {
    const Problem *p = state->p;
    const int32_t *remats = p->remats + p->remat_ptr[storage];
    const int count = p->remat_ptr[storage + 1] - p->remat_ptr[storage];
    if (!is_split(state, storage)) return remats[pick(state, count)];
    int fitting = 0;
    for (int i = 0; i < count; i++) fitting += !(classes & ~classes_served(state, storage, remats[i]));
    if (!fitting) return -1;
    int left = pick(state, fitting);
    for (int i = 0;; i++)
        if (!(classes & ~classes_served(state, storage, remats[i])) && !left--) return remats[i];
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
        if (p->remat_ptr[s] == p->remat_ptr[s + 1] || is_there(state, s, at, target, p->read_classes[j]) || draw(state) > chain)
            continue;
        const int remat = some_remat(state, s, p->read_classes[j]);
        if (remat < 0 || state->mark[remat] == state->stamp || !may_stand(state, target, remat)) continue;
        gather(state, at, target, remat, depth + 1, chain);
    }
    state->gathered[state->num_gathered++] = op;
}

/* Rematerialize a storage right before event `target`. A storage that this needs and that is not live at event `at`
   is rematerialized as well, with probability `chain`. The classes of readers that this serves. */
static int rematerialize(State *state, int storage, int classes, int at, int target, double chain) {
    if (target == TAIL) return 0;
    const int remat = some_remat(state, storage, classes);
    if (remat < 0 || !may_stand(state, target, remat)) return 0;
    state->stamp++;
    state->num_gathered = 0;
    gather(state, at, target, remat, 0, chain);
    const int first = state->num_changes;
    for (int j = 0; j < state->num_gathered; j++) insert_remat(state, state->gathered[j], target);
    const int last = state->num_changes;
    for (int j = first; j < last && !full(state); j++) {
        const int e = state->journal[j].event;
        if (!state->journal[j].inserted || state->events[e].op != state->journal[j].op) continue;
        if (is_needless(state, e)) discard(state, e);
        else discard_behind(state, e);
    }
    return classes_served(state, storage, remat);
}

/* Evict all blocks of a split storage that are idle at event `at`; whether there was any. */
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
        const int served = rematerialize(state, storage, mine->items[j].classes & idle, at, mine->items[j].event, chain);
        if (!served) break;
        idle &= ~served;
    }
    return 1;
}

/* Evict a block that is idle at event `at`: rematerialize it right before its next read. */
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
        if (rematerialize(state, chosen, 1, at, mine->items[i].event, chain)) return;
    }
}
