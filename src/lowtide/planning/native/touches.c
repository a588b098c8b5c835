/* The events that make and read a storage, in order: its live ranges, and the views that are taken of it. */

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

/* Seconds of the views that are read of the block around place `i` of a storage, if a remat made that block. */
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

/* Whether some remats of a storage serve some of its readers only. Each reader reads the latest
   block that serves it, so that several blocks are live side by side. */
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
