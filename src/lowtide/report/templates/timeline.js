// Memory over the step: one way to run it stacked by kind, the other as a line over it.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("timeline-chart");
  const page = JSON.parse(document.getElementById("report-data").textContent);
  if (!box || !page.timeline) return;
  const data = page.timeline;
  const names = data.names;
  const [ops, modules, sources] = [data.ops, data.modules, data.sources].map(Decode.strings);
  const regions = Decode.integers(data.regions);
  const numKinds = page.kinds.length;

  const load = (packed) => {
    const order = Decode.integers(packed.order);
    const kinds = packed.kinds.map(Decode.integers);
    const again = Decode.strings(packed.methods);
    const seconds = Decode.integers(packed.ns).map((ns) => ns / 1e9);
    const waits = packed.waits ? Decode.integers(packed.waits).map((ns) => ns / 1e9) : seconds.map(() => 0);
    const start = [0];
    seconds.forEach((s, i) => start.push(start[i] + s + (waits[i + 1] || 0)));
    const moved = packed.transfers || { node: "", write: "", bytes: "", begin: "", end: "", asked: "", awaited: "" };
    const [moves, writes, sizes, begin, end, asked, awaited] =
      ["node", "write", "bytes", "begin", "end", "asked", "awaited"].map((key) => Decode.integers(moved[key]));
    const transfers = moves.map((node, i) => ({
      node, write: writes[i], bytes: sizes[i],
      time: [begin[i] / 1e9, end[i] / 1e9], order: [asked[i], Math.max(asked[i] + 1, awaited[i])],
    }));
    const total = order.map((_, i) => kinds.reduce((sum, kind) => sum + kind[i], 0));
    return { order, kinds, again, seconds, start, waits, transfers, total, peak: packed.peak, label: packed.label };
  };
  const before = load(data.before);
  const after = data.after ? load(data.after) : null;
  const longest = after || before;

  // Position of every run of the baseline in the schedule with recomputes: there the baseline waits for them.
  const aligned = () => {
    const own = before.order.map((_, i) => i);
    if (!after) return own;
    const first = new Map();
    after.order.forEach((rank, i) => first.has(rank) || first.set(rank, i));
    const positions = before.order.map((rank) => first.get(rank));
    return positions.every((p, i) => p !== undefined && (!i || p > positions[i - 1])) ? positions : own;
  };
  const axes = {
    time: { before: before.start.slice(0, -1), after: after && after.start.slice(0, -1), end: longest.start.at(-1) },
    order: { before: aligned(), after: after && after.order.map((_, i) => i), end: longest.order.length },
  };

  let axis = "time", stacked = after || before, shown = null, current = 0, pinned = null;
  let xs, positionBefore, positionAfter;
  const other = () => (stacked === before ? after : before);
  const merge = () => {
    const at = axes[axis];
    xs = []; positionBefore = []; positionAfter = [];
    let b = 0, a = 0;
    const numAfter = after ? after.order.length : 0;
    while (b < before.order.length || a < numAfter) {
      const xb = b < before.order.length ? at.before[b] : Infinity;
      const xa = a < numAfter ? at.after[a] : Infinity;
      xs.push(Math.min(xb, xa));
      if (xb <= xa) b++;
      if (xa <= xb) a++;
      positionBefore.push(Math.max(0, b - 1));
      positionAfter.push(Math.max(0, a - 1));
    }
    xs.push(at.end); positionBefore.push(before.order.length - 1); positionAfter.push(Math.max(0, numAfter - 1));
  };
  const positions = (run) => (run === before ? positionBefore : positionAfter);
  // A timeline that has ended has nothing more to show.
  const ended = (run, i) => axis === "time" && xs[i] >= run.start.at(-1) && run !== longest;
  const series = () => {
    const columns = [xs];
    const at = positions(stacked);
    const sums = stacked.total.map(() => 0);
    const stack = stacked.kinds.map((kind) => kind.map((n, i) => (sums[i] += n)));
    for (let k = numKinds - 1; k >= 0; k--) columns.push(at.map((p, i) => (ended(stacked, i) ? null : stack[k][p])));
    const line = other();
    if (line) columns.push(positions(line).map((p, i) => (ended(line, i) ? null : line.total[p])));
    return columns;
  };
  const highestPeak = Math.max(...[before, after].filter(Boolean).map((run) => run.total[run.peak]));
  // A budget far above the peaks would leave them no room; its line is then out of sight.
  const showsBudget = data.budget && data.budget <= 2 * highestPeak;
  const highest = Math.max(highestPeak, showsBudget ? data.budget : 0) * 1.08;
  // Below the memory, one lane for each direction of the link to the store.
  const lowest = after && after.transfers.length ? -0.14 * highest : 0;
  const lanes = [["to the store", 1], ["from the store", 0]];

  // Words at the first of their spots (left end, base line) where none stand yet.
  let written = [];
  const write = (u, text, spots) => {
    const ctx = u.ctx, width = ctx.measureText(text).width, height = 15 * devicePixelRatio;
    const apart = (a, b) => a.x + a.width < b.x || b.x + b.width < a.x || Math.abs(a.y - b.y) >= height;
    const fitting = spots.map(([x, y]) => ({
      x: Math.max(u.bbox.left, Math.min(x, u.bbox.left + u.bbox.width - width)), y, width,
    }));
    const spot = fitting.find((one) => written.every((other) => apart(one, other))) || fitting[0];
    written.push(spot);
    ctx.textAlign = "left";
    ctx.strokeStyle = Theme.colour("--card");
    ctx.lineWidth = 4 * devicePixelRatio;
    ctx.strokeText(text, spot.x, spot.y);
    ctx.fillText(text, spot.x, spot.y);
  };
  const mark = (u, x, y, text, colour) => {
    const ctx = u.ctx, px = u.valToPos(x, "x", true), py = u.valToPos(y, "y", true);
    if (px < u.bbox.left || px > u.bbox.left + u.bbox.width) return;
    ctx.fillStyle = colour;
    ctx.strokeStyle = Theme.colour("--card");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.beginPath(); ctx.arc(px, py, 5 * devicePixelRatio, 0, 7); ctx.fill(); ctx.stroke();
    const left = px - ctx.measureText(text).width / 2, below = py + 20 * devicePixelRatio;
    write(u, text, [[left, py - 10 * devicePixelRatio], [left, below], [px + 8 * devicePixelRatio, below]]);
  };
  const dashed = (u, x0, y0, x1, y1, colour) => {
    const ctx = u.ctx;
    ctx.strokeStyle = colour; ctx.lineWidth = devicePixelRatio; ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); ctx.setLineDash([]);
  };
  const spans = (run) => {
    const at = axes[axis][run === before ? "before" : "after"];
    const firsts = data.region_names.map((_, region) =>
      run.order.findIndex((rank, i) => regions[rank] === region && !run.again[i]));
    return firsts.map((first, region) => {
      const next = firsts.slice(region + 1).find((f) => f >= 0);
      return first < 0 ? null : { name: data.region_names[region], from: at[first], to: next ? at[next] : axes[axis].end };
    }).filter(Boolean);
  };
  const decorate = (u) => {
    const ctx = u.ctx, { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
    for (const [i, span] of spans(stacked).entries()) {
      const x = u.valToPos(span.from, "x", true), end = u.valToPos(span.to, "x", true);
      if (i && x > left && x < left + width) dashed(u, x, top, x, top + height, Theme.colour("--muted"));
      const from = Math.max(x, left), room = Math.min(end, left + width) - from;
      ctx.fillStyle = Theme.colour("--muted"); ctx.textAlign = "left";
      if (room > ctx.measureText(span.name).width + 8 * devicePixelRatio) {
        ctx.fillText(span.name, from + 4 * devicePixelRatio, top - 7 * devicePixelRatio);
      }
    }
    if (showsBudget) {
      const y = u.valToPos(data.budget, "y", true);
      dashed(u, left, y, left + width, y, Theme.colour("--bad"));
    }
    for (const [lane, [words, write]] of lowest ? lanes.entries() : []) {
      const y = u.valToPos(lowest * (0.28 + 0.48 * lane), "y", true), thick = 9 * devicePixelRatio;
      ctx.fillStyle = page.directions[words];
      for (const transfer of after.transfers) {
        if (transfer.write !== write) continue;
        const [from, to] = transfer[axis].map((x) => Math.max(left, Math.min(left + width, u.valToPos(x, "x", true))));
        if (to > from) ctx.fillRect(from, y, Math.max(to - from, devicePixelRatio), thick);
      }
      ctx.textAlign = "left"; ctx.strokeStyle = Theme.colour("--card"); ctx.lineWidth = 4 * devicePixelRatio;
      const at = left + 4 * devicePixelRatio, base = y + thick;
      if (!after.transfers.some((t) => t.write === write && u.valToPos(t[axis][0], "x", true) < at + ctx.measureText(words).width && u.valToPos(t[axis][1], "x", true) > left)) {
        ctx.fillText(words, at, base);
      } else {
        const side = left + width - ctx.measureText(words).width - 4 * devicePixelRatio;
        ctx.strokeText(words, side, base);
        ctx.fillText(words, side, base);
      }
    }
    if (pinned !== null) {
      const x = u.valToPos(xs[pinned], "x", true);
      if (x >= left && x <= left + width) {
        ctx.strokeStyle = Theme.colour("--ink"); ctx.lineWidth = 2 * devicePixelRatio;
        ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      }
    }
    written = [];
    for (const run of [before, after].filter(Boolean)) {
      const x = axes[axis][run === before ? "before" : "after"][run.peak];
      mark(u, x, run.total[run.peak], Format.bytes(run.total[run.peak]), Theme.colour(run === before ? "--before" : "--accent"));
    }
    if (showsBudget) {
      const y = u.valToPos(data.budget, "y", true), gap = 6 * devicePixelRatio;
      const [above, below] = [y - gap, y + 2.6 * gap], near = left + gap, far = left + width;
      ctx.fillStyle = Theme.colour("--bad");
      write(u, "budget " + Format.bytes(data.budget), [[far, above], [near, above], [far, below], [near, below]]);
    }
    ctx.restore();
  };

  const stepped = uPlot.paths.stepped({ align: 1 });
  const height = () => (innerWidth < 700 ? 300 : 400);
  const kindSeries = [];
  for (let k = numKinds - 1; k >= 0; k--) {
    kindSeries.push({ label: page.kinds[k].label, fill: page.kinds[k].colour, width: 0, paths: stepped, points: { show: false } });
  }
  const lineSeries = after ? [{
    label: "total", width: 1.5, paths: stepped, points: { show: false },
    stroke: () => Theme.colour(stacked === before ? "--accent" : "--before"),
  }] : [];
  merge();
  const chart = new uPlot({
    width: box.clientWidth, height: height(), padding: [26, 32, 0, 0], legend: { show: false },
    scales: { x: { time: false }, y: { range: () => [lowest, highest] } },
    cursor: { drag: { x: true, y: false }, y: false, points: { show: false } },
    series: [{}, ...kindSeries, ...lineSeries],
    axes: [
      chartAxis({ space: 72, values: (u, splits) => splits.map((x) => (axis === "time" ? (x ? Format.seconds(x) : "0") : String(x))) }),
      byteAxis({ size: 74 }),
    ],
    hooks: {
      draw: [decorate],
      setCursor: [(u) => u.cursor.left >= 0 && show(floor(u.posToVal(u.cursor.left, "x")))],
      setScale: [(u, key) => key === "x" && describe(u)],
    },
  }, series(), box);

  // The last run that has started at x: runs of no duration share their start with the one after them.
  const floor = (x) => {
    let low = 0, high = xs.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle - 1;
    }
    return low;
  };
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const describeRun = (run, position, label) => {
    const rank = run.order[position], again = run.again[position];
    const part = element("div");
    part.append(element("h3", label));
    const list = element("dl");
    const seconds = run.seconds[position], wait = run.waits[position];
    const rows = [
      ["node", names[rank] + (again ? ` (${again})` : "")],
      ["op", `${ops[rank]}, ${data.region_names[regions[rank]]}, rank ${rank}, ${Format.seconds(seconds)}${wait ? `, after waiting ${Format.seconds(wait)} for the store` : ""}`],
      ["module", modules[rank] || "–"],
      ["source", sources[rank] || "–"],
    ];
    for (const [key, value] of rows) list.append(element("dt", key), element("dd", value, key === "op" ? "" : "mono"));
    part.append(list);
    return part;
  };
  const who = document.getElementById("timeline-who");
  const cells = [...document.querySelectorAll("#timeline-kinds [data-run]")];
  const show = (i) => {
    if (i === shown) return;
    shown = current = i;
    if (pinned === null) tell();
    const runs = after ? [["before", before, positionBefore[i]], ["after", after, positionAfter[i]]] : [["before", before, positionBefore[i]]];
    const [first, second] = runs.map(([, run, p]) => ({ run, p }));
    const same = second && first.run.order[first.p] === second.run.order[second.p] && !second.run.again[second.p];
    who.replaceChildren(...(same ? [describeRun(after, second.p, "baseline and plan")] : runs.map(([, run, p]) => describeRun(run, p, run.label))));
    for (const cell of cells) {
      const found = runs.find(([key]) => key === cell.dataset.run);
      if (!found) continue;
      const [, run, p] = found;
      cell.textContent = Format.bytes(cell.dataset.kind === "total" ? run.total[p] : run.kinds[cell.dataset.kind][p]);
    }
  };
  // The section of live tensors follows the cursor, or stays at the pinned time point.
  const tell = () => {
    const position = positions(stacked)[pinned ?? current];
    const detail = { key: stacked === before ? "before" : "after", position, seconds: stacked.start[position], isPinned: pinned !== null, isPeak: position === stacked.peak };
    document.dispatchEvent(new CustomEvent("lowtide:time", { detail }));
  };
  const pin = (i) => { pinned = i; tell(); chart.redraw(false); };
  const range = document.getElementById("timeline-range");
  const describe = (u) => {
    const { min, max } = u.scales.x, whole = axes[axis].end;
    const all = min <= 0 && max >= whole * 0.9999;
    const text = axis === "time" ? Format.seconds : (x) => Math.round(x);
    range.textContent = all
      ? (axis === "time" ? `whole step, ${Format.seconds(whole)} (simulated)` : `whole step, ${whole} runs`)
      : (axis === "time" ? `${text(min)} to ${text(max)}` : `runs ${text(min)} to ${text(max)}`);
  };
  const zoom = (min, max) => chart.setScale("x", { min, max });
  const peakIndex = (run) => {
    const at = positions(run);
    return at.indexOf(run.peak);
  };
  const moveTo = (i) => {
    const x = xs[i], scale = chart.scales.x;
    if (x < scale.min || x > scale.max) zoom(x - (scale.max - scale.min) / 2, x + (scale.max - scale.min) / 2);
    // uPlot applies a new scale in a microtask; only after it does a value have its new place.
    queueMicrotask(() => {
      chart.setCursor({ left: chart.valToPos(x, "x"), top: 10 }, false);
      show(i);
    });
  };
  const reset = () => { shown = null; pinned = null; zoom(0, axes[axis].end); show(peakIndex(stacked)); };
  // What is in sight stays in sight: the same ops, wherever they stand on the other axis.
  const redo = (change) => {
    const { min, max } = chart.scales.x;
    const all = min <= 0 && max >= axes[axis].end * 0.9999;
    const [from, to, at, pin] = [floor(min), floor(max), current, pinned ?? 0].map((i) => positions(longest)[i]);
    change();
    merge();
    chart.setData(series(), false);
    if (all && pinned === null) return reset();
    const index = (p) => positions(longest).findIndex((q) => q >= p);
    shown = null;
    if (pinned !== null) pinned = index(pin);
    if (all) zoom(0, axes[axis].end);
    else zoom(xs[index(from)], xs[Math.min(xs.length - 1, index(to) + 1)]);
    show(index(at));
    tell();
  };

  const press = (name, act) => {
    const buttons = [...document.querySelectorAll(`[data-${name}]`)];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset[name] === button.dataset[name]));
        act(button.dataset[name]);
      });
    }
  };
  press("axis", (value) => redo(() => { axis = value; }));
  press("stack", (value) => redo(() => { stacked = value === "before" ? before : after; }));
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const target = button.dataset.zoom;
      if (target === "all") return reset();
      if (target === "peak") {
        const i = peakIndex(stacked), reach = axes[axis].end / 40;
        zoom(Math.max(0, xs[i] - reach), Math.min(axes[axis].end, xs[i] + reach));
        return moveTo(i);
      }
      const span = spans(stacked).find((each) => each.name === target);
      if (span) zoom(span.from, span.to);
    });
  }
  // A click pins the time point; a drag zooms, and a second click lets it go.
  let downAt = null;
  box.addEventListener("mousedown", (event) => { downAt = event.clientX; });
  box.addEventListener("click", (event) => {
    if (downAt === null || Math.abs(event.clientX - downAt) > 3 || chart.cursor.left < 0) return;
    pin(pinned === current ? null : current);
  });
  document.getElementById("live-follow").addEventListener("click", () => pin(null));
  document.getElementById("live-peak").addEventListener("click", () => {
    pinned = null;
    moveTo(peakIndex(stacked));
    queueMicrotask(() => { tell(); chart.redraw(false); });
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") return pin(pinned === current ? null : current);
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: xs.length - 2 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moveTo(Math.max(0, Math.min(xs.length - 2, moves[event.key])));
  });
  Theme.onChange(() => chart.redraw(false));
  fitChart(chart, box, height);
  reset();
});
