/* Minimum cuts. */

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
