/* Figures of a sequence, and the search for better ones. */

/* The figures of a sequence: excess over the budget, peak, and seconds added. Needless runs do not
   count. `order` gets the runs that are left, `held` the live bytes at each. Their number, or -1 without memory. */
int lowtide_evaluate(const Problem *p, int32_t *order, int length, int64_t budget, int64_t *held, Figures *figures) {
    State state;
    int left = -1;
    if (begin(&state, p, order, length, length + p->num_first + 8, budget, 1)) {
        left = write_order(&state, order);
        *figures = (Figures){state.excess, peak_of(&state), state.seconds};
        for (int e = next_of(&state, HEAD); e != TAIL; e = next_of(&state, e)) *held++ = held_at(&state, e);
    }
    end(&state);
    return left;
}

/* Anneal the sequence in `order`, which has `room` places; the best one met takes its place: first by
   excess, then by seconds, of those that add at least `least_seconds`. Ends before all `moves` where one within
   the budget adds no more than `enough_seconds`. Its length, or -1 without memory. */
int lowtide_anneal(const Problem *p, int32_t *order, int length, int room, int64_t budget, int64_t moves, double heat,
                   uint64_t seed, double least_seconds, double enough_seconds, double reorder, Figures *figures) {
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
    *figures = (Figures){best_excess, failed ? 0 : peak_of(&state), best_seconds};
    end(&state);
    return failed ? -1 : best_length;
}
